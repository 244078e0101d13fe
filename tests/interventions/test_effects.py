"""Effects are paired over prompts, their intervals are honest at the edges, and the verdict says what they say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from interventions import EffectsResult, mature_v_verdict, paired_effects
from interventions.effects import bootstrap_mean
from interventions.prefix import PrefixChannelsResult
from loopscope.errors import SettingError


def _frame(shifts, n=20, depths=(1,), lags=(1,), noise=0.01, model="m", start="keyed", seed=0):
    """A prefix_channels table: aligned agreement and KL vary widely between prompts, each condition shifts them.

    shifts: (policy, control) -> change in agreement; KL moves by ten times as much the other way.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for depth in depths:
        for lag in lags:
            for prompt in range(n):
                base, kl = rng.uniform(0.2, 0.8), rng.uniform(3, 9)
                rows.append((model, "maths", prompt, start, depth, lag, "aligned", "none", base, kl, 50))
                for (policy, control), shift in shifts.items():
                    moved = shift + noise * rng.standard_normal()
                    rows.append((model, "maths", prompt, start, depth, lag, policy, control, base + moved, kl - 10 * moved, 50))
    return pd.DataFrame(rows, columns=list(PrefixChannelsResult.columns))


def test_a_constant_gain_under_wild_prompts_is_found_because_differences_are_paired():
    effects = paired_effects(_frame({("deep_v", "none"): 0.05, ("deep_k", "none"): -0.05, ("deep_kv", "none"): 0.0})).frame
    rows = effects.set_index(["policy", "metric"])
    assert set(effects.n_prompts) == {20}
    for policy, shift in (("deep_v", 0.05), ("deep_k", -0.05), ("deep_kv", 0.0)):
        for metric, scale in (("agreement", 1), ("kl_nats", -10)):
            row = rows.loc[policy, metric]
            assert row.low < row.effect < row.high
            assert row.effect == pytest.approx(scale * shift, abs=0.01 * abs(scale))
            assert row.high - row.low < 0.02 * abs(scale), "between-prompt spread (0.6 and 6) must cancel"
    assert rows.holds.to_dict() == {(p, m): p == "deep_v" for p in ("deep_v", "deep_k", "deep_kv") for m in ("agreement", "kl_nats")}


def test_prompts_are_paired_by_number_not_by_row():
    frame = _frame({("deep_v", "none"): 0.05})
    shuffled = frame.sample(frac=1, random_state=3)
    first, second = (paired_effects(f).frame.set_index("metric") for f in (frame, shuffled))
    for column in ("effect", "low", "high"):
        assert first[column].to_dict() == pytest.approx(second[column].to_dict()), column


def test_models_and_starts_are_kept_apart():
    frame = pd.concat([_frame({("deep_v", "none"): 0.1}, model="a"), _frame({("deep_v", "none"): -0.1}, model="b"),
                       _frame({("deep_v", "none"): 0.0}, model="a", start="zero", noise=0.02)])
    verdicts = {(v.model, v.start): v.verdict for v in mature_v_verdict(paired_effects(frame))}
    assert verdicts == {("a", "keyed"): "helps", ("b", "keyed"): "hurts", ("a", "zero"): "no clear effect"}


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = sum(low <= 0.3 <= high for _, low, high in
               (bootstrap_mean(rng.normal(0.3, 1, 20), level=0.9, resamples=500, seed=i) for i in range(200)))
    assert 160 <= hits <= 195


def test_intervals_at_the_edges():
    assert bootstrap_mean(np.full(6, 0.25)) == (0.25, 0.25, 0.25)
    mean, low, high = bootstrap_mean(np.array([0.5]))
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert all(math.isnan(x) for x in bootstrap_mean(np.array([])))
    mean, low, high = bootstrap_mean(np.array([0.0, 1.0]))
    assert mean == 0.5 and low <= 0.5 <= high and math.isfinite(low + high)
    mean, low, high = bootstrap_mean(np.array([0.0] * 19 + [1.0]))
    assert low <= mean <= high and high > 0
    assert bootstrap_mean(np.arange(9.0), seed=1) == bootstrap_mean(np.arange(9.0), seed=1)


def test_without_the_aligned_policy_there_is_nothing_to_compare_with():
    frame = _frame({("deep_v", "none"): 0.1})
    with pytest.raises(SettingError, match="lacks; add 'aligned'"):
        paired_effects(frame[frame.policy != "aligned"])


# ---- the verdict -------------------------------------------------------------------------------------------------


def _verdict(shifts, **options):
    (verdict,) = mature_v_verdict(paired_effects(_frame(shifts, **options)))
    return verdict


def test_the_verdict_follows_the_interval():
    helps = _verdict({("deep_v", "none"): 0.08, ("deep_k", "none"): -0.3})
    hurts = _verdict({("deep_v", "none"): -0.08, ("deep_k", "none"): 0.3})
    unclear = _verdict({("deep_v", "none"): 0.0})
    assert (helps.verdict, hurts.verdict, unclear.verdict) == ("helps", "hurts", "no clear effect")
    assert helps.low > 0 > hurts.high and helps.n_prompts == 20
    assert helps.kl_effect == pytest.approx(-0.8, abs=0.1) and hurts.kl_effect == pytest.approx(0.8, abs=0.1)
    assert "holds" in helps.sentence and "+8." in helps.sentence and "20 prompts" in helps.sentence and "depth-1" in helps.sentence
    assert "harm" in hurts.sentence and "no clear effect" in unclear.sentence


def test_a_gain_that_wrong_values_also_give_is_not_credited_to_the_values():
    specific = _verdict({("deep_v", "none"): 0.08, ("deep_v", "noise_v"): -0.2, ("deep_v", "shuffled_v"): 0.01})
    general = _verdict({("deep_v", "none"): 0.08, ("deep_v", "noise_v"): 0.08, ("deep_v", "shuffled_v"): 0.01})
    assert specific.specific and specific.control == "shuffled_v" and "not shown" not in specific.sentence
    assert general.specific is False and general.control == "noise_v" and "not shown to come from" in general.sentence
    assert _verdict({("deep_v", "none"): 0.08}).control is None


def test_the_verdict_is_read_off_the_shallowest_draft_unless_asked_otherwise():
    frame = pd.concat([_frame({("deep_v", "none"): 0.1}, depths=(1,), lags=(1,)),
                       _frame({("deep_v", "none"): -0.1}, depths=(1,), lags=(8,)),
                       _frame({("deep_v", "none"): -0.1}, depths=(2,), lags=(1, 8))])
    effects = paired_effects(frame)
    (default,), (deeper,) = mature_v_verdict(effects), mature_v_verdict(effects.frame, depth=2, lag=8)
    assert (default.verdict, default.depth, default.lag) == ("helps", 1, 1)
    assert (deeper.verdict, deeper.depth, deeper.lag) == ("hurts", 2, 8)
    assert (default.helps_at, default.hurts_at, default.cells) == (1, 3, 4)
    assert "of 4 depths and lags it helps at 1 and hurts at 3" in default.sentence
    with pytest.raises(SettingError, match="depth 4, lag 1"):
        mature_v_verdict(effects, depth=4)


def test_few_prompts_are_named_as_such():
    one, four, six = (_verdict({("deep_v", "none"): 0.1}, n=n) for n in (1, 4, 6))
    assert one.verdict == "no clear effect" and "one prompt gives no interval" in one.sentence
    assert "too narrow" in four.sentence and "too narrow" not in six.sentence


def test_effects_of_a_table_are_those_of_its_result():
    frame = _frame({("deep_v", "none"): 0.05})
    result = PrefixChannelsResult(frame, {"depth": 16}).effects(resamples=300)
    assert isinstance(result, EffectsResult) and result.meta["depth"] == 16 and result.meta["resamples"] == 300
    assert result.frame.equals(paired_effects(frame, resamples=300).frame)


def test_rounding_errors_are_no_effect():
    frame = paired_effects(_frame({("deep_v", "none"): 3e-10}, noise=1e-11)).frame
    found = frame[frame.metric == "agreement"]
    assert (found[["effect", "low"]] == 0).all(axis=None) and not found.holds.any()
    told = frame.assign(low=frame.low.where(frame.metric == "kl_nats", 4e-17), high=0.2)  # a table that an earlier version wrote
    assert mature_v_verdict(told)[0].verdict == "no clear effect"


def test_the_verdict_tells_the_change_in_kl_and_when_little_could_change():
    plain = mature_v_verdict(paired_effects(_frame({("deep_v", "none"): 0.05})))[0]
    assert f"KL divergence from it by {plain.kl_effect:+.3f} nats [{plain.kl_low:+.3f}, {plain.kl_high:+.3f}]" in plain.sentence
    assert plain.kl_low < -0.5 < plain.kl_high and 0.2 < plain.aligned < 0.8 and "little could change" not in plain.sentence
    high = _frame({("deep_v", "none"): 0.0}).assign(agreement=lambda f: 0.97 + f.agreement / 100)
    assert "already agrees 97." in (said := mature_v_verdict(paired_effects(high))[0].sentence) and "little could change" in said
    older = paired_effects(high).frame.drop(columns="aligned")
    assert mature_v_verdict(older)[0].aligned is None
