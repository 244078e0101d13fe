"""The join: a probe's value against acceptance on the same prompts, at the drafts' own depth and read, with rank correlations."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import figures
from figures import gallery, join
from loopscope.errors import SettingError

KEYS = ["model", "task", "prompt"]


def lens(values, depth=1, start="keyed", task="maths"):
    return pd.DataFrame([("m", task, p, start, depth, a) for p, a in enumerate(values)], columns=[*KEYS, "start", "depth", "agreement"])


def bench(rates, decoder="WFD d=1", fidelity="lossless", task="maths", proposed=100):
    rows = [("m", task, p, r, decoder, fidelity == "lossless", fidelity, proposed, round(proposed * a)) for p, a in enumerate(rates)
            for r in (0, 1)]
    return pd.DataFrame(rows, columns=[*KEYS, "repeat", "decoder", "lossless", "fidelity", "proposed", "accepted"])


def channels(by_policy, depth=1):
    rows = [("m", "maths", p, "keyed", depth, lag, policy, "none", a) for policy, values in by_policy.items()
            for p, a in enumerate(values) for lag in (1, 2)]
    rows.append(("m", "maths", 0, "keyed", depth, 1, "deep_v", "noise_v", 0.0))
    return pd.DataFrame(rows, columns=[*KEYS, "start", "depth", "lag", "policy", "control", "agreement"])


def convergence(values):
    wanted = ("none", "v", "cosine")
    rows = [("m", "maths", p, "keyed", null, channel, layer, 1, metric, value if (null, channel, metric) == wanted else -9.0)
            for p, value in enumerate(values) for null in ("none", "random_map") for channel in "qv" for layer in (0, 1)
            for metric in ("cosine", "rel_l2")]
    return pd.DataFrame(rows, columns=[*KEYS, "start", "null", "channel", "layer", "depth", "metric", "value"])


@pytest.mark.parametrize("label, at", [("WFD d=2", (2, "aligned")), ("WFD d=4 re=2", (4, "aligned")),
                                       ("DtV d=1 K=8 deep_kv", (1, "deep_kv")),
                                       ("DAS-Wave J=12 k=2 deep_v", (2, "deep_v")), ("LoopSpec d1=1 d2=2", (1, "aligned")),
                                       ("AR", None), ("PLD K=8 n=3", None), ("plain loop", None)])
def test_a_label_tells_at_which_depth_and_read_its_drafts_are_made(label, at):
    assert join.draft_of(label) == at


def test_only_prompts_that_were_both_probed_and_timed_are_joined_and_repeats_are_one():
    found = join.table({"depth_lens": lens([0.5, 0.6, 0.7, 0.8]), "bench": bench([0.1, 0.2, 0.3])})
    assert found["prompt"].tolist() == [0, 1, 2] and found["value"].tolist() == [0.5, 0.6, 0.7]
    assert found["acceptance"].tolist() == pytest.approx([0.1, 0.2, 0.3]) and set(found["depth"]) == {1}
    assert join.table({"depth_lens": lens([0.5], task="code"), "bench": bench([0.1])}).empty


def test_the_probe_is_read_at_the_decoders_own_depth_policy_and_start():
    tables = {"depth_lens": pd.concat([lens([0.5] * 4), lens([0.7] * 4, depth=2), lens([0.1] * 4, depth=2, start="zero")]),
              "prefix_channels": channels({"aligned": [0.2] * 4, "deep_kv": [0.9] * 4}, depth=2),
              "bench": bench([0.4] * 4, "DtV d=2 K=8 deep_kv")}
    found = join.table(tables).groupby("probe")["value"].unique()
    assert found["agreement"].tolist() == [0.7] and found["agreement_as_read"].tolist() == [0.9]
    told = {"prefix_channels": channels({"aligned": [0.2] * 4, "deep_v": [0.8] * 4}), "bench": bench([0.4] * 4, "DtV d=1 K=8 deep_v")}
    assert join.table(told)["value"].tolist() == [0.8] * 4  # not the control, which reads wrong values
    cosines = join.table({"convergence": convergence([0.3, 0.4]), "bench": bench([0.5, 0.6])})
    assert cosines["value"].tolist() == pytest.approx([0.3, 0.4]) and set(cosines["probe"]) == {"v_cosine"}


def test_decoders_that_are_not_lossless_and_those_without_drafts_are_left_out():
    shared = bench([0.9] * 4, "WFD d=1 s=4 (approximate)", "approximate")
    rows = pd.concat([bench([0.4] * 4), shared, bench([0.0] * 4, "AR", proposed=0), bench([0.5] * 4, "PLD K=8 n=3")])
    assert set(join.table({"depth_lens": lens([0.5] * 4), "bench": rows})["decoder"]) == {"WFD d=1"}


def test_rho_is_spearmans_with_an_interval_over_prompts():
    draw = np.random.default_rng(0)
    values, noise = np.linspace(0.5, 0.9, 12), draw.normal(0, 0.08, 12)
    rates = np.round(np.clip(values + noise, 0, 1), 2)
    found = join.correlations(join.table({"depth_lens": lens(values), "bench": bench(rates)}), 400)
    assert len(found) == 1 and found.loc[0, "n"] == 12
    assert found.loc[0, "rho"] == pytest.approx(stats.spearmanr(values, rates).statistic)
    assert found.loc[0, "low"] < found.loc[0, "rho"] < found.loc[0, "high"] <= 1
    worse = join.correlations(join.table({"depth_lens": lens(values), "bench": bench(draw.permutation(rates))}), 400)
    assert worse.loc[0, "low"] < 0 < worse.loc[0, "high"]


def test_two_decoders_on_one_prompt_are_drawn_together():
    """Twice the rows of the same prompts are not twice the evidence: the interval must not shrink."""
    values = [0.5, 0.9, 0.6, 0.8, 0.7, 0.55]
    rates = [0.6, 0.7, 0.5, 0.9, 0.65, 0.8]
    one = join.table({"depth_lens": lens(values), "bench": bench(rates)})
    two = join.table({"depth_lens": lens(values), "bench": pd.concat([bench(rates), bench(rates, "DtV d=1 K=8")])})
    both = join.correlations(two, 400).set_index("decoder").loc[""]
    assert join.spearman(one, 400) == pytest.approx((both["rho"], both["low"], both["high"]), abs=1e-9)


@pytest.mark.parametrize("values, rates", [([0.5] * 6, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), ([0.5, 0.6, 0.7, 0.8, 0.9, 1.0], [1.0] * 6),
                                           ([0.5, 0.6, 0.7], [0.1, 0.2, 0.3])])
def test_where_nothing_varies_or_prompts_are_few_there_is_no_correlation(values, rates):
    found = join.correlations(join.table({"depth_lens": lens(values), "bench": bench(rates)}), 50)
    assert found[["rho", "low", "high"]].isna().all(axis=None)


def test_the_figure_says_each_correlation_and_draws_each_prompt(synthetic, recwarn):
    tables = {k: getattr(synthetic, k)(prompts=5) for k in ("depth_lens", "convergence", "bench")}
    tables["prefix_channels"] = synthetic.prefix_channels(prompts=5, depths=(1, 2), lags=(1,))
    tables["bench"] = tables["bench"].assign(accepted=tables["bench"]["accepted"] - 3 * tables["bench"]["prompt"])
    figure = figures.draw("join", tables)
    assert [ax.get_title("left").split(":")[0] for ax in figure.axes] == ["maths"] * 3 + ["code"] * 3
    assert all("rho" in ax.get_title("left") for ax in figure.axes) and "WFD d=1: rho" in figure.axes[0].texts[0].get_text()
    points = sum(len(line.get_xdata()) for line in figure.axes[0].lines)
    assert points == 5 * 5 + 5  # five decoders that draft, five prompts, and a mean each
    assert "rho" in figure.note.alt and "Spearman" in figure.note.caption
    tidy = join.table(tables)
    assert figures.draw("join", tidy).note.alt == figure.note.alt  # redrawn from the frame that is saved beside it
    assert [str(w.message) for w in recwarn] == []


def test_nothing_to_join_is_said_and_the_gallery_leaves_it_out(synthetic):
    with pytest.raises(SettingError, match="nothing to join"):
        figures.draw("join", {"bench": synthetic.bench(prompts=2)})
    tables = {"bench": synthetic.bench(prompts=3), "depth_lens": synthetic.depth_lens(prompts=3)}
    assert "join" in [plate.kind for plate in gallery.plates(tables)]
    assert "join" not in [plate.kind for plate in gallery.plates({"bench": tables["bench"]})]
