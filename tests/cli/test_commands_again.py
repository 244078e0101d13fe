"""The commands that a report prints beside its figures measure the same rows again."""

import json
import re
import shlex
import shutil
from html import unescape

import pandas as pd
import pytest

from loopscope.cli import report
from loopscope.cli.report import Size


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A small report with a seed that is not the default, and the commands on its page."""
    out, before = tmp_path_factory.mktemp("runs") / "small", report.QUICK
    report.QUICK = Size(probe_prompts=2, grid_prompts=1, new_tokens=9, max_positions=5, bench_prompts=2, bench_tokens=10, repeats=1,
                        trace_tokens=10, calibrate_seconds=0.1, refined_rounds=12, hop_anchors=2, factorial_prompts=2, factorial_tokens=10)
    try:
        report.write_run([str(folder())], out, quick=True, seed=3, threads=1)
    finally:
        report.QUICK = before
    return out, [unescape(c) for c in re.findall(r"Again: <code>(.*?)</code>", (out / "report.html").read_text())]


CASES = [
    ("prefix_channels", ("intervene", "--task maths", "--start keyed", "--prompts 2")),
    ("prefix_channels", ("intervene", "--task code", "--start zero", "--prompts 2")),
    ("depth_grid", ("intervene", "--task code", "--start keyed", "--grid")),
    ("convergence", ("probe", "--task code", "--start zero")),
    ("depth_lens", ("probe", "--task maths", "--start keyed")),
    ("second_candidate", ("probe", "--only second_candidate,agreement_runs", "--task code", "--start keyed")),
    ("agreement_runs", ("probe", "--only second_candidate,agreement_runs", "--task maths", "--start keyed")),
]


@pytest.mark.parametrize(("kind", "words"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
def test_the_printed_command_gives_the_reports_rows(run, loopscope, tmp_path, kind, words):
    out, printed = run
    command = next(c for c in printed if all(w in c for w in words) and (kind != "prefix_channels" or "--grid" not in c))
    result = loopscope(*shlex.split(command)[1:], "--out", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    again = pd.read_parquet(tmp_path / "again" / "tables" / f"{kind}.parquet").drop(columns="model")
    rows = pd.read_parquet(out / "tables" / f"{kind}.parquet").drop(columns="model")
    rows = rows[(rows.task == again.task.iloc[0]) & (rows.start == again.start.iloc[0])].reset_index(drop=True)
    assert f"--start {again.start.iloc[0]}" in words or kind == "depth_grid"
    pd.testing.assert_frame_equal(again, rows, check_exact=False, rtol=1e-6)


def test_the_printed_bench_command_makes_the_same_calls(run, loopscope, tmp_path):
    out, printed = run
    command = next(c for c in printed if "loopscope bench" in c and "--task code" in c)
    result = loopscope(*shlex.split(command)[1:], "--out", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    again, rows = (pd.read_parquet(p / "tables" / "bench.parquet") for p in (tmp_path / "again", out))
    counted = [(f[f.task == "code"].set_index(["prompt", "decoder"]).sort_index())[["recur_calls", "tokens", "accepted"]]
               for f in (again, rows)]
    pd.testing.assert_frame_equal(*counted)


def test_the_printed_factorial_command_makes_the_same_cells(run, loopscope, tmp_path):
    out, printed = run
    command = next(c for c in printed if "loopscope factorial" in c and "--task code" in c)
    result = loopscope(*shlex.split(command)[1:], "--out", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    again, rows = (pd.read_parquet(p / "tables" / "factorial.parquet") for p in (tmp_path / "again", out))
    counted = [f[f.task == "code"].set_index(["prompt", "decoder"]).sort_index()[["recur_calls", "committed", "accepted"]]
               for f in (again, rows)]
    pd.testing.assert_frame_equal(*counted)


def test_seconds_of_the_manifest_count_the_drawing(run):
    facts = json.loads((run[0] / "manifest.json").read_text())
    assert facts["seconds"] > 0 and facts["commands"]["bench"].startswith("loopscope bench {model}")
    assert len(facts["stages"]) > 20 and sum(facts["stages"].values()) < facts["seconds"]
    assert facts["sources"] == {"random-huginn": facts["models"][0]}


def test_an_older_run_redrawn_says_the_commands_too(run, loopscope, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(run[0], older)
    facts = json.loads((older / "manifest.json").read_text())
    (older / "manifest.json").write_text(json.dumps({k: v for k, v in facts.items() if k not in ("commands", "sources")}))
    assert loopscope("figures", older).exit_code == 0
    assert "--start zero --prompts 2 --new-tokens 9 --positions 5 --seed 3 --threads 1" in (older / "report.html").read_text()
