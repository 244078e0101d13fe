"""What was left out stands beside the plan, which is called one; figures come in one order everywhere."""

from figures import gallery
from figures.report import GROUPS, write_report


def test_what_was_left_out_stands_beside_the_plan_and_the_plan_is_called_one(synthetic, tmp_path):
    findings = [{"model": "tiny-huginn", "task": "maths", "topic": "decoder", "sentence": "The plan is WFD.", "decoder": "WFD d=1"},
                {"model": "tiny-huginn", "task": "maths", "topic": "left_out", "sentence": "X is left out: too new."}]
    facts = {"predictions": {"tiny-huginn, maths": {"written": "early", "files": {"a": "b" * 64}}},
             "planned_from": {"tiny-huginn, maths": "findings/tiny-huginn_maths"}}
    page = write_report(tmp_path, {"plan": synthetic.plan(tasks=("maths",))}, facts, findings).read_text()
    plan = page.rindex("Planned, on maths prompts, before any decoder was timed: The plan is WFD.")
    left_out = page.index("X is left out: too new.")
    assert page.index('id="ideas"') < plan < left_out < page.index('id="exact"') and page.count("X is left out: too new.") == 1
    assert plan < page.index("<code>findings/tiny-huginn_maths</code>") < page.index('id="exact"')


def test_the_page_and_the_list_of_figures_have_one_order():
    shown = [kind for _, kinds in GROUPS for kind in kinds if kind != "join"]
    assert {"second_candidate", "agreement_runs", "hops"} < set(shown)
    assert shown == [kind for kind in gallery.TABLES if kind in shown]
