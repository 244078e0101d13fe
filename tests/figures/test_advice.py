"""One recommendation: the plan's pick unless another decoder was clearly faster on the same prompts, and AR where nothing is."""

import numpy as np
import pandas as pd
import pytest

from figures import advice, intervals, ratios, summaries
from figures.report import write_report

PICK, OTHER = "WFD d=1", "DAS-Wave J=12 k=1 deep_kv"


@pytest.fixture
def bench(synthetic):
    return synthetic.bench(repeats=1, tasks=("maths",))


def scaled(bench, decoder, factor):
    return bench.assign(decode_seconds=bench["decode_seconds"] * np.where(bench["decoder"] == decoder, factor, 1.0))


def test_the_plans_pick_stands_until_another_is_clearly_faster_on_the_same_prompts(bench):
    overruled = advice.advise(ratios.per_prompt(bench), PICK)  # 2.6x against 3.1x
    assert overruled.decoder == OTHER == overruled.top.decoder and overruled.ratio_low > 1
    assert f"the plan had picked {PICK}" in overruled.why
    near = scaled(bench, PICK, 2.6 / 3.05)
    stands = advice.advise(ratios.per_prompt(near), PICK)
    assert stands.decoder == PICK and stands.top.decoder == OTHER and stands.ratio_low <= 1 < stands.ratio
    assert "of the 5 decoders timed beside AR none was clearly faster" in stands.why
    assert "picked by the plan before any decoder was timed, and the largest mean" in advice.advise(ratios.per_prompt(bench), OTHER).why
    assert advice.advise(ratios.per_prompt(bench), "never timed").picked == ""


def test_too_few_prompts_overrule_nothing(bench):
    few = bench[bench["prompt"] < intervals.FEW - 1]
    found = advice.advise(ratios.per_prompt(few), PICK)
    assert found.ratio_low > 1 and found.decoder == PICK and "4 prompts are too few to overrule it" in found.why
    assert "none clearly faster" not in found.short
    slow = advice.advise(ratios.per_prompt(scaled(few[few["decoder"].isin(["AR", PICK])], PICK, 9)), PICK)
    assert slow.decoder == PICK and slow.doubt == "no gain shown"


def test_the_comparison_is_paired(bench):
    # what drafting gains differs tenfold between prompts, and the other decoder is 3 % ahead on each: intervals overlap, the ratio is clear
    level = {p: 0.5 + p for p in bench["prompt"].unique()}
    ar = bench[bench["decoder"] == "AR"]
    per = ar.set_index("prompt")["decode_seconds"]
    frames = [ar] + [ar.assign(decoder=name, decode_seconds=[per[p] / (gain * level[p]) for p in ar["prompt"]], recur_calls=100)
                     for name, gain in ((PICK, 1.0), (OTHER, 1.03))]
    pairs = ratios.per_prompt(pd.concat(frames))
    found = advice.advise(pairs, PICK)
    pick = intervals.table(pairs[pairs["decoder"] == PICK], [], "time_speedup").iloc[0]
    assert found.low < pick["mean"] < found.high and found.decoder == OTHER and not found.top.rivals
    assert found.ratio == pytest.approx(1.03)


def test_the_pick_is_the_one_marked_and_findings_mark_it(synthetic, bench):
    plan = synthetic.plan(tasks=("maths",))
    timed = plan[(plan["basis"] == "predicted") & plan["decoder"].isin(plan.loc[plan["basis"] == "measured", "decoder"])]
    assert advice.picks(plan) == {"maths": timed.loc[timed["time_speedup"].idxmax(), "decoder"]}
    told = [{"model": "tiny-huginn", "task": "maths", "topic": "decoder", "sentence": "", "decoder": "WFD d=2"}]
    assert advice.picks(advice.marked(plan, told)) == {"maths": "WFD d=2"}
    assert advice.marked(plan, [{**told[0], "decoder": None}]) is plan
    exact = plan.assign(exact_calls=plan["decoder"] == "DtV d=1 K=8")
    assert advice.picks(exact) == {"maths": "DtV d=1 K=8"}  # what a plan picks was replayed, where anything was
    assert advice.picks(None) == {}


def test_the_page_recommends_once_and_answers_in_the_order_asked(synthetic, bench, tmp_path):
    told = [{"model": "tiny-huginn", "task": "maths", "topic": "decoder", "sentence": "The pick is so.", "decoder": PICK}]
    tables = {"bench": bench, "plan": synthetic.plan(tasks=("maths",)), "convergence": synthetic.convergence(prompts=3, tasks=("maths",))}
    page = write_report(tmp_path, tables, {"command": "loopscope report"}, told).read_text()
    short = page[page.index('id="short"') : page.index('id="ideas"')]
    heads = ["What was found", "Which decoder follows", "How fast it was", "What was approximate"]
    places = [short.index(f"<dt>{head}</dt>") for head in heads]
    assert places == sorted(places) and page.index('id="asked"') < page.index('id="short"') < page.index('id="again"')
    assert short.count("prompts use <strong>") == 1 and f"<strong>{OTHER}</strong>: the plan had picked {PICK}" in short
    answers = [short[a:b] for a, b in zip(places, [*places[1:], len(short)])]
    assert all("Again: <code>loopscope" in answer for answer in answers[:3])
    (said,) = summaries.speed_sentences(tables | {"plan": advice.marked(tables["plan"], told)})
    assert f"{OTHER} was " in said and said.split(".")[0] in answers[2].replace("&#39;", "'")
