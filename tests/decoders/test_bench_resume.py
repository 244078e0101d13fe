"""A benchmark that is killed goes on where it stopped, with the same counts, and only if nothing else has changed."""

import errno
import json
import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch

from decoders import Autoregressive, LoopSpec, Sampling, Wavefront
from decoders import bench_journal
from decoders.bench import bench
from decoders.bench_journal import FACTS, GROUPS, Journal
from loopscope.errors import RunFolderError
from loopscope.random_models import make_random_core

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [5, 5, 5]]
MODEL = {"gain": 0.2, "depth": 4, "n_core": 1}
SETTINGS = {"task": "made-up", "max_new_tokens": 8, "repeats": 2}
KILLED = """
import os, signal, sys, torch
from decoders import LoopSpec, Wavefront, bench_journal
from decoders.bench import bench
from decoders.bench_journal import Journal
from loopscope.random_models import make_random_core

class Deadly(Wavefront):
    calls = 0
    def generate(self, *args, **options):
        Deadly.calls += 1
        if Deadly.calls == 1 + 5:  # the warm-up, four decodes, and then in the middle of the fifth prompt
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(*args, **options)

torch.set_num_threads(1)
bench_journal.code_hash = lambda: "the same"
with Journal(sys.argv[1]) as journal:
    bench(make_random_core("huginn", **{model}), {prompts}, [Deadly(1), LoopSpec(1, 2)], journal=journal, **{settings})
"""


class Counting(Wavefront):
    """Counts its decodes; the same decoder otherwise."""

    calls = 0

    def generate(self, *args, **options):
        type(self).calls += 1
        return super().generate(*args, **options)


@pytest.fixture(scope="module")
def core():
    return make_random_core("huginn", **MODEL)


@pytest.fixture(scope="module")
def undisturbed(core):
    return bench(core, PROMPTS, [Wavefront(1), LoopSpec(1, 2)], **SETTINGS)


@pytest.fixture
def counting():
    Counting.calls = 0
    return [Counting(1), LoopSpec(1, 2)]


def same_but_for_time(a, b) -> None:
    timed = ["prefill_seconds", "decode_seconds"]
    pd.testing.assert_frame_equal(a.frame.drop(columns=timed), b.frame.drop(columns=timed))
    pd.testing.assert_frame_equal(a.acceptance.frame, b.acceptance.frame)
    pd.testing.assert_frame_equal(a.by_depth.frame, b.by_depth.frame)
    assert (a.frame[timed] > 0).all().all()


def stopped(folder, core, groups: int) -> None:
    """A journal with so many finished groups."""
    class Stop(Exception):
        pass

    def stop(done, total, label):
        if done == groups * 3 + 1:
            raise Stop

    with pytest.raises(Stop), Journal(folder) as journal:
        bench(core, PROMPTS, [Wavefront(1), LoopSpec(1, 2)], journal=journal, progress=stop, **SETTINGS)


def test_killed_in_the_middle_and_taken_up_again_it_gives_the_same_counts(core, undisturbed, counting, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_journal, "code_hash", lambda: "the same")
    code = KILLED.replace("{model}", repr(MODEL)).replace("{prompts}", repr(PROMPTS)).replace("{settings}", repr(SETTINGS))
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "x.partial"], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    kept = (tmp_path / "x.partial" / GROUPS).read_bytes().splitlines()
    assert [(json.loads(line)["prompt"], json.loads(line)["repeat"]) for line in kept] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    with Journal(tmp_path / "x.partial") as journal:  # the lock of a killed process is free
        result = bench(core, PROMPTS, counting, journal=journal, **SETTINGS)
        assert result.meta["sittings"] == 2
        journal.discard()
    assert Counting.calls == 1 + 2  # the warm-up and the two prompts that were missing
    same_but_for_time(result, undisturbed)
    first = json.loads(kept[0])["rows"]
    assert result.frame.decode_seconds[:3].tolist() == [row[9] for row in first]  # the seconds that were measured then
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", [1, 10**9])
def test_what_was_half_written_is_decoded_again(core, undisturbed, counting, tmp_path, lost):
    stopped(tmp_path / "x", core, 3)
    file = tmp_path / "x" / GROUPS
    last = file.read_bytes().splitlines(keepends=True)[-1]
    os.truncate(file, file.stat().st_size - min(lost, len(last) - 1))
    with Journal(tmp_path / "x") as journal:
        result = bench(core, PROMPTS, counting, journal=journal, **SETTINGS)
        assert len(file.read_bytes().splitlines()) == 6 and all(json.loads(line) for line in file.read_bytes().splitlines())
    assert Counting.calls == 1 + 4
    same_but_for_time(result, undisturbed)


def test_a_finished_journal_is_read_without_decoding(core, undisturbed, counting, tmp_path):
    told = []
    for _ in range(2):
        with Journal(tmp_path / "x") as journal:
            result = bench(core, PROMPTS, counting, journal=journal, progress=lambda *now: told.append(now), **SETTINGS)
    assert Counting.calls == 1 + 6
    assert told[-1] == (18, 18, "") and [done for done, _, _ in told] == [*range(1, 19), *range(3, 19, 3)]
    same_but_for_time(result, undisturbed)


OTHER = {
    "max_new_tokens was 8, is 9": {"max_new_tokens": 9}, "seed was 0, is 3": {"seed": 3}, "repeats was 2, is 1": {"repeats": 1},
    "task was made-up, is": {"task": "other"}, "depth was 4, is 3": {"depth": 3},
    "start_state was not said, is zero": {"start_state": "zero"}, "sampling was None, is Sampling": {"sampling": Sampling(temperature=0.5)},
    "model was random-huginn, is twin": {"model_name": "twin"},
    "prompt tokens was": {"prompts": [*PROMPTS[:2], [5, 5, 6]]}, "prompts was 3, is 2": {"prompts": PROMPTS[:2]},
    "decoders was": {"decoders": [Wavefront(2)]},
}


@pytest.mark.parametrize("said", OTHER)
def test_anything_else_is_refused_and_nothing_is_lost(core, tmp_path, said):
    stopped(tmp_path / "x", core, 2)
    before = (tmp_path / "x" / GROUPS).read_bytes()
    changed = {"prompts": PROMPTS, "decoders": [Wavefront(1), LoopSpec(1, 2)], **SETTINGS, **OTHER[said]}
    with pytest.raises(RunFolderError) as refused, Journal(tmp_path / "x") as journal:
        bench(core, journal=journal, **changed)
    assert said in str(refused.value) and "holds 2 finished passes over a prompt" in str(refused.value) and "--fresh" in str(refused.value)
    assert (tmp_path / "x" / GROUPS).read_bytes() == before


def test_other_weights_code_or_threads_are_refused_too(core, tmp_path, monkeypatch):
    stopped(tmp_path / "x", core, 1)

    def refused(model, said):
        with pytest.raises(RunFolderError, match=said), Journal(tmp_path / "x") as journal:
            bench(model, PROMPTS, [Wavefront(1), LoopSpec(1, 2)], journal=journal, **SETTINGS)

    twin = make_random_core("huginn", **MODEL)
    with torch.no_grad():
        next(p for p in twin.parameters() if p.ndim == 2)[0, 0] += 1e-6
    refused(twin, "weights was")
    refused(make_random_core("huginn", **MODEL, dtype=torch.float32), "dtype was torch.float64, is torch.float32")
    monkeypatch.setattr(bench_journal, "code_hash", lambda: "other")
    refused(core, "code was .*, is other")
    monkeypatch.undo()
    known = json.loads((tmp_path / "x" / FACTS).read_text())
    known["facts"]["machine"] = "an abacus"
    (tmp_path / "x" / FACTS).write_text(json.dumps(known))
    refused(core, "machine was an abacus, is")


def test_settings_that_a_label_leaves_out_are_compared(core, tmp_path):
    class Hidden(Wavefront):
        def __init__(self, knob):
            super().__init__(1)
            self.knob = knob

    with pytest.raises(RunFolderError, match='decoders was .*"knob": 1.* is .*"knob": 2'):
        for knob in (1, 2):
            with Journal(tmp_path / "x") as journal:
                bench(core, PROMPTS[:1], [Hidden(knob)], max_new_tokens=3, journal=journal)


def test_two_runs_into_one_folder_refuse_each_other(core, tmp_path):
    with Journal(tmp_path / "x") as journal:
        with pytest.raises(RunFolderError, match=f"in use by another run .process {os.getpid()} on "), Journal(tmp_path / "x", fresh=True):
            pass
        assert len(bench(core, PROMPTS, [], max_new_tokens=3, journal=journal).frame) == 3  # the first is not disturbed
    with Journal(tmp_path / "x"):  # and once it has ended its folder is free
        pass


def test_fresh_throws_away_what_was_there(core, undisturbed, counting, tmp_path):
    stopped(tmp_path / "x", core, 3)
    with Journal(tmp_path / "x", fresh=True) as journal:
        result = bench(core, PROMPTS, counting, journal=journal, **SETTINGS)
    assert Counting.calls == 1 + 6 and result.meta["sittings"] == 1
    same_but_for_time(result, undisturbed)


def test_a_folder_of_someone_elses_is_refused_and_left_alone(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "precious").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(RunFolderError, match="holds precious; choose another --out"), Journal(tmp_path / "x", fresh=fresh):
            pass
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["precious"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be made or locked"), Journal(tmp_path / "file" / "x"):
        pass


NOT_GROUPS = [b"{}\n", b"{\n", b"[]\n", b"\0" * 9 + b"\n", b"[" * 10**5 + b"\n",
              b'{"prompt": 0, "repeat": 0, "rows": [1], "places": [], "depths": [], "tokens": {}}\n']


@pytest.mark.parametrize("line", NOT_GROUPS)
def test_damage_is_named_where_more_was_written_behind_it_and_cut_off_at_the_end(core, tmp_path, line):
    stopped(tmp_path / "x", core, 2)
    file = tmp_path / "x" / GROUPS
    good = file.read_bytes()
    file.write_bytes(good + line)
    stopped(tmp_path / "x", core, 3)  # goes on from the two that are whole
    assert file.read_bytes().startswith(good) and len(file.read_bytes().splitlines()) == 3
    file.write_bytes(line + good)
    with pytest.raises(RunFolderError, match="groups.jsonl, line 1 is damaged.*--fresh"):
        stopped(tmp_path / "x", core, 3)
    for text in ("", "{}", "[]", "nothing"):
        (tmp_path / "x" / FACTS).write_text(text)
        with pytest.raises(RunFolderError, match="facts.json should say.*--fresh"):
            stopped(tmp_path / "x", core, 3)


def test_nothing_is_left_where_nothing_was_measured(core, tmp_path):
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "deep" / "x"):
        1 / 0  # noqa: B018
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_full_disk_is_said_and_what_was_measured_is_kept(core, undisturbed, counting, tmp_path, monkeypatch):
    stopped(tmp_path / "x", core, 2)
    real = os.write

    def full(file, data):
        if len(data) > 200:
            real(file, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as patch, pytest.raises(RunFolderError, match="No space left on device; what was measured before is kept"):
        patch.setattr(os, "write", full)
        stopped(tmp_path / "x", core, 4)
    with Journal(tmp_path / "x") as journal:
        same_but_for_time(bench(core, PROMPTS, counting, journal=journal, **SETTINGS), undisturbed)
    assert Counting.calls == 1 + 4


def test_every_prompt_is_on_the_disk_before_the_next_is_decoded(core, tmp_path, monkeypatch):
    happened = []

    class Noted(Autoregressive):
        def generate(self, *args, **options):
            happened.append("decode")
            return super().generate(*args, **options)

    real = os.fsync
    with Journal(tmp_path / "x") as journal:
        monkeypatch.setattr(os, "fsync", lambda file: (happened.append("fsync"), real(file)))
        bench(core, PROMPTS, [Noted()], max_new_tokens=2, journal=journal)
    # the folder, the warm-up, three prompts
    assert happened == ["fsync", "decode", "decode", "fsync", "decode", "fsync", "decode", "fsync"]
