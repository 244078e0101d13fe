import json
import re
import subprocess
import sys

import pandas as pd
import pytest

from loopscope.cli.report import Size


@pytest.mark.parametrize("family", ["huginn", "ouro"])
@pytest.mark.parametrize("name", ["ar", "dtv", "wfd", "das-wave", "DtV d=1 K=4 deep_kv"])
def test_every_decoder_continues_with_the_same_text(loopscope, folder, family, name):
    plain = loopscope("decode", folder(family), "def f(x):", "--decoder", "ar", "--max-new-tokens", 12)
    other = loopscope("decode", folder(family), "def f(x):", "--decoder", name, "--max-new-tokens", 12)
    assert plain.exit_code == other.exit_code == 0
    assert plain.stdout == other.stdout and len(plain.stdout) > 1
    assert "12 tokens" in other.stderr and "lossless" in other.stderr


def test_decode_says_what_it_cost_and_compares(loopscope, folder):
    result = loopscope("decode", folder(), "text", "--decoder", "wfd", "--draft-depth", 2, "--max-new-tokens", 10, "--compare")
    assert "WFD d=2 (lossless): 10 tokens" in result.stderr and "block calls per token (AR: 4)" in result.stderr
    assert "WFD d=2 gave the same tokens as AR" in result.stderr


def test_probe_prints_and_saves(loopscope, folder, tmp_path):
    result = loopscope("probe", folder(), "--prompts", 2, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "agreement" in result.stdout and "attn_out" in result.stdout
    assert {p.name for p in (tmp_path / "run" / "tables").iterdir()} == {"convergence.parquet", "depth_lens.parquet", "settle.parquet"}
    assert (tmp_path / "run" / "figures" / "depth_lens.png").is_file()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["seed"] == 0


def test_intervene_prints_a_verdict(loopscope, folder):
    result = loopscope("intervene", folder(), "--prompts", 2, "--grid")
    assert result.exit_code == 0, result.stderr
    assert "Mature-V" in result.stdout and "deep_kv" in result.stdout and "columns: of its values" in result.stdout


def test_bench_prints_calls_and_speedups(loopscope, folder, tmp_path):
    result = loopscope("bench", folder(), "--prompt", "one", "--prompt", "two", "--decoder", "wfd", "--max-new-tokens", 8,
                       "--out", tmp_path / "b")
    assert result.exit_code == 0, result.stderr
    assert "WFD d=1" in result.stdout and "AR" in result.stdout
    assert pd.read_parquet(tmp_path / "b" / "tables" / "bench.parquet").token_mismatches.sum() == 0


def test_models_lists_what_is_shipped(loopscope):
    from loopscope.models.loading import shipped_models

    out = loopscope("models").stdout
    assert all(name in out for name in shipped_models())


FORETOLD: dict[str, set[str]] = {}  # task -> predictions that were on disk when its benchmark began


@pytest.fixture(scope="module")
def small_report(folder, tmp_path_factory):
    """A report of a random model, as small as it gets."""
    import decoders.bench
    from loopscope.cli import report

    before, bench = report.QUICK, decoders.bench.bench

    def watched(core, prompts, chosen, task, *rest, **options):
        FORETOLD.setdefault(task, {p.name for p in out.parent.glob("small.part-*/predictions/*")})
        return bench(core, prompts, chosen, task, *rest, **options)

    report.QUICK = Size(probe_prompts=2, grid_prompts=1, new_tokens=12, max_positions=6, bench_prompts=2, bench_tokens=10, repeats=1,
                        trace_tokens=10, calibrate_seconds=0.1, refined_rounds=12, hop_anchors=2, factorial_prompts=2, factorial_tokens=10)
    out = tmp_path_factory.mktemp("runs") / "small"
    decoders.bench.bench = watched
    try:
        report.write_run([str(folder())], out, quick=True, seed=0, threads=1)
    finally:
        report.QUICK, decoders.bench.bench = before, bench
    return out


def test_a_report_folder_holds_page_manifest_tables_and_figures(small_report):
    assert {p.name for p in small_report.iterdir()} == {"report.html", "manifest.json", "tables", "figures", "predictions", "findings"}
    tables = {p.stem: pd.read_parquet(p) for p in (small_report / "tables").iterdir()}
    assert set(tables) == {"convergence", "depth_lens", "settle", "second_candidate", "agreement_runs", "prefix_channels",
                           "prefix_effects", "depth_grid", "hops", "plan", "bench", "acceptance", "acceptance_by_depth", "factorial",
                           "trace", "timing", "miss",
                           "replay_prediction"}
    assert all(set(t["model"]) == {"random-huginn"} for t in tables.values())
    assert all(set(t["task"]) == {"maths", "code"} for kind, t in tables.items() if "task" in t)
    assert all(set(tables[kind]["start"]) == {"keyed", "zero"} for kind in ("convergence", "depth_lens", "prefix_channels"))
    assert all(set(tables[kind]["start"]) == {"keyed"} for kind in ("second_candidate", "agreement_runs", "hops"))  # decoding's own
    assert set(tables["plan"]["basis"]) == {"predicted", "measured"}
    picked = tables["plan"][tables["plan"]["picked"] & (tables["plan"]["basis"] == "predicted")]
    assert tables["bench"]["token_mismatches"].sum() == 0
    facts = json.loads((small_report / "manifest.json").read_text())
    assert facts["models"] and facts["versions"]["torch"]
    assert dict(zip(picked["task"], picked["decoder"])) == {f["task"]: f["decoder"] for f in facts["findings"] if f["topic"] == "decoder"}
    assert {f["topic"] for f in facts["findings"]} == {"mature_v", "decoder", "prediction"}
    page = (small_report / "report.html").read_text()
    assert "Mature-V" in page and "first plan" not in page
    assert len(list((small_report / "figures").glob("*.png"))) == len(list((small_report / "figures").glob("*.svg"))) > 8


def test_the_page_shows_what_was_seen_in_the_order_of_the_argument(small_report):
    page = (small_report / "report.html").read_text()
    kinds = ("convergence", "depth_lens", "settle", "second_candidate", "agreement_runs", "prefix_channels", "depth_grid", "hops", "plan")
    places = [page.index(f'"figures/random-huginn_{kind}.png"') for kind in kinds]
    assert places == sorted(places)
    assert "Planned, on maths prompts, before any decoder was timed: The " in page and "<code>findings/random-huginn_maths</code>" in page


@pytest.mark.parametrize("task", ["maths", "code"])
def test_the_findings_of_a_report_give_its_plan_again_without_the_model(small_report, task, monkeypatch):
    from decoders import Findings, plan
    from decoders.calibrate import Calibration

    monkeypatch.setattr("loopscope.models.loader.load_core", None)
    facts = json.loads((small_report / "manifest.json").read_text())
    folder = small_report / facts["planned_from"][f"random-huginn, {task}"]
    found, timing = Findings.load(folder), Calibration.load(folder)
    again = plan(found, timing, task=task)
    written = pd.read_parquet(small_report / "predictions" / f"random-huginn_{task}_plan.parquet")
    pd.testing.assert_frame_equal(again.frame, written, check_dtype=False)
    said = next(f for f in facts["findings"] if f["topic"] == "decoder" and f["task"] == task)
    assert (again.evidence, again.best.label) == (said["sentence"], said["decoder"])
    pd.testing.assert_frame_equal(plan(found, timing, task=task, decoders=found.decoders).frame, written, check_dtype=False)


def test_the_findings_of_a_report_say_what_each_table_stands_on(small_report):
    facts = json.loads((small_report / "findings" / "random-huginn_code" / "manifest.json").read_text())["findings"]
    probed, decoded = {"prompts": [0, 1], "new_tokens": 12}, {"prompts": [0, 1], "new_tokens": 10}
    kinds = ("convergence", "depth_lens", "settle", "second_candidate", "agreement_runs", "prefix_channels")
    assert facts["stands_on"] == {**dict.fromkeys(kinds, probed), "depth_grid": {"prompts": [0], "new_tokens": 12}, "replay": decoded,
                                  "hops": decoded}
    assert len(facts["prompts"]) == 2 and (facts["task"], facts["start"], facts["rounds"]) == ("code", "keyed", 12)


def test_what_the_plan_has_no_number_for_is_said_with_the_reason():
    from types import SimpleNamespace

    from loopscope.cli.planned import left_out

    core = SimpleNamespace(why_not_lossless="")
    told = left_out(core, SimpleNamespace(left_out={"A": "too new", "B": "unknown", "C": "too new", "D": "too new"}))
    assert told == "The plan leaves out what it has no number for. A, C and D: too new; B: unknown."
    assert left_out(core, SimpleNamespace(left_out={})) == ""
    assert left_out(SimpleNamespace(why_not_lossless="slots are shared"), SimpleNamespace(left_out={})) == (
        "Nothing is planned but AR: slots are shared.")


def test_the_calls_that_were_predicted_before_the_benchmark_are_counted_in_it(small_report):
    from decoders.foretold import altered

    facts = json.loads((small_report / "manifest.json").read_text())
    records = facts["predictions"]
    assert set(records) == {"random-huginn, maths", "random-huginn, code"}
    assert not any(altered(record, small_report / "predictions") for record in records.values())
    for task in ("maths", "code"):
        assert set(records[f"random-huginn, {task}"]["files"]) <= FORETOLD[task]
    assert all(record == json.loads((small_report / "predictions" / f"{key.replace(', ', '_')}.json").read_text())
               for key, record in records.items())
    miss = pd.read_parquet(small_report / "tables" / "miss.parquet")
    assert {"AR", "WFD d=1", "WFD d=1 re=1", "DAS-Wave J=12 k=1 deep_kv"} <= set(miss.decoder)
    bench = pd.read_parquet(small_report / "tables" / "bench.parquet")
    assert {"LoopSpec d1=1 d2=2", "PLD K=8 n=3"} <= set(bench.decoder)
    assert miss[miss.decoder == "DAS-Wave J=12 k=1 deep_kv"].exact_calls.all()  # drafted although its estimate was not near the best
    exact = miss[miss.exact_calls]
    assert len(exact) >= 8
    assert exact.calls_predicted.tolist() == pytest.approx(exact.calls_counted.tolist(), abs=1e-12)
    drafted = exact[exact.decoder != "AR"]
    assert drafted.accepted_predicted.tolist() == pytest.approx(drafted.accepted_measured.tolist(), abs=1e-12)
    page = (small_report / "report.html").read_text()
    assert "were counted exactly so" in page and "The replay was wrong" not in page
    assert len(re.findall(r"<td>[0-9.]+ = [0-9.]+</td>", page)) >= 8 and not re.search(r"<td>[0-9.]+ ≠", page)


def test_the_usual_decoders_are_those_that_a_model_can_run():
    from loopscope.cli.planned import usual
    from loopscope.random_models import make_random_core

    def labels(family, depth):
        return {d.label for d in usual(make_random_core(family, depth=depth))}

    shared = "WFD d=1 s=4 (approximate)"
    assert {shared, "LoopSpec d1=1 d2=2", "WFD d=1 re=1", "PLD K=8 n=3"} <= labels("huginn", 6)
    assert shared not in labels("huginn", 4) | labels("ouro", 6)
    assert labels("ouro", 2) == {"WFD d=1", "DAS-Wave J=12 k=1 deep_kv", "PLD K=8 n=3"} and not labels("ouro", 1)


def test_figures_redraws_the_same_page_from_the_tables_alone(loopscope, small_report, tmp_path, monkeypatch):
    monkeypatch.setattr("loopscope.models.loader.load_core", None)  # no model may be loaded
    result = loopscope("figures", small_report, "--out", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "again" / "report.html").read_text() == (small_report / "report.html").read_text()
    for kept in ("predictions", "findings"):
        written, again = ({p.relative_to(run / kept): p.read_bytes() for p in (run / kept).rglob("*.*")}
                          for run in (small_report, tmp_path / "again"))
        assert written == again and len(written) > 4


def test_help_is_fast_and_teaches(folder):
    code = ("import sys; sys.argv = ['loopscope', *{0!r}]\nfrom loopscope.cli import main\ntry: main()\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'pandas', 'matplotlib', 'transformer_lens', 'scipy', 'pyarrow') if m in sys.modules])")
    for words, taught in (([], "recurrence depth"), (["decode"], "lossless"), (["intervene"], "Mature-V"), (["report"], "--quick"),
                          (["probe"], "nulls"), (["bench"], "interval"), (["figures"], "DIR"), (["gpu-check"], "bfloat16")):
        run = subprocess.run([sys.executable, "-c", code.format([*words, "--help"])], capture_output=True, text=True, check=True)
        assert taught in run.stdout, run.stdout
        assert run.stdout.strip().endswith("[]"), run.stdout[-300:]


def test_decoding_needs_no_transformer_lens(folder):
    code = ("import sys; sys.modules['transformer_lens'] = None\n"
            "sys.argv = ['loopscope', 'decode', {0!r}, 'text', '--max-new-tokens', '5']\n"
            "from loopscope.cli import main; main()")
    run = subprocess.run([sys.executable, "-c", code.format(str(folder()))], capture_output=True, text=True)
    assert run.returncode == 0 and "WFD d=1" in run.stderr, run.stderr
