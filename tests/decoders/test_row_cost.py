"""The benchmark of rows on a CPU, at toy size: it runs, and what it reports follows from what it timed."""

import json

import pytest
import torch

from decoders import row_cost


@pytest.fixture(scope="module")
def result():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines: list[str] = []
    try:
        yield row_cost.measure(toy=True, repeats=2, decodes=1, prefix=8, say=lines.append), lines
    finally:
        torch.set_num_threads(threads)


def test_every_call_is_measured_with_both_forms_of_the_weights(result):
    calls = result[0]["calls"]
    assert {(c["weights"], c["shape"], c["rows"]) for c in calls} == {
        (w, s, n) for w in ("plain", "packed") for s in ("wave", "chain") for n in row_cost.ROWS}
    assert all(c["ms"]["low"] <= c["ms"]["median"] <= c["ms"]["high"] and c["ms"]["n"] == 2 and c["best_ms"] > 0 for c in calls)
    assert all(c["ratio"]["median"] == 1 for c in calls if c["rows"] == 1)


def test_the_profile_tells_packed_from_plain_and_leaves_nothing_out(result):
    assert all(spent > 0 for form in result[0]["profile"].values() for parts in form.values() for spent in parts.values())


def test_the_decodes_are_what_they_are_called(result):
    decodes = result[0]["decodes"]
    ar, wave = decodes["facts"]["AR"], decodes["facts"]["WFD"]
    assert ar["recur_calls"] == 16 * (ar["tokens"] - 1) and ar["mean_rows"] == 1 < wave["mean_rows"]
    assert "forced alpha=0.95" in wave["label"] and decodes["forced_alpha"] == 0.95
    assert decodes["ratio_of_calls"] == 16 / (wave["recur_calls"] / (wave["tokens"] - 1))
    ms = decodes["ms_per_token"]["packed"]
    assert decodes["speedup_of_the_wave"]["packed"]["median"] == pytest.approx(ms["AR"]["median"] / ms["WFD"]["median"])


def test_the_json_says_what_ran_where_and_no_host(result):
    text = json.dumps(result[0])
    assert all(key in result[0] for key in ("versions", "hardware", "date", "git", "seed", "dtype", "parameters", "prefix"))
    import platform

    assert platform.node() not in text and any("ms/token" in line for line in result[1])


def test_an_interval_is_made_of_order_statistics():
    """Of 15 values the 4th and 12th: P(X <= 3) for X ~ B(15, 1/2) is .0176, P(X <= 4) is .059."""
    found = row_cost._of([float(i) for i in range(1, 16)])
    assert found == {"median": 8.0, "low": 4.0, "high": 12.0, "n": 15}
    assert row_cost._of([2.0, 1.0]) == {"median": 1.5, "low": 1.0, "high": 2.0, "n": 2}
