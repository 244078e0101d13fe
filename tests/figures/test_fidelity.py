"""What is not lossless says so in every figure of decoders, in words, by a second cue and in the legend; and the factorial's figure."""

from itertools import product

import pandas as pd
import pytest

import figures
from figures import ratios, style, summaries

SHARED, EXITING = "WFD d=1 s=2 (approximate)", "AR exit=gate:0.5 (lossy)"
TWIN = "AR s=2 (approximate)"


@pytest.fixture
def bench(synthetic):
    """A bench table with an approximate decoder, its reference and a lossy one."""
    frame = synthetic.bench(decoders=("AR", "WFD d=1"))
    extra = []
    for label, fidelity, wrong, reference, own in ((SHARED, "approximate", 20, TWIN, 3), (TWIN, "approximate", 20, TWIN, 0),
                                                  (EXITING, "lossy", 5, EXITING, 0)):
        part = frame[frame.decoder == "WFD d=1"].assign(decoder=label, lossless=False, fidelity=fidelity, token_mismatches=wrong,
                                                        reference=reference, reference_mismatches=own)
        extra.append(part.assign(decode_seconds=part.decode_seconds / 3))  # faster than any lossless one
    frame = frame.assign(fidelity="lossless", reference="AR", reference_mismatches=0)
    return pd.concat([frame, *extra], ignore_index=True)


def text_of(figure):
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def bars(figure):
    """label -> (facecolour, hatch) of the first panel's bars."""
    from matplotlib.colors import to_hex

    ax = figure.axes[0]
    labels = [t.get_text() for t in ax.get_yticklabels()]
    return {label: (to_hex(bar.get_facecolor()), bar.get_hatch()) for label, bar in zip(labels, ax.patches)}


def test_speedup_bars_of_what_is_not_lossless_are_hollow_hatched_and_in_the_legend(bench):
    figure = figures.draw("bench", bench)
    found = bars(figure)
    assert found[SHARED] == ("#ffffff", "...") and found[EXITING] == ("#ffffff", "++")
    assert found["WFD d=1"][0] == style.DECODERS["WFD"].colour.lower() and found["AR"][0] != "#ffffff"
    words = text_of(figure)
    assert "hollow: approximate" in words and "hollow: lossy" in words
    assert "hollow" not in text_of(figures.draw("bench", bench[bench.fidelity == "lossless"]))


def test_an_older_table_says_it_by_its_lossless_column_alone(synthetic):
    frame = synthetic.bench(decoders=("AR", "WFD d=1"))
    old = frame.assign(lossless=frame.decoder == "AR")
    assert "fidelity" not in old
    figure = figures.draw("bench", old)
    assert bars(figure)["WFD d=1 (approximate)"] == ("#ffffff", "...") and "hollow: approximate" in text_of(figure)
    assert "(approximate)" not in text_of(figures.draw("bench", frame))


def test_acceptance_lines_have_open_markers(synthetic):
    frame = synthetic.acceptance()
    frame = pd.concat([frame, frame[frame.decoder == "WFD d=1"].assign(decoder=SHARED)])
    figure = figures.draw("acceptance", frame)
    fills = {line.get_label(): line.get_markerfacecolor() for line in figure.axes[0].get_lines()}
    assert fills[SHARED] == "white" and fills["WFD d=1"] != "white"
    assert "hollow: approximate" in text_of(figure) and "hollow" not in text_of(figures.draw("acceptance", synthetic.acceptance()))


def test_the_plan_fills_measured_marks_by_half(synthetic):
    plan = synthetic.plan()
    plan = pd.concat([plan, plan[plan.decoder == "WFD d=1"].assign(decoder=SHARED)])
    figure = figures.draw("plan", plan)
    assert "measured, approximate" in text_of(figure) and "measured, approximate" not in text_of(figures.draw("plan", synthetic.plan()))
    styles = [line.get_fillstyle() for line in figure.axes[0].get_lines()]
    assert styles.count("left") == 1  # one panel per task: the one measured mark


def test_the_dashboard_marks_it_and_the_headline_names_a_lossless_decoder(synthetic, bench):
    tables = synthetic.tables() | {"bench": bench}
    words = text_of(figures.draw("dashboard", tables))
    assert "(approximate)" in words and "Use WFD d=1 on maths: " in words
    best = ratios.fastest(ratios.per_prompt(bench).query("task == 'maths'"))
    assert best.decoder == "WFD d=1" and not best.rivals


def test_the_report_gives_the_match_to_ar_and_to_the_reference(bench):
    said = "\n".join(summaries.equality_sentences({"bench": bench}))
    generations, tokens = len(bench[bench.decoder == SHARED]), bench[bench.decoder == SHARED].tokens.sum()
    own, ar = 1 - 3 * generations / tokens, 1 - 20 * generations / tokens
    assert f"Equal to {TWIN}, which makes the same approximation: {own:.1%} of its tokens (to AR: {ar:.1%})." in said
    assert "This decoder is lossy" in said
    assert "WFD d=1 s=2 (approximate)" in summaries.approximate({"bench": bench})[0]


def test_every_decoder_figure_draws_a_run_with_a_plain_loop(synthetic):
    frame = synthetic.bench(decoders=("AR", "WFD d=1"))
    plain = frame[frame.decoder == "AR"].assign(decoder="plain loop", decode_seconds=lambda f: f.decode_seconds / 100)
    both = pd.concat([frame, plain])
    assert "plain loop" in bars(figures.draw("bench", both))
    assert ratios.fastest(ratios.per_prompt(both)).decoder == "WFD d=1"  # a baseline is no candidate


# ---- the factorial ----------------------------------------------------------------------------------------------


def factorial(prompts=5, carry=(False, True), model="tiny-huginn"):
    rows = []
    for c, k, v in product(carry, (False, True), (False, True)):
        for p in range(prompts):
            g = (2 + c + 0.5 * k + 0.7 * v + 6 * (c and k and v)) * (1 + 0.1 * p)
            rows.append((model, "maths", p, 0, f"{c}{k}{v}", c, k, v, 10 * g + 1, 10, 10 * (g - 1), 10 * g, 280, 28.0, 160 * g, 20 * g, 0))
    columns = ["model", "task", "prompt", "repeat", "decoder", "carry", "deep_k", "deep_v", "tokens", "verifications", "accepted",
               "committed", "recur_calls", "decode_seconds", "ar_recur_calls", "ar_decode_seconds", "token_mismatches"]
    return pd.DataFrame(rows, columns=columns)


def test_the_factorial_draws_its_cells_and_effects():
    figure = figures.draw("factorial", factorial())
    words = text_of(figure)
    for word in ("carry on", "carry off", "carry x deep K x deep V", "deep K/V", "tokens committed per verification", "decode seconds"):
        assert word in words
    assert len(figure.axes[0].patches) == 8 and "5 prompts" in figure.note.caption and "+7.20" in words  # 6 x (1 + mean of 0 .. 0.4)
    assert "carry deep_kv 12.24 tokens" in figure.note.alt


def test_the_two_by_two_and_one_prompt_draw_without_a_warning(recwarn, tmp_path):
    frame = factorial(prompts=1, carry=(False,))
    figure = figures.draw("factorial", frame)
    figures.save(figure, frame, tmp_path, "factorial")
    assert "does not inject" in figure.note.caption and len(figure.axes[0].patches) == 4
    assert [str(w.message) for w in recwarn] == []


def test_a_factorial_table_lies_in_a_run_folder_like_any_other(tmp_path):
    from figures.redraw import redraw
    from loopscope.records import write_table

    write_table(factorial(), tmp_path / "tables" / "factorial.parquet")
    assert "tiny-huginn_factorial.png" in [f.name for f in redraw(tmp_path)]
