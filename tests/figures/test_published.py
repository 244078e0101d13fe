"""The papers' numbers: facts with a source, laid over our figures as marks of their own and never mixed into our values."""

import pytest

import figures
from figures import published
from loopscope.errors import SettingError


def hollow(ax):
    """(x, y) of every published mark on a panel."""
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_markerfacecolor() == "none"]


def ours(figure):
    """Everything drawn that is not a published mark, panel by panel."""
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_markerfacecolor() != "none"]
            for ax in figure.axes]


def legend(figure):
    return [text.get_text() for entry in figure.legends for text in entry.get_texts()]


@pytest.mark.parametrize("paper", published.PAPERS)
def test_every_file_says_where_its_numbers_are_from_and_how_they_were_measured(paper):
    facts = published.load(paper)
    assert facts["source"].startswith("arXiv ") and published.source(paper) in facts["source"] and len(facts["setting"]) > 20


def test_an_unknown_paper_is_refused_with_the_known_ones():
    with pytest.raises(SettingError, match="did you mean 'das'"):
        published.load("dass")


def test_a_caller_cannot_change_what_the_next_one_reads():
    published.load("das")["q_k_v_cosine_depth1"].clear()
    assert published.load("das")["q_k_v_cosine_depth1"]


@pytest.mark.parametrize("kind", ["convergence", "depth_lens", "prefix_channels", "bench"])
def test_published_marks_are_an_addition_with_a_legend_entry_and_change_nothing_of_ours(kind, synthetic):
    frame = getattr(synthetic, kind)(prompts=3)
    plain, both = figures.draw(kind, frame), figures.draw(kind, frame, published=True)
    assert not any("published" in label for label in legend(plain)) and not any(map(hollow, plain.axes))
    said = [label for label in legend(both) if label.startswith("published: ")]
    assert said and all("arXiv 26" in label for label in said) and len(set(said)) == len(said)
    assert sum(len(hollow(ax)) for ax in both.axes) >= 6
    assert [panel for panel in ours(plain) if panel] == [panel for panel in ours(both) if panel and len(panel) > 1]
    assert published.CAPTION in both.note.caption and published.CAPTION not in plain.note.caption


def test_cosines_stand_at_depth_1_with_the_published_values(synthetic):
    figure = figures.draw("convergence", synthetic.convergence(prompts=3), published=True)
    table = published.load("das")["q_k_v_cosine_depth1"]
    values = sorted(value for model in ("huginn", "raven_llama") for value in table[model].values())
    for ax in (figure.axes[0], figure.axes[6]):  # the first panel of each task
        marks = hollow(ax)
        assert sorted(y for _, y in marks) == values and all(1 <= x < 1.5 for x, _ in marks)
    distances = figures.draw("convergence", synthetic.convergence(prompts=3), metric="rel_l2", published=True)
    assert not any(map(hollow, distances.axes))  # no distance was published


def test_agreement_marks_keep_to_depths_that_our_axis_has(synthetic):
    few = synthetic.depth_lens(depths=3)
    figure = figures.draw("depth_lens", few, published=True)
    assert {x for x, _ in hollow(figure.axes[0])} == {1, 2} and not any(map(hollow, figure.axes[1:]))


def test_the_published_gain_of_deep_v_is_the_difference_of_two_published_agreements(synthetic):
    figure = figures.draw("prefix_channels", synthetic.prefix_channels(prompts=3), published=True)
    table = published.load("das")["agreement_by_policy"]["huginn"]
    panel = next(ax for ax in figure.axes if ax.get_title("left").startswith("published"))
    assert any(y == pytest.approx(table["deep_v"][0] - table["aligned"][0]) for _, y in hollow(panel))


def test_a_published_speedup_stands_at_the_row_of_its_own_kind_and_task(synthetic):
    figure = figures.draw("bench", synthetic.bench(), published=True)
    maths, calls = figure.axes[0], figure.axes[1]
    rows = [label.get_text() for label in maths.get_yticklabels()]
    found = {}
    for x, y in hollow(maths):
        found.setdefault(rows[int(y)], set()).add(x)
    das, spec = published.load("das")["speedup_and_A"], published.load("wfd")["spec_bench"]
    gsm8k, maths_at = das["tasks"].index("gsm8k"), spec["tasks"].index("math_reasoning")
    assert found["WFD d=1"] == {spec[m]["wfd_speedup"][maths_at] for m in ("ouro_2_6b", "huginn_3_5b")}
    assert das["huginn"]["mature_spec"][gsm8k][0] in found["DtV d=1 K=8 deep_kv"]
    assert das["huginn"]["draft_then_verify"][gsm8k][0] in found["DtV d=1 K=8"]
    assert das["huginn"]["das_wave"][gsm8k][0] in found["DAS-Wave J=12 k=1 deep_kv"]
    assert not {"AR", "WFD d=2"} & set(found) and not hollow(calls)  # the faster wave carries it; calls were not published
    code = {x for x, _ in hollow(figure.axes[2])}
    assert das["huginn"]["das_wave"][das["tasks"].index("humaneval")][0] in code


def test_the_dashboard_carries_them_too_and_a_figure_without_any_says_so(synthetic):
    tables = {k: t[t["prompt"] < 3] if "prompt" in t else t for k, t in synthetic.tables().items()}
    figure = figures.draw("dashboard", tables, published=True)
    assert any(label.startswith("published: Ouro-2.6B") for label in legend(figure))
    assert hollow(figure.axes[0]) and hollow(figure.axes[1]) and hollow(figure.axes[4])
    with pytest.raises(SettingError, match="no published values can be laid over the timing figure"):
        figures.draw("timing", tables["timing"], published=True)
    figures.draw("timing", tables["timing"], published=False)


def test_a_table_with_tasks_of_its_own_still_draws(synthetic, recwarn):
    for kind in ("bench", "convergence"):
        frame = getattr(synthetic, kind)(prompts=3)
        figures.draw(kind, frame.assign(task="own")[frame["task"] == "maths"], published=True)
    one = synthetic.bench(decoders=("AR", "DtV d=1 K=8"))
    figure = figures.draw("bench", one, published=True)
    assert len({y for _, y in hollow(figure.axes[0])}) == 1
    assert [str(w.message) for w in recwarn] == []


def test_every_figure_of_a_run_draws_with_published_values_and_those_that_can_carry_them_do(synthetic):
    from figures import gallery

    tables = {"convergence": synthetic.convergence(prompts=2, tasks=("maths",)), "settle": synthetic.settle(prompts=2, tasks=("maths",))}
    carried = {plate.name: any(map(hollow, plate.draw(published=True).axes)) for plate in gallery.plates(tables)}
    assert carried == {"tiny-huginn_dashboard": True, "tiny-huginn_convergence": True, "tiny-huginn_convergence_distance": False,
                       "tiny-huginn_settle": False}


def test_the_command_that_redraws_a_run_passes_the_wish_on(monkeypatch):
    from typer.testing import CliRunner

    from loopscope.cli import app, redraw

    asked = []
    monkeypatch.setattr(redraw, "redraw", lambda *given: asked.append(given) or "done")
    for options in ([], ["--published"]):
        assert CliRunner().invoke(app.app, ["figures", "runs/first", *options]).exit_code == 0
    assert asked == [("runs/first", None, False), ("runs/first", None, True)]
