"""The claims page: verdicts by interval alone, from made-up tables for every outcome; what a run lacks is said, with the command."""

import re
from itertools import product

import numpy as np
import pandas as pd
import pytest

import figures
from decoders.claim_checks import Measured
from decoders.claims import (CLAIMS, COMMANDS, FAILS, HOLDS, NO_INTERVAL, UNDECIDED, UNMEASURED, UNTESTABLE, VERDICTS, ClaimsResult, claims,
                             judge)
from figures import claims as page
from figures import published

BY_NAME = {claim.name: claim for claim in CLAIMS}


def measured(low, high, threshold=0.0, exact=False, value=None):
    return Measured("", (low + high) / 2 if value is None else value, low, high, 8, "x", threshold, "bench", exact=exact)


def bench(seconds, prompts=8, calls=None, mismatches=None, lossless=True, model="m", task="maths"):
    """seconds: decoder -> seconds per token of prompt p, or a number; AR takes 1 s and 16 calls a token."""
    rows = []
    for decoder, cost in {"AR": 1.0, **seconds}.items():
        for p in range(prompts):
            own = cost(p) if callable(cost) else cost
            n = 16 if decoder == "AR" else (calls or {}).get(decoder, 4)
            shared = "s=" in decoder
            rows.append((model, task, p, 0, 0, decoder, lossless and not shared, 11, 0.1, 10 * own, 10 * n, 1, 1, 1, 1, 1,
                         (mismatches or {}).get(decoder, 0) * (p == 0), 0.0, 1, "approximate" if shared else "lossless"))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "repeat", "order", "decoder", "lossless", "tokens", "prefill_seconds",
                                       "decode_seconds", "recur_calls", "prelude_calls", "readout_calls", "rows", "proposed", "accepted",
                                       "token_mismatches", "repetition_rate", "runs", "fidelity"])


def convergence(q, k, v, null=0.0, prompts=8, mean_removed=None):
    """Cosine at depth 1 by channel, +- a little by prompt; under the random nulls Q and K lead V by `null`."""
    rows = []
    for p in range(prompts):
        for name in ("none", "random_map", "random_weights", "token_mean_removed"):
            lead = {"none": (q, k, v), "token_mean_removed": mean_removed or (q, k, v)}.get(name, (0.5 + null, 0.5 + null, 0.5))
            for channel, value in zip("qkv", lead):
                for depth, at in ((1, value + 0.001 * (p % 3)), (2, 1.0)):
                    rows.append(("m", "maths", p, "keyed", name, channel, 0, depth, "cosine", at, 9))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "null", "channel", "layer", "depth", "metric", "value",
                                       "n_positions"])


def channels(aligned=0.5, deep_v=0.6, deep_k=0.55, wrong=0.4, prompts=8):
    rows = []
    for p in range(prompts):
        for policy, control, a in (("aligned", "none", aligned), ("deep_v", "none", deep_v), ("deep_k", "none", deep_k),
                                   ("deep_v", "shuffled_v", wrong), ("deep_v", "noise_v", wrong - 0.2)):
            for depth, lag in ((1, 1), (1, 4), (2, 1)):
                rows.append(("m", "maths", p, "keyed", depth, lag, policy, control, a + 0.01 * (p % 3) * (policy != "aligned"), 1.0, 9))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "depth", "lag", "policy", "control", "agreement", "kl_nats",
                                       "n_positions"])


def interventions(**options):
    from interventions import paired_effects

    table = channels(**options)
    return {"prefix_channels": table, "prefix_effects": paired_effects(table).frame}


def factorial(three_way=4.0, carry=True, prompts=8):
    rows = []
    for c, k, v in product((False, True), repeat=3):
        for p in range(prompts if carry or not c else 0):
            g = 2 + c + k + v + three_way * (c and k and v) + 0.1 * (p % 3)
            rows.append(("m", "maths", p, 0, f"DAS-Wave J=12 k=1 {k}{v}{c}", c, k, v, 10 * g + 1, 10, 10 * (g - 1), 10 * g, 280, 28.0,
                         160 * g, 20 * g, 0))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "repeat", "decoder", "carry", "deep_k", "deep_v", "tokens",
                                       "verifications", "accepted", "committed", "recur_calls", "decode_seconds", "ar_recur_calls",
                                       "ar_decode_seconds", "token_mismatches"])


def row(tables, name, part=None, **options):
    frame = claims(tables, which=(BY_NAME[name],), **options).frame
    frame = frame if part is None else frame[frame["part"] == part]
    assert len(frame) == 1
    return frame.iloc[0]


# ---- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high, verdict", [(0.1, 0.2, HOLDS), (-0.2, -0.1, FAILS), (-0.1, 0.2, UNDECIDED), (0.0, 0.2, UNDECIDED),
                                                (-0.2, 0.0, UNDECIDED), (np.nan, np.nan, NO_INTERVAL)])
def test_a_verdict_is_read_off_the_interval_and_never_off_the_mean(low, high, verdict):
    assert judge(measured(low, high, value=0.15)) == judge(measured(low, high, value=-0.15)) == verdict
    assert judge(measured(low + 1, high + 1, threshold=1.0)) == verdict


def test_equality_of_tokens_falls_with_one_counterexample():
    waves = {"WFD d=1": 0.5, "WFD d=2": 0.4}
    good = row({"bench": bench(waves)}, "wfd_lossless")
    bad = row({"bench": bench(waves, mismatches={"WFD d=2": 3})}, "wfd_lossless")
    assert good.verdict == HOLDS and good.value == 1 and 0 < good.low < 1 and "0 of 176 tokens differ" in good.note
    assert bad.verdict == FAILS and bad.value == pytest.approx(7 / 8) and "3 of 176 tokens differ" in bad.note
    other = row({"bench": bench(waves, mismatches={"WFD d=2": 3})}, "das_lossless")
    assert other.verdict == UNMEASURED


def test_an_approximate_wave_neither_breaks_losslessness_nor_stands_for_the_wave():
    table = bench({"WFD d=1": 0.5, "WFD d=1 s=4 (approximate)": 0.1}, mismatches={"WFD d=1 s=4 (approximate)": 9})
    assert row({"bench": table}, "wfd_lossless").verdict == HOLDS
    assert row({"bench": table}, "wfd_faster").value == pytest.approx(2)


@pytest.mark.parametrize("cost, verdict", [(0.5, HOLDS), (2.0, FAILS), (lambda p: 0.5 + p / 7, UNDECIDED)])
def test_faster_than_plain_decoding(cost, verdict):
    assert row({"bench": bench({"WFD d=1": cost})}, "wfd_faster").verdict == verdict


@pytest.mark.parametrize("wave, verdict", [(lambda p: 0.2 + 0.01 * (p % 2), HOLDS), (0.8, FAILS),
                                           (lambda p: 0.4 * (0.8 + 0.4 * (p % 2)), UNDECIDED)])
def test_wave_against_draft_then_verify_in_time(wave, verdict):
    found = row({"bench": bench({"WFD d=1": wave, "DtV d=1 K=8": 0.4, "DtV d=1 K=8 deep_kv": 0.01})}, "wfd_time")
    assert found.verdict == verdict and "against DtV d=1 K=8:" in found.measure  # the aligned one, which is what the paper compared


def test_calls_and_time_are_judged_apart_and_each_by_the_best_of_its_kind():
    table = bench({"WFD d=1": 0.5, "WFD d=2": 0.3, "DtV d=1 K=4": 0.4, "DtV d=1 K=8": 0.45}, calls={"WFD d=1": 2, "WFD d=2": 5,
                                                                                                 "DtV d=1 K=4": 4, "DtV d=1 K=8": 3})
    calls, time = row({"bench": table}, "wfd_calls"), row({"bench": table}, "wfd_time")
    assert calls.value == pytest.approx(3 / 2) and "WFD d=1 against DtV d=1 K=8" in calls.measure
    assert time.value == pytest.approx(0.4 / 0.3) and "WFD d=2 against DtV d=1 K=4" in time.measure


def test_comparisons_are_paired_over_prompts():
    """Prompts that differ tenfold while one decoder is always a little faster: unpaired, nothing could be said."""
    table = bench({"WFD d=1": lambda p: 10.0 ** (p % 2) * 0.9, "DtV d=1 K=8": lambda p: 10.0 ** (p % 2) * (1 + 0.01 * (p % 3))})
    assert row({"bench": table}, "wfd_time").verdict == HOLDS


def test_sharing_is_held_against_the_same_wave_without():
    table = bench({"WFD d=1": 0.5, "WFD d=2": 0.2, "WFD d=1 s=4 (approximate)": 0.4, "WFD d=4 s=1 (approximate)": 0.1},
                  mismatches={"WFD d=1 s=4 (approximate)": 11})
    found = row({"bench": table}, "wfd_sharing")
    assert found.verdict == HOLDS and found.value == pytest.approx(0.5 / 0.4) and "88% of its tokens" in found.note
    absent = row({"bench": bench({"WFD d=1": 0.5})}, "wfd_sharing")
    assert absent.verdict == UNMEASURED and "--decoder 'WFD d=1 s=4'" in absent.command and "bench m --task maths" in absent.command
    slower = bench({"WFD d=1": 0.5, "WFD d=1 s=4 (approximate)": 0.6})
    assert row({"bench": slower}, "wfd_sharing").verdict == FAILS
    assert row({"bench": table}, "wfd_sharing_accuracy").verdict == UNTESTABLE


@pytest.mark.parametrize("cosines, verdict", [((0.8, 0.9, 0.6), HOLDS), ((0.55, 0.9, 0.6), FAILS), ((0.6, 0.6, 0.6), UNDECIDED)])
def test_queries_and_keys_must_both_lead_values(cosines, verdict):
    found = row({"convergence": convergence(*cosines)}, "qk_before_v")
    assert found.verdict == verdict and found.value == pytest.approx(min(cosines[:2]) - cosines[2])


def test_a_lead_counts_beyond_the_nulls_one_by_one():
    table = {"convergence": convergence(0.8, 0.9, 0.6, null=0.3, mean_removed=(0.6, 0.7, 0.65))}
    parts = claims(table, which=(BY_NAME["qk_before_v_nulls"],)).frame.set_index("part")
    assert parts.loc["random map", "value"] == pytest.approx(0.2 - 0.3) and parts.loc["random map", "verdict"] == FAILS
    assert parts.loc["token mean removed", "value"] == pytest.approx(-0.05) and parts.loc["token mean removed", "verdict"] == FAILS
    beyond = claims({"convergence": convergence(0.8, 0.9, 0.6, null=0.1)}, which=(BY_NAME["qk_before_v_nulls"],)).frame
    assert set(beyond["part"]) == {"random map", "random weights", "token mean removed"} and set(beyond["verdict"]) == {HOLDS}


def test_mature_values_their_controls_and_the_other_channel():
    good = interventions()
    assert [row(good, n).verdict for n in ("mature_v", "right_values", "strongest_channel")] == [HOLDS, HOLDS, HOLDS]
    assert row(good, "mature_v").value == pytest.approx(10, abs=1.5) and row(good, "right_values").value == pytest.approx(20)
    assert "shuffled values" in row(good, "right_values").measure  # the control that did best
    worse = interventions(deep_v=0.3)
    assert row(worse, "mature_v").verdict == row(worse, "strongest_channel").verdict == FAILS
    assert row(worse, "right_values").verdict == UNTESTABLE  # no gain to explain
    assert row(interventions(wrong=0.6), "right_values").verdict == UNDECIDED


def test_the_interaction_needs_the_factorial_and_something_to_carry():
    assert row({"factorial": factorial(4.0)}, "interaction").verdict == HOLDS
    assert row({"factorial": factorial(4.0)}, "interaction").value == pytest.approx(4.0)
    assert row({"factorial": factorial(-4.0)}, "interaction").verdict == FAILS
    without = row({"factorial": factorial(carry=False)}, "interaction")
    assert without.verdict == UNTESTABLE and "nothing can be carried" in without.note
    absent = row({"bench": bench({})}, "interaction")
    assert absent.verdict == UNMEASURED and absent.command == "loopscope factorial m --task maths"
    broken = factorial()
    assert row({"factorial": broken[~((broken["prompt"] == 3) & broken["carry"])]}, "interaction").verdict == UNMEASURED


def test_published_speeds_of_other_models_get_no_verdict_but_ours_beside_them():
    table = bench({"WFD d=1": 0.4, "DAS-Wave J=12 k=1 deep_kv": 0.2})
    for name, value in (("wfd_ouro", 2.5), ("wfd_huginn", 2.5), ("das_speed", 5.0)):
        found = row({"bench": table}, name)
        assert found.verdict == UNTESTABLE and found.value == pytest.approx(value) and "not here" in found.note
    assert row({"bench": bench({})}, "das_speed").verdict == UNTESTABLE


def test_the_numbers_in_the_sentences_are_the_published_ones():
    spec, das = published.load("wfd")["spec_bench"], published.load("das")["speedup_and_A"]
    overall = spec["tasks"].index("overall")
    assert f"{spec['ouro_2_6b']['wfd_speedup'][overall]:.2f} times" in BY_NAME["wfd_ouro"].sentence
    assert f"{spec['huginn_3_5b']['wfd_speedup'][overall]:.2f} times" in BY_NAME["wfd_huginn"].sentence
    speeds = [speed for m in das if m in published.MODELS for speed, _ in das[m]["das_wave"]]
    low, high = map(int, re.search(r"is (\d) to (\d) times", BY_NAME["das_speed"].sentence).groups())
    assert (low, high) == (round(min(speeds)), round(max(speeds)))


# ---- rows, figure, text ------------------------------------------------------------------------------------------


def test_one_prompt_gets_no_verdict_and_few_prompts_a_warning():
    one, few = (row({"bench": bench({"WFD d=1": 0.5}, prompts=n)}, "wfd_faster") for n in (1, 4))
    assert one.verdict == NO_INTERVAL and "one prompt" in one.note
    assert few.verdict == HOLDS and "too few" in few.note


def test_every_row_has_a_known_verdict_a_table_and_a_command_that_makes_it_again():
    tables = {"bench": bench({"WFD d=1": 0.5}), **interventions()}
    frame = claims(tables, {"bench": "loopscope bench {model} --task {task} --repeats 3 {decoders}"}, {"m": "my models/m"}).frame
    assert set(frame["claim"]) == set(BY_NAME) and set(frame["verdict"]) <= set(VERDICTS) and (frame["table"] != "").all()
    assert (frame.loc[frame["verdict"].isin((HOLDS, FAILS, UNDECIDED, UNMEASURED)), "command"] != "").all()
    timed = frame[frame["claim"] == "wfd_faster"].iloc[0].command
    assert timed == "loopscope bench 'my models/m' --task maths --repeats 3 --decoder 'WFD d=1'"
    assert not frame["command"].str.contains("[{}]").any()
    assert set(COMMANDS) >= set(frame.loc[frame["measure"] != "", "table"])


def test_every_model_and_task_of_a_run_has_its_own_rows(synthetic):
    tables = {"bench": pd.concat([bench({"WFD d=1": 0.5}, model=m, task=t) for m in "ab" for t in ("maths", "code")])}
    frame = claims(tables).frame
    assert (frame.groupby(["model", "task"], sort=False).size() == len(CLAIMS)).all() and page.columns(frame)[0] == ("a", "maths")
    assert claims({"timing": synthetic.timing()}).frame.empty and page.section({"timing": synthetic.timing()}, {}) is None


def test_the_page_says_every_verdict_with_its_number_in_picture_and_text(tmp_path):
    tables = {"bench": bench({"WFD d=1": 0.5, "DtV d=1 K=8": 0.4}), "convergence": convergence(0.8, 0.9, 0.6), **interventions()}
    frame, shown = page.section(tables, {})
    assert isinstance(claims(tables), ClaimsResult) and dict(shown["counts"])[HOLDS] == (frame["verdict"] == HOLDS).sum()
    figure = figures.draw("claims", frame)
    words = " ".join(t.get_text() for t in figure.axes[0].texts)
    assert "✓ holds\n2.00x [2.00, 2.00]" in words and "✗ does not hold\n0.80x" in words and "not measured in this run" in words
    left = min(label.get_window_extent().x0 for label in figure.axes[0].get_yticklabels())
    assert left >= 0  # the sentences are not cut
    assert "2.00x" in figure.note.alt and figures.draw("claims", tables).note.alt == figure.note.alt
    text = page.export(frame, tmp_path / "claims.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(shown["rows"]) and all(line.count(" | ") == lines[0].count(" | ") for line in lines)
    assert "holds: 2.00x [2.00, 2.00]" in text and "`loopscope bench m --task maths --decoder 'WFD d=1'`" in text


def test_a_model_name_cannot_break_the_markdown_table():
    text = page.markdown(claims({"bench": bench({"WFD d=1": 0.5}, model="a|b")}).frame)
    head = next(line for line in text.splitlines() if line.startswith("| claim"))
    assert "a\\|b" in head
