"""`loopscope figures` draws a run again, or says in one line why not and leaves the run as it was."""

import json
import time

import pandas as pd
import pytest

from loopscope.cli.report import finish
from loopscope.records import write_table

PLAN = pd.DataFrame([("m", "maths", d, basis, 2.0, 0.1, speed, speed, speed - 0.1, speed + 0.1)
                     for d, speed in (("AR", 1.0), ("WFD d=1", 2.0)) for basis in ("predicted", "measured")],
                    columns=["model", "task", "decoder", "basis", "calls_per_token", "seconds_per_token", "call_speedup", "time_speedup",
                             "low", "high"])
FACTS = {"seed": 0, "command": "loopscope report m"}
FINDINGS = [{"model": "m", "topic": "decoder", "sentence": "WFD follows."}]


@pytest.fixture
def run(tmp_path):
    finish(tmp_path / "run", {"plan": PLAN}, FACTS, FINDINGS, time.monotonic())
    return tmp_path / "run"


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(loopscope, run, *words) -> None:
    before = contents(run)
    result = loopscope("figures", run)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert contents(run) == before and not list(run.glob(".redraw-*"))


@pytest.mark.parametrize("manifest, word", [
    ([1], "a JSON object, found list"), (None, "found NoneType"), ({"findings": {"a": 1}}, "list of findings"),
    ({"findings": "all"}, "list of findings"), ({"findings": ["good"]}, "'sentence'"), ({"findings": [{"model": "m"}]}, "'sentence'"),
    ({"findings": [{"model": "m", "sentence": 7}]}, "'sentence'"), ({"findings": [{"model": ["m"], "sentence": "s"}]}, "'sentence'"),
    ({"commands": ["probe"]}, "commands by table name"), ({"commands": {"plan": 1}}, "commands by table name"),
    ({"command": 7}, "text as command"), ({"approximate": "all"}, "approximate")])
def test_a_manifest_of_another_shape_is_refused(loopscope, run, manifest, word):
    (run / "manifest.json").write_text(json.dumps(manifest))
    refused(loopscope, run, "manifest.json", word)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": ' + "1" * 9999 + "}"])
def test_a_manifest_that_is_no_json_is_refused(loopscope, run, text):
    (run / "manifest.json").write_text(text)
    refused(loopscope, run, "manifest.json cannot be read")


def test_text_for_numbers_is_refused(loopscope, run):
    write_table(PLAN.assign(low="little"), run / "tables" / "plan.parquet")
    refused(loopscope, run, "plan.parquet", "numbers in the column low", "'little'")


def test_a_table_that_cannot_be_drawn_leaves_the_other_figures_alone(loopscope, run):
    write_table(PLAN.assign(time_speedup=3.0), run / "tables" / "plan.parquet")
    write_table(pd.DataFrame({"model": ["m"], "part": ["recur"]}), run / "tables" / "timing.parquet")  # drawn after the plan
    refused(loopscope, run, "tables cannot be drawn", "timing", "columns")


def test_values_no_figure_was_made_for_are_refused(loopscope, run):
    write_table(pd.DataFrame({"model": ["m"], "task": ["maths"]}), run / "tables" / "trace.parquet")
    refused(loopscope, run, "tables cannot be drawn", "decoder")


def test_redrawing_in_place_replaces_figures_and_page_only(loopscope, run):
    before = contents(run)
    for name in ("report.html", "figures/m_plan.png"):
        (run / name).write_text("old")
    (run / "figures" / "mine.txt").write_text("kept")
    result = loopscope("figures", run)
    assert result.exit_code == 0, result.stderr
    after = contents(run)
    assert after.pop("figures/mine.txt") == b"kept"
    assert {k: v for k, v in after.items() if not k.endswith(".parquet")} == {k: v for k, v in before.items() if not k.endswith(".parquet")}
    assert after.keys() == before.keys() and after["tables/plan.parquet"] == before["tables/plan.parquet"]


@pytest.fixture(scope="module")
def study(folder, tmp_path_factory):
    """What another command than report saves."""
    from typer.testing import CliRunner

    from loopscope.cli.app import app

    out = tmp_path_factory.mktemp("study") / "probed"
    words = ["bench", folder(), "--prompt", "one two", "--decoder", "wfd", "--max-new-tokens", 6, "--repeats", 1, "--out", out]
    assert CliRunner().invoke(app, list(map(str, words)), prog_name="loopscope").exit_code == 0
    return out


def test_a_folder_without_a_report_is_given_none(loopscope, study):
    before = contents(study)
    (study / "figures" / "bench.svg").write_text("old")
    result = loopscope("figures", study)
    assert result.exit_code == 0 and result.stdout.strip() == f"figures: {study / 'figures'}", result.stderr
    after = contents(study)
    assert after.keys() == before.keys() and "report.html" not in after
    assert after["figures/bench.svg"] == before["figures/bench.svg"]


def test_a_folder_without_a_report_is_drawn_elsewhere_with_its_tables(loopscope, study, tmp_path):
    result = loopscope("figures", study, "--out", tmp_path / "new", "--published")
    assert result.exit_code == 0, result.stderr
    old, new = contents(study), contents(tmp_path / "new")
    assert old.keys() == new.keys() and old["manifest.json"] == new["manifest.json"]
    assert old["tables/bench.parquet"] == new["tables/bench.parquet"]
    assert old["figures/bench.png"] != new["figures/bench.png"]
