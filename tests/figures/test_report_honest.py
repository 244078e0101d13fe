"""The page does not say more than its tables: ties, gains that are not there, a busy machine, harm, what was not predicted."""

import pytest

from figures import dashboard, predicted, ratios, summaries
from figures.report import write_report


def scaled(bench, **times):
    """The bench table with decoders' decode seconds multiplied: {label's first word: factor}."""
    factor = bench["decoder"].map(lambda d: times.get(d.split()[0], 1.0))
    return bench.assign(decode_seconds=bench["decode_seconds"] * factor)


@pytest.fixture
def bench(synthetic):
    return synthetic.bench(repeats=1, tasks=("maths",))


def test_one_average_of_speeds_everywhere_and_one_definition_beside_predictions(synthetic, bench):
    slow = bench.assign(decode_seconds=bench["decode_seconds"] * (1 + 3 * ((bench["decoder"] == "WFD d=1") & (bench["prompt"] == 0))))
    plan = predicted.remeasured(synthetic.plan(tasks=("maths",)), slow)
    mean = ratios.per_prompt(slow).groupby("decoder")["time_speedup"].mean()
    total = slow.groupby("decoder")["decode_seconds"].sum()  # every text has as many tokens
    measured = plan[plan["basis"] == "measured"].set_index("decoder")
    assert measured["time_speedup"].to_dict() == pytest.approx({d: total["AR"] / total[d] for d in measured.index})
    calls = slow.groupby("decoder")["recur_calls"].sum()
    assert measured["call_speedup"].to_dict() == pytest.approx({d: calls["AR"] / calls[d] for d in measured.index})
    assert (measured["low"] <= measured["time_speedup"]).all() and (measured["time_speedup"] <= measured["high"]).all()
    tables = {"bench": slow, "plan": plan}
    shown = {r["decoder"]: r["time"] for r in summaries.speeds(tables)}
    assert shown == {d: f"{mean[d]:.2f}x" for d in shown}
    beside = {r["decoder"]: r["measured"] for r in summaries.plan_rows(tables) if r["measured"]}
    assert beside.keys() > {"AR"} and beside == {d: f"{total['AR'] / total[d]:.2f}x" for d in beside}
    assert beside["WFD d=1"] != shown["WFD d=1"]
    best = max(mean.drop("AR").index, key=mean.get)
    assert f"Use {best} on maths: {mean[best]:.2f}x" in dashboard.headline(tables, "maths")[1]
    (said,) = summaries.speed_sentences(tables)
    predictions = plan[plan["basis"] == "predicted"].set_index("decoder")["time_speedup"]
    assert f"{best} was {mean[best]:.2f}x" in said and f"The plan had predicted {predictions[best]:.2f}x" in said
    assert f"measured in that way, it was {total['AR'] / total[best]:.2f}x" in said


def test_a_tie_and_a_gain_that_is_not_there_are_said(bench):
    (clear,) = summaries.advice_rows({"bench": scaled(bench, WFD=2)})
    assert "not distinguishable" not in clear["why"]
    tied = scaled(bench, WFD=2.6 / 3.1)
    assert ratios.fastest(ratios.per_prompt(tied)).rivals
    assert "not distinguishable from " in summaries.advice_rows({"bench": tied})[0]["why"]
    slow = bench[bench["decoder"].isin(["AR", "WFD d=1"])]
    mean = ratios.fastest(ratios.per_prompt(slow)).mean
    none, worse = scaled(slow, WFD=mean), scaled(slow, WFD=2 * mean)
    assert "no gain shown" in summaries.speed_sentences({"bench": none})[0]
    assert "no gain shown" in dashboard.headline({"bench": none}, "maths")[1]
    (row,) = summaries.advice_rows({"bench": worse})
    assert row["decoder"] == "plain decoding (AR)" and "the one decoder timed beside AR was faster; the best, WFD d=1" in row["why"]
    assert dashboard.headline({"bench": worse}, "maths")[1].startswith("Use plain decoding on maths: WFD d=1 reached 0.")
    alone = slow[slow["prompt"] == 0]
    (said,) = summaries.speed_sentences({"bench": alone})
    assert "one prompt, so no interval" in said and "[" not in said


def test_a_busy_machine_is_said_once_in_short_and_once_beside_the_speeds(synthetic, bench, tmp_path):
    ar = bench[bench["decoder"] == "AR"]
    call = (ar["decode_seconds"] / ar["recur_calls"]).median()
    plan = synthetic.plan(tasks=("maths",))
    plan["seconds_per_token"] = plan["calls_per_token"] * call  # the sweep saw what the benchmark saw
    assert ratios.busy(bench, plan) == ""
    swept = ratios.busy(bench, plan.assign(seconds_per_token=plan["seconds_per_token"] / 2.5))
    assert swept.startswith("This machine was busy: rely on calls, not seconds.") and "2.5 times those of the timing sweep" in swept
    uneven = bench.assign(decode_seconds=bench["decode_seconds"] * (1 + 2 * (bench["prompt"] >= 4)))
    assert "varied 3" in ratios.busy(uneven) or "varied 2.9" in ratios.busy(uneven)
    page = write_report(tmp_path, {"bench": uneven}, {}).read_text()
    assert page.count("This machine was busy") == 2


def test_harm_is_called_harm(synthetic):
    effects = synthetic.prefix_effects(tasks=("maths",), depths=(1,), lags=(1,)).assign(effect=-0.2, low=-0.3, high=-0.1, holds=False)
    assert {r["holds"] for r in summaries.effect_rows({"prefix_effects": effects})} == {"worse"}
    noise = effects.assign(effect=4e-17, low=3e-17, high=5e-17)
    assert {r["holds"] for r in summaries.effect_rows({"prefix_effects": noise})} == {"no"}


def test_what_was_not_predicted_is_said_in_words(synthetic):
    plan = synthetic.plan(tasks=("maths",))
    alone = plan[(plan["decoder"] != "WFD d=1") | (plan["basis"] == "measured")]
    alt = predicted.draw(alone).note.alt
    assert "WFD d=1 not predicted, measured 2.6" in alt and "n/ax" not in alt


def test_what_settled_is_one_sentence_with_its_nulls(synthetic):
    table = synthetic.convergence(prompts=4)
    at = table[(table["metric"] == "cosine") & (table["depth"] == 1) & (table["null"] == "none") & (table["start"] == "keyed")]
    (said,) = summaries.settled_sentences({"convergence": table})
    assert f"(cosine {at.groupby('channel')['value'].mean().min():.3f})" in said and said.count(".") >= 2
    equal = table.assign(value=0.5)
    assert "clearly nearer" not in summaries.settled_sentences({"convergence": equal})[0]
