"""Runs that several processes share equal those of one process, whatever is killed in between, and nothing else is merged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from loopscope import fingerprint
from loopscope.cli.app import app

TIMED = ("prefill_seconds", "decode_seconds")
BENCH = ("--prompt", "Q: 1+1", "--prompt", "abc abc abc", "--prompt", "x = 12", "--decoder", "wfd", "--decoder", "pld",
         "--max-new-tokens", "6", "--repeats", "2")
# What torchrun starts: the command line, with a code hash that an edit meanwhile does not change, and a death by order.
WORKER = """
import os, signal
from loopscope import fingerprint, journal
fingerprint.code_hash = lambda *rooms: "the same"
add, count = journal.Journal.add, 0
def deadly(self, entry):
    global count
    count += 1
    if os.environ["RANK"] == "0" and count == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)  # measured, and not yet kept: the prompt in hand
    add(self, entry)
journal.Journal.add = deadly
from loopscope.cli import main
main()
"""


def same_tables(one: Path, other: Path) -> None:
    """The same tables with the same rows in the same order; seconds were measured, and only have to be there."""
    names = sorted(path.name for path in (one / "tables").iterdir())
    assert names == sorted(path.name for path in (other / "tables").iterdir()) and names
    for name in names:
        a, b = (pd.read_parquet(run / "tables" / name) for run in (one, other))
        timed = [column for column in TIMED if column in a]
        pd.testing.assert_frame_equal(a.drop(columns=timed), b.drop(columns=timed), check_exact=True)
        assert (b[timed] > 0).all().all()


@pytest.fixture
def as_process(loopscope, monkeypatch):
    """`as_process(rank, world, *words)`: a command as torchrun starts it, in this process."""
    monkeypatch.setattr(fingerprint, "code_hash", lambda *rooms: "the same")

    def run(rank, world, *words):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(world))
            return loopscope(*words)

    return run


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the figures, most of the time that a small run takes."""
    monkeypatch.setattr("loopscope.cli.study.draw", lambda tables, folder: None)


def done(result):
    assert result.exit_code == 0, result.stderr or result.exception
    return result


def test_two_processes_under_torchrun_one_killed_and_begun_again_equal_one_process(folder, loopscope, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    words = ["bench", str(folder()), *BENCH, "--out"]
    shared = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *words,
              str(tmp_path / "two runs")]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(shared, env={**quiet, "DIE_AT": "3"}, capture_output=True, text=True, timeout=300)
    assert killed.returncode != 0 and f"Signal {int(signal.SIGKILL)}" in killed.stderr, killed.stderr
    parts = tmp_path / "two runs.shards"
    kept = (parts / "shard-0-of-2.partial" / "groups.jsonl").read_bytes()
    assert kept.count(b"\n") == 2  # all but the one in hand
    incomplete = loopscope("merge", parts)
    assert incomplete.exit_code == 2 and "0 (unfinished)" in incomplete.stderr and "same command again" in incomplete.stderr
    again = subprocess.run(shared, env=quiet, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "going on: 2 of 4 passes over a prompt" in again.stderr and not list(parts.glob("*.partial"))
    done(loopscope("merge", parts))
    done(loopscope(*words, tmp_path / "one"))
    same_tables(tmp_path / "one", tmp_path / "two runs")
    assert sorted(p.name for p in (tmp_path / "one" / "figures").iterdir()) == sorted(p.name for p in
                                                                                     (tmp_path / "two runs" / "figures").iterdir())
    facts, alone = (json.loads((tmp_path / run / "manifest.json").read_text()) for run in ("two runs", "one"))
    assert facts["prompts"] == alone["prompts"] and facts["model"] == alone["model"]
    assert [shard["prompts"] for shard in facts["shards"]] == [[0, 2], [1]] and facts["shards"][0]["sittings"] == 2


@pytest.mark.parametrize("words", [("probe", "--new-tokens", "3"), ("intervene", "--new-tokens", "4", "--grid")],
                         ids=["probe", "intervene"])
def test_a_shared_study_equals_that_of_one_process(folder, loopscope, as_process, undrawn, tmp_path, words):
    command = [words[0], folder(), *words[1:], "--prompt", "Q: 1+1 = ", "--prompt", "abc abc abc", "--prompt", "x = 12 + 3", "--out"]
    for rank in (1, 0):  # in any order
        done(as_process(rank, 2, *command, tmp_path / "two"))
    done(loopscope("merge", tmp_path / "two.shards"))
    done(loopscope(*command, tmp_path / "one"))
    same_tables(tmp_path / "one", tmp_path / "two")


def test_a_study_that_died_measures_only_what_is_left(folder, as_process, tmp_path, monkeypatch):
    from loopscope.cli.shared import StudyJournal

    words = ["probe", folder(), "--prompt", "one, two", "--prompt", "three, four", "--prompt", "five, six", "--out", tmp_path / "x"]
    add, added = StudyJournal.add, []

    def stop(self, entry):
        if len(added) == 3:
            raise KeyboardInterrupt
        added.append((entry.prompt, entry.step))
        add(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(StudyJournal, "add", stop)
        broken = as_process(0, 2, *words)
    assert broken.exit_code == 130 and "3 finished measurements of a prompt are kept in" in broken.stderr
    monkeypatch.setattr(StudyJournal, "add", lambda self, entry: (added.append((entry.prompt, entry.step)), add(self, entry)))
    done(as_process(0, 2, *words))
    assert sorted(added) == sorted((prompt, step) for prompt in (0, 2) for step in ("convergence", "depth_lens"))
    done(as_process(1, 2, *words))
    before = len(added)
    repeated = done(as_process(1, 2, *words))  # complete: nothing is measured again
    assert len(added) == before and "process 1 of 2 is done" in repeated.stderr


def test_more_processes_than_prompts_and_one_process_alone(folder, loopscope, as_process, undrawn, tmp_path):
    words = ["bench", folder(), "--prompt", "Q: 1+1", "--decoder", "wfd", "--max-new-tokens", "3", "--repeats", "1", "--out"]
    for rank in (0, 1, 2):
        done(as_process(rank, 3, *words, tmp_path / "three"))
    done(loopscope("merge", tmp_path / "three"))  # without its suffix
    done(as_process(0, 1, *words, tmp_path / "one"))
    same_tables(tmp_path / "one", tmp_path / "three")


@pytest.fixture
def parts(folder, as_process, tmp_path):
    """The complete parts of a small shared benchmark."""
    for rank in (0, 1):
        done(as_process(rank, 2, "bench", folder(), *BENCH, "--out", tmp_path / "x"))
    return tmp_path / "x.shards"


def _edit(path: Path, change) -> None:
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def _rows(path: Path, change) -> None:
    from loopscope.records import read_table, write_table

    frame, meta = read_table(path)
    write_table(change(frame), path, meta)


def test_the_merge_refuses_what_is_not_exactly_one_run(parts, loopscope, undrawn, tmp_path):
    one, other = parts / "shard-0-of-2", parts / "shard-1-of-2"
    bench = "tables/bench.parquet"

    def twice(frame):
        return pd.concat([frame.iloc[:-1], frame.iloc[:1]])  # as many rows, one of them doubled

    damage = {
        "lacks 1 of 2 parts, those of process 1 (nothing)": lambda: shutil.rmtree(other),
        "also holds shard-0-of-3": lambda: shutil.copytree(one, parts / "shard-0-of-3"),
        "holds the part of process 0 of 2, not what its name says": lambda: (shutil.rmtree(other), shutil.copytree(one, other)),
        "holds prompt 0 more than once": lambda: _edit(other / "manifest.json", lambda m: m["shard"]["prompts"].append(0)),
        "holds prompt 2 not at all": lambda: _edit(one / "manifest.json", lambda m: m["shard"]["prompts"].remove(2)),
        "holds prompt 7 though the run has only 3": lambda: _edit(one / "manifest.json", lambda m: m["shard"]["prompts"].append(7)),
        "seed was 0, is 1": lambda: _edit(other / "manifest.json", lambda m: m["shard"]["facts"].update(seed=1)),
        "weights was": lambda: _edit(other / "manifest.json", lambda m: m["shard"]["facts"].update(weights="another")),
        "torch was": lambda: _edit(other / "manifest.json", lambda m: m["shard"]["facts"].update(torch="1.0")),
        "was not written by this version": lambda: _edit(other / "manifest.json", lambda m: m.update(schema=0)),
        "should say which prompts": lambda: _edit(other / "manifest.json", lambda m: m.pop("shard")),
        "rows, as its manifest says, found": lambda: _rows(other / bench, lambda f: f.iloc[:-1]),
        "which its manifest leaves to another process": lambda: _rows(other / bench, lambda f: f.assign(prompt=2)),
        "more than once; remove": lambda: _rows(other / bench, twice),
        "should all have the same tables": lambda: _edit(other / "manifest.json", lambda m: m["tables"].pop("bench")),
        "cannot be read as a parquet table": lambda: (other / bench).write_bytes(b"PAR1"),
        "manifest.json cannot be read": lambda: (other / "manifest.json").write_text("{"),
        "has no shards.json": lambda: (parts / "shards.json").unlink(),
        "shards.json cannot be read": lambda: (parts / "shards.json").write_text("["),
        "should say how many processes": lambda: (parts / "shards.json").write_text("{}"),
    }
    whole = tmp_path / "whole"
    shutil.copytree(parts, whole)
    for said, harm in damage.items():
        harm()
        result = loopscope("merge", parts, "--out", tmp_path / "merged")
        assert result.exit_code == 2 and said in result.stderr, (said, result.stderr, result.exception)
        assert "Traceback" not in result.stderr and not (tmp_path / "merged").exists()
        shutil.rmtree(parts)
        shutil.copytree(whole, parts)
    done(loopscope("merge", parts, "--out", tmp_path / "merged"))
    assert "exists" in loopscope("merge", parts, "--out", tmp_path / "merged").stderr
    assert "is no folder" in loopscope("merge", tmp_path / "nowhere").stderr


def test_what_may_not_be_shared_is_refused_before_anything_runs(folder, as_process, parts, tmp_path):
    run = ["bench", folder(), *BENCH, "--out", tmp_path / "x"]
    for rank, world, words, said in (
            (0, 3, run, "shared by 2 processes, not 3"),
            (1, 2, [*run, "--seed", "1"], "seed was 0, is 1"),
            (0, 2, [*run, "--fresh"], "--fresh is for a run in one process"),
            (0, 2, run[:-2], "add --out DIR"),
            (2, 2, run, "process 2 of 2 does not exist"),
            ("one", 2, run, "should be whole numbers"),
            (0, 2, ["decode", folder(), "x"], "runs in one process"),
            (0, 2, ["verify"], "verify has --workers"),
            (0, 2, ["report", folder(), "--out", tmp_path / "r"], "runs in one process")):
        result = as_process(rank, world, *words)
        assert result.exit_code == 2 and said in result.stderr, (said, result.stderr, result.exception)


def test_each_process_takes_its_own_card(monkeypatch):
    from loopscope.cli.shared import local_device

    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [local_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device("cuda") == "cuda"


def test_commands_name_the_devices_and_types_they_cannot_use(folder, loopscope):
    assert "'cuda:77' cannot be used here" in loopscope("decode", folder(), "x", "--device", "cuda:77").stderr
    assert "dtype 'int8' is unknown; use one of float32" in loopscope("probe", folder(), "--prompt", "xy", "--dtype", "int8").stderr
    assert done(loopscope("decode", folder(), "x", "--max-new-tokens", "2", "--dtype", "bfloat16", "--device", "cpu"))


def test_jobs_of_a_cluster_share_a_run(folder, loopscope, undrawn, tmp_path):
    pytest.importorskip("submitit")
    words = ["probe", folder(), "--prompt", "Q: 1+1 = ", "--prompt", "abc abc", "--out"]
    done(loopscope(*words, tmp_path / "one"))
    result = done(loopscope("submit", "--shards", 2, "--cluster", "local", "--wait", "--", *words, tmp_path / "jobs"))
    assert result.stdout.startswith("2 jobs: ") and "saved in" in result.stdout
    same_tables(tmp_path / "one", tmp_path / "jobs")
    for words, said in ((["decode", folder(), "x"], "add --out DIR"), (["report", "--out", tmp_path / "y"], "can be shared, not report"),
                        (["probe", "--out", tmp_path / "one"], "exists")):
        refused = loopscope("submit", "--cluster", "local", "--", *words)
        assert refused.exit_code == 2 and said in refused.stderr, refused.stderr


def test_help_names_both_commands(loopscope):
    assert "merge" in loopscope("--help").stdout and "submit" in loopscope("--help").stdout
    assert {"merge", "submit"} <= {command.callback.__name__ for command in app.registered_commands}
