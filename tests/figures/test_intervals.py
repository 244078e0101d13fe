"""Intervals are over prompts; pairing and pooling are what they say."""

import numpy as np
import pandas as pd
import pytest

from figures import intervals, ratios, style


def frame(values, **columns):
    return pd.DataFrame({"task": "maths", "prompt": range(len(values)), "value": values, **columns})


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(1.0, 1.0, (200, 20))
    low, high = intervals.bootstrap(draws, resamples=500)
    assert 0.88 <= ((low < 1.0) & (1.0 < high)).mean() <= 0.99


def test_one_prompt_has_no_interval_and_equal_prompts_have_a_point():
    one = intervals.table(frame([0.5]), [], "value")
    assert one["mean"][0] == 0.5 and np.isnan(one["low"][0]) and one["n"][0] == 1
    same = intervals.table(frame([0.5] * 6), [], "value")
    assert (same["low"][0], same["high"][0]) == (0.5, 0.5)


def test_a_prompt_counts_once_however_many_rows_it_has():
    many = pd.concat([frame([0.0, 1.0])] + [frame([0.0])] * 50)
    assert intervals.table(many, [], "value")["mean"][0] == 0.5


def test_prompts_of_two_tasks_with_one_number_stay_two_prompts():
    both = pd.concat([frame([0.0, 1.0]), frame([0.0, 1.0]).assign(task="code")])
    assert intervals.table(both, [], "value")["n"][0] == 4
    assert list(intervals.table(both, ["task"], "value")["n"]) == [2, 2]


def test_pooled_rates_weigh_prompts_by_what_they_reached():
    runs = pd.DataFrame({"task": "maths", "prompt": [0, 1], "reached": [90, 10], "accepted": [90, 0]})
    rate = intervals.ratio_table(runs, [], "accepted", "reached")
    assert rate["mean"][0] == 0.9 and rate["total"][0] == 100


def test_paired_differences_remove_what_prompts_share():
    rng = np.random.default_rng(1)
    level = rng.normal(0, 10, 12)
    table = pd.concat([frame(level, policy="aligned"), frame(level + 0.1 + rng.normal(0, 0.01, 12), policy="deep_v")], ignore_index=True)
    differences = intervals.paired(table, ["task", "prompt"], "value", table["policy"] == "aligned")
    effect = intervals.table(differences[differences["policy"] == "deep_v"], [], "difference")
    assert effect["low"][0] > 0.05 and effect["high"][0] < 0.15


def test_speedups_are_ratios_on_the_same_prompt(synthetic):
    bench = synthetic.bench(prompts=2, repeats=1, decoders=("AR", "WFD d=1"))
    bench["decode_seconds"] = np.where(bench["decoder"] == "AR", 2.0, 0.5) * (1 + bench["prompt"])
    pairs = ratios.per_prompt(bench)
    assert pairs.loc[pairs["decoder"] == "WFD d=1", "time_speedup"].tolist() == [4.0] * 4
    assert pairs.loc[pairs["decoder"] == "AR", "call_speedup"].tolist() == [1.0] * 4


def test_mismatched_tokens_are_counted_not_hidden(synthetic):
    from figures.speedup import same_tokens

    clean, wrong = (same_tokens(ratios.equality(synthetic.bench(mismatches=m))) for m in (0, 1))
    assert "5 of 5" in clean and "differ" not in clean
    assert "0 of 5" in wrong and "tokens differ" in wrong


def test_channels_policies_and_decoders_have_two_cues_each():
    for looks in (style.CHANNELS, style.DECODERS, style.POLICIES):
        assert len({k.colour for k in looks.values()}) == len(looks)
        assert len({k.marker for k in looks.values()}) == len(looks)


def test_colours_stay_apart_for_colour_blind_eyes():
    # Machado, Oliveira and Fernandes (2009), severity 1: deuteranopia and protanopia, applied to linear RGB
    blind = [
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    ]
    for looks in (style.CHANNELS, style.DECODERS):
        rgb = np.array([[int(k.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for k in looks.values()])
        for matrix in blind:
            seen = np.clip((rgb**2.2) @ matrix.T, 0, 1) ** (1 / 2.2)
            gaps = [np.abs(a - b).max() for i, a in enumerate(seen) for b in seen[:i]]
            assert min(gaps) > 0.1


@pytest.mark.parametrize(("token", "label"), [("\n", "\\n"), ("a\tb", "a\\tb"), ("\u6f22", "\u25a1"), ("x" * 30, "x" * 13 + "\u2026")])
def test_token_labels_are_printable_and_short(token, label):
    assert style.plain(token) == label
