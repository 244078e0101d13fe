"""What was promised beside what was counted: exact calls are marked, broken promises are said aloud, and a miss is laid on its parts."""

import re
from math import log

import pandas as pd
import pytest

from figures import draw, predicted, summaries
from figures.drawing import drawn
from figures.gallery import plates
from figures.report import write_report
from loopscope.errors import SettingError

KEPT, BROKEN = "WFD d=1", "DtV d=1 K=8"


def missed(**factors):
    """A miss table: speeds of decoders whose prediction was off by (acceptance, kernel, host)."""
    rows = [("m", "maths", "AR", True, 1.0, 1.0, 1.0, 1.0, 1.0, "")]
    for decoder, (acceptance, kernel, host, cause) in factors.items():
        rows.append(("m", "maths", decoder, decoder == KEPT, 2.0, 2.0 * acceptance * kernel * host, acceptance, kernel, host, cause))
    table = pd.DataFrame(rows, columns=["model", "task", "decoder", "exact_calls", "speedup_predicted", "speedup_measured", "acceptance",
                                        "kernel", "host_factor", "cause"])
    return table.assign(calls_predicted=2.0, calls_counted=2.0, accepted_predicted=3.0, accepted_measured=3.0,
                        seconds_per_call_predicted=1e-3, seconds_per_call_measured=1e-3)


def test_the_steps_of_a_miss_lead_from_the_prediction_to_what_was_measured():
    table = missed(**{KEPT: (1.0, 1.25, 0.5, "host"), BROKEN: (0.8, 1.0, 1.1, "acceptance")})
    ax = draw("miss", table).axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"{BROKEN}", f"{KEPT} ="]  # the best surprise on top; AR is the unit, and exact calls are marked
    steps = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches if bar.get_height() < 0.5]
    ends = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    for i, factors in enumerate([(0.8, 1.0, 1.1), (1.0, 1.25, 0.5)]):
        own, at = steps[3 * i : 3 * i + 3], 0.0
        for (begin, end), factor in zip(own, factors, strict=True):
            assert (begin, end) == pytest.approx((at, at + log(factor)))
            at = end
        assert ends[i] == pytest.approx(at)


def test_a_table_of_ar_alone_has_nothing_to_draw():
    with pytest.raises(SettingError, match="no rows"):
        draw("miss", missed())


def promised(bench):
    """The table replay_prediction that a bench table keeps for one decoder, and breaks for another."""
    own = bench[bench["decoder"].isin([KEPT, BROKEN]) & (bench["repeat"] == 0)]
    table = own[["model", "task", "prompt", "decoder", "tokens", "recur_calls", "proposed", "accepted"]].assign(exact=True)
    return table.assign(recur_calls=table["recur_calls"] - (table["decoder"] == BROKEN))


@pytest.fixture
def tables(synthetic):
    bench, plan = synthetic.bench(prompts=3, repeats=1, tasks=("maths",)), synthetic.plan(tasks=("maths",))
    plan["exact_calls"] = [True if d == KEPT else False if b == "predicted" else None for d, b in zip(plan["decoder"], plan["basis"])]
    return {"bench": bench, "plan": plan, "replay_prediction": promised(bench)}


def test_kept_and_broken_promises_are_told_apart(tables):
    said = {row["decoder"]: row["calls"] for row in summaries.plan_rows(tables)}
    promise, sign, counted = said[KEPT].split()
    assert sign == "=" and promise == counted and said[BROKEN].split()[1] == "≠"
    assert not any(set(words) & set("=≠") for decoder, words in said.items() if decoder not in (KEPT, BROKEN))
    own = tables["bench"][tables["bench"]["decoder"] == KEPT]
    assert float(promise) == pytest.approx(own["recur_calls"].sum() / (own["tokens"] - 1).sum(), abs=5e-4)
    (told,) = summaries.kept_sentences(tables)
    assert "exact number of block calls 2 times" in told and told.endswith(f"and was wrong about {BROKEN} (maths).")
    own = tables["replay_prediction"][tables["replay_prediction"]["decoder"] == KEPT]
    assert summaries.kept_sentences(tables | {"replay_prediction": own})[0].endswith("and was right every time.")
    estimated = tables["replay_prediction"].assign(exact=False)
    assert not summaries.kept_sentences(tables | {"replay_prediction": estimated})
    assert {r["calls"].split()[1] for r in summaries.plan_rows(tables | {"replay_prediction": estimated}) if r["calls"]} == {"≈"}


def test_why_a_speed_was_missed_stands_beside_it(tables):
    row = next(r for r in summaries.plan_rows(tables | {"miss": missed(**{KEPT: (1.0, 1.25, 0.5, "host")}).assign(model="tiny-huginn")})
               if r["decoder"] == KEPT)
    assert row["cause"] == "host (acceptance 1.00, kernel 1.25, host 0.50)" and row["call_time"] == "1000 | 1000"


def test_exact_and_estimated_calls_are_marked_everywhere(tables):
    signs = {r.decoder: predicted.sign(r) for r in predicted.both(tables["plan"]).itertuples()}
    assert signs[KEPT] == "=" and signs[BROKEN] == "≈"
    listed = [label.get_text() for label in draw("plan", tables["plan"]).axes[0].get_yticklabels()]
    assert {label.split(". ")[1] for label in listed} == {f"{d} {s}".rstrip() for d, s in signs.items()}
    assert signs["AR"] == ""  # T calls a token are no prediction
    (said,) = [line for line in summaries.approximate(tables) if "predicted exactly" in line]
    assert f"by replay: {KEPT};" in said and BROKEN in said.split(";")[1]
    assert "predicted exactly" not in " ".join(summaries.approximate({"plan": tables["plan"].drop(columns="exact_calls")}))


def test_predictions_are_named_with_their_time_and_hash(tables, tmp_path):
    record = {"written": "2026-01-02T03:04:05.678+00:00", "files": {"tiny-huginn_maths_plan.parquet": "ab" * 32}}
    told = {"predictions": {"tiny-huginn, maths": record, "other, code": record}}
    page = write_report(tmp_path, {"plan": tables["plan"]}, told).read_text()
    assert "Predicted, not timed" in page  # WFD d=2 is planned and was not run
    assert page.count('href="predictions/tiny-huginn_maths_plan.parquet"') == 1
    assert re.search(r"written at 2026-01-02T03:04:05.678\+00:00, before the benchmark", page) and "<code>abababababababab</code>" in page


def test_several_processes_draw_the_same_files_in_the_same_order(synthetic, tmp_path, monkeypatch):
    monkeypatch.setattr("figures.drawing._FEW", 2)
    wanted = list(plates({"timing": synthetic.timing(repeats=1), "trace": synthetic.trace()}))
    alone, together = ([d for d in drawn(wanted, tmp_path / str(n), workers=n)] for n in (1, 2))
    assert [d.note for d in alone] == [d.note for d in together] and len(alone) == 2
    for one, other in zip(alone, together, strict=True):
        assert [f.name for f in one.files] == [f.name for f in other.files]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one.files, other.files) if a.suffix in (".png", ".svg"))
