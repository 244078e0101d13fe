"""An interval over few prompts is marked wherever it stands, and one prompt has none: in figures, in tables, in alternative text."""

import pandas as pd
import pytest

import figures
from figures import agreement_runs, intervals, summaries


def hatched(figure):
    return [c for ax in figure.axes for c in ax.collections if c.get_hatch()]


def dotted(figure):
    return [c for ax in figure.axes for c in ax.collections for _, dashes in getattr(c, "get_linestyle", list)() if dashes is not None]


@pytest.mark.parametrize(("kind", "found"), [("convergence", hatched), ("depth_lens", hatched), ("bench", dotted),
                                             ("prefix_channels", dotted)])
def test_few_prompts_are_hatched_or_dotted_and_said(kind, found, synthetic):
    few, enough = (getattr(synthetic, kind)(prompts=n, tasks=("maths",)) for n in (intervals.FEW - 1, intervals.FEW))
    said = f"intervals over fewer than {intervals.FEW} prompts"
    marked, plain, alone = (figures.draw(kind, t) for t in (few, enough, few[few["prompt"] == 0]))
    assert found(marked) and said in marked.note.caption
    assert not found(plain) and said not in plain.note.caption
    assert said not in alone.note.caption and "no interval" in alone.note.caption


def test_tables_mark_them_and_say_how_many(synthetic):
    for n in (1, 4, 5):
        rows = summaries.speeds({"bench": synthetic.bench(prompts=n, tasks=("maths",))})
        told = {r["interval"] for r in rows if r["decoder"] != "AR"}
        assert {r["n"] for r in rows} == {str(n)}
        assert told == {"none"} if n == 1 else all(words.endswith(intervals.DAGGER) == (n == 4) for words in told), told
    effects = synthetic.prefix_effects(tasks=("maths",), depths=(1,), lags=(1,))
    one, few = (summaries.effect_rows({"prefix_effects": t}) for t in (
        effects.assign(n_prompts=1, low=float("nan"), high=float("nan")), effects.assign(n_prompts=4)))
    assert {r["interval"] for r in one} == {"none"} and all(r["interval"].endswith(intervals.DAGGER) for r in few)
    assert "nan" not in figures.draw("prefix_effects", effects.assign(n_prompts=1, low=float("nan"), high=float("nan"))).note.alt


def test_claims_mark_them_and_effects_are_not_filled(synthetic):
    from figures import claims

    rows = pd.DataFrame({"value": [2.4], "low": [2.1], "high": [2.6], "unit": ["x"], "n_prompts": [4]})
    assert claims.number(next(rows.itertuples())) == f"2.40x [2.10, 2.60]{intervals.DAGGER}"
    assert claims.number(next(rows.assign(n_prompts=5).itertuples())) == "2.40x [2.10, 2.60]"
    effects = synthetic.prefix_effects(tasks=("maths",), depths=(1,), lags=(1,)).assign(holds=True)
    filled = [sum(line.get_markerfacecolor() != "white" for ax in figures.draw("prefix_effects", effects.assign(n_prompts=n)).axes
                  for line in ax.lines if line.get_marker() not in ("None", None, "")) for n in (4, 5)]
    assert filled[0] == 0 < filled[1]


def test_one_of_a_thing_is_no_plural(synthetic):
    bench = synthetic.bench(prompts=1, repeats=1, tasks=("maths",))
    assert all("(1 generation, 64 tokens)" in line for line in summaries.equality_sentences({"bench": bench}))
    assert figures.draw("settle", synthetic.settle(prompts=1, tasks=("maths",))).note.caption.startswith("1 prompt;")


def test_runs_of_agreement_pool_windows_over_prompts(synthetic):
    runs = synthetic.agreement_runs()
    part = runs[(runs["task"] == runs["task"].iloc[0]) & (runs["depth"] == 1)]
    lengths, share, _ = agreement_runs.survival(part)
    # by hand: every prompt's positions written out, every window looked at
    good = windows = 0
    for _, own in part.groupby("prompt"):
        texts = [[True] * r.length + [False] * (not r.cut) for r in own.itertuples() for _ in range(r.runs)]
        row = [x for text in sorted(texts, key=lambda text: text[-1:] == [True]) for x in text]
        windows += len(row) - 1
        good += sum(a and b for a, b in zip(row, row[1:]))
    table = agreement_runs.spread(part, lengths, share).set_index("length")
    assert share[1] == pytest.approx(good / windows) and table.loc[2, "mean"] == share[1]
    inside = table["low"].le(table["mean"] + 1e-12) & table["high"].ge(table["mean"] - 1e-12)
    assert inside[table["low"].notna()].all() and table["n"].max() == part["prompt"].nunique()
