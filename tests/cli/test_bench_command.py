"""`loopscope bench`: prompts from files, runs that are broken off, and all definitions of speedup."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from decoders import bench_journal
from decoders.bench import HEADLINE, SPEEDUPS
from loopscope.cli.bench import DEFINITIONS


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(5)))
    return path


@pytest.fixture
def one_code(monkeypatch):
    """The code's hash stays what it is while a test runs, whoever edits it."""
    monkeypatch.setattr(bench_journal, "code_hash", lambda: "the same")


def refused(result, *words):
    assert result.exit_code == 2, (result.exit_code, result.stderr, result.exception)
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in error, error


def counts(folder) -> pd.DataFrame:
    return pd.read_parquet(folder / "tables" / "bench.parquet").drop(columns=["prefill_seconds", "decode_seconds"])


def test_a_suite_is_read_asked_and_named_in_the_manifest(loopscope, folder, gsm8k, tmp_path):
    result = loopscope("bench", folder(), "--suite", gsm8k, "--shots", 2, "--limit", 2, "--max-new-tokens", 4, "--decoder", "wfd",
                       "--repeats", 1, "--out", tmp_path / "b")
    assert result.exit_code == 0, result.stderr
    assert "2 prompts (gsm8k), each behind 2 worked examples from its first rows" in result.stderr
    assert "2 prompts (gsm8k), 4 new tokens" in result.stdout
    frame = counts(tmp_path / "b")
    assert set(frame.task) == {"gsm8k"} and set(frame.prompt) == {0, 1} and frame.token_mismatches.sum() == 0
    facts = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert facts["prompts"]["ids"] == ["line 3", "line 4"] and facts["prompts"]["shots"] == 2 and len(facts["prompts"]["sha256"]) == 64
    assert "3?" not in json.dumps(facts["prompts"]) and facts["settings"]["max_new_tokens"] == 4
    depths = pd.read_parquet(tmp_path / "b" / "tables" / "acceptance_by_depth.parquet")
    assert set(depths.depth) == {1} and depths.compared.sum() == frame[frame.decoder == "WFD d=1"].proposed.sum()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["asked.jsonl", "b"]


def test_as_published_gives_the_papers_shots_and_new_tokens(loopscope, folder, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": "1"}) + "\n" for i in range(9)))
    refused(loopscope("bench", folder(), "--suite", path, "--as-published"), "1 of 1 prompts are longer than 1 ", "beside 512 new ones")
    result = loopscope("bench", folder(), "--suite", path, "--as-published", "--max-new-tokens", 3, "--decoder", "ar", "--repeats", 1)
    assert result.exit_code == 0 and "behind 8 worked examples" in result.stderr, result.stderr
    short = loopscope("bench", folder(), "--suite", path, "--as-published", "--truncate", "left", "--max-new-tokens", 500, "--limit", 1,
                      "--decoder", "ar", "--repeats", 1)
    assert "1 prompts lost tokens on the left: line 9 (" in short.stderr and "13 to 13 tokens" in short.stderr


def test_probes_and_interventions_read_suites_too(loopscope, folder, gsm8k):
    probed = loopscope("probe", folder(), "--suite", gsm8k, "--limit", 2)
    assert probed.exit_code == 0 and "2 prompts (gsm8k)" in probed.stdout, probed.stderr
    held = loopscope("factorial", folder(), "--suite", gsm8k, "--limit", 1, "--max-new-tokens", 4, "--rounds", 2)
    assert held.exit_code == 0 and "1 prompts (gsm8k)" in held.stdout, held.stderr
    changed = loopscope("intervene", folder(), "--suite", gsm8k, "--limit", 2)
    assert changed.exit_code == 0 and "2 prompts (gsm8k)" in changed.stdout, changed.stderr


def test_suites_that_cannot_be_used(loopscope, folder, gsm8k, tmp_path):
    refused(loopscope("bench", folder(), "--limit", 2, "--shots", 1), "--limit, --shots can only be used with --suite FILE")
    refused(loopscope("bench", folder(), "--suite", gsm8k, "--prompt", "a"), "--suite and --prompt both")
    refused(loopscope("bench", folder(), "--suite", tmp_path / "none"), "does not exist")
    refused(loopscope("bench", folder(), "--suite", gsm8k, "--suite-format", "mbpp"), "line 1", "needs text or prompt, code, test_list")
    refused(loopscope("bench", folder(), "--suite", gsm8k, "--truncate", "middle"), "'middle'")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    refused(loopscope("bench", folder(), "--suite", tmp_path / "chat.jsonl"), "prompt line 1", "without a chat template")
    refused(loopscope("bench", folder(), "--suite", tmp_path / "chat.jsonl", "--as-published"), "nothing is published", "chat")
    refused(loopscope("bench", folder(), "--fresh"), "--fresh", "--out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["asked.jsonl", "chat.jsonl"]


def test_all_definitions_are_printed_by_name_each_with_its_numbers(loopscope, folder):
    assert set(DEFINITIONS) == {*SPEEDUPS, HEADLINE}
    command = ["bench", folder(), "--prompt", "one", "--prompt", "two", "--decoder", "wfd", "--max-new-tokens", 4]
    plain, result = loopscope(*command), loopscope(*command, "--all-definitions")
    assert result.exit_code == 0, result.stderr
    for name in DEFINITIONS:
        assert name not in plain.stdout
        lines = result.stdout[result.stdout.index(f"\n{name}:") :].strip().splitlines()
        assert lines[1].split() == ["decoder", name] and lines[2].split() == ["AR", "1.00", "[1.00,", "1.00]"]
        assert lines[3].startswith("WFD d=1") and lines[3].endswith("]")
    alone = loopscope("bench", folder(), "--prompt", "one", "--decoder", "wfd", "--max-new-tokens", 4, "--all-definitions")
    assert alone.exit_code == 0 and "[" not in alone.stdout and "nan" not in alone.stdout  # one prompt has no interval


COMMAND = ["--prompt", "one", "--prompt", "two", "--prompt", "three", "--decoder", "wfd", "--max-new-tokens", "5", "--repeats", "2"]
PATCHED = """
import os, signal, sys
from decoders import bench, bench_journal
bench_journal.code_hash = lambda: "the same"
real, seen = bench._timed, []
def timed(*args):
    seen.append(1)
    if len(seen) == 6:
        os.kill(os.getpid(), getattr(signal, {how!r}))
    return real(*args)
bench._timed = timed
from loopscope.cli import main
sys.argv = ["loopscope", "bench", {model!r}, *{command!r}, "--out", {out!r}]
main()
"""


@pytest.mark.parametrize("how, code", [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", 143)])
def test_broken_off_the_same_command_goes_on_and_another_is_refused(loopscope, folder, tmp_path, one_code, how, code):
    out = tmp_path / "b"
    script = PATCHED.format(how=how, model=str(folder()), command=COMMAND, out=str(out))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["b.partial"] and "Traceback" not in run.stderr
    if how == "SIGINT":
        assert run.stderr.strip().splitlines()[-1].startswith("interrupted; 2 passes over a prompt are kept in ")
    refused(loopscope("bench", folder(), *COMMAND, "--seed", 1, "--out", out), "seed was 0, is 1", "--fresh")
    again = loopscope("bench", folder(), *COMMAND, "--out", out)
    assert again.exit_code == 0 and "going on: 2 of 6 passes over a prompt were decoded by an earlier run" in again.stderr, again.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert json.loads((out / "manifest.json").read_text())["settings"]["sittings"] == 2
    if how == "SIGKILL":
        assert loopscope("bench", folder(), *COMMAND, "--out", tmp_path / "c").exit_code == 0
        pd.testing.assert_frame_equal(counts(out), counts(tmp_path / "c"))
        refused(loopscope("bench", folder(), *COMMAND, "--out", out), "exists; choose another --out")


def test_fresh_begins_anew(loopscope, folder, tmp_path, one_code):
    script = PATCHED.format(how="SIGKILL", model=str(folder()), command=COMMAND, out=str(tmp_path / "b"))
    subprocess.run([sys.executable, "-c", script], capture_output=True)
    result = loopscope("bench", folder(), *COMMAND, "--seed", 1, "--fresh", "--out", tmp_path / "b")
    assert result.exit_code == 0 and "going on" not in result.stderr, result.stderr
    assert len(counts(tmp_path / "b")) == 12 and [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_folder_in_use_is_refused(loopscope, folder, tmp_path, one_code):
    with bench_journal.Journal(tmp_path / "b.partial"):
        refused(loopscope("bench", folder(), *COMMAND, "--out", tmp_path / "b"), "b.partial is in use", str(os.getpid()))
    assert list(tmp_path.iterdir()) == []
