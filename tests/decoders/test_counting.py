"""The count oracles of docs/algorithms.md, 2.3: closed numbers worked out by hand there, and the schedules played tick by tick."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.counting import (
    Block,
    Counts,
    block_counts,
    das_wave_counts,
    draft_then_verify_counts,
    path_calls,
    wave_counts,
    wavefront_counts,
)

N = 40


@pytest.mark.parametrize("depth, draft_depth, calls", [(4, 1, 42), (4, 2, 80), (4, 3, 118), (8, 2, 84), (32, 4, 184), (32, 1, 70)])
def test_wavefront_calls_when_every_draft_is_right(depth, draft_depth, calls):
    assert wavefront_counts([True] * (N - 2), N, depth, draft_depth).recur == calls == depth + (N - 2) * draft_depth


@pytest.mark.parametrize("depth, draft_depth, calls", [(4, 1, 156), (32, 4, 1248)])
def test_wavefront_calls_when_every_draft_is_wrong(depth, draft_depth, calls):
    assert wavefront_counts([False] * (N - 2), N, depth, draft_depth).recur == calls == (N - 1) * depth


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.9])
def test_wavefront_ticks_per_token_of_independent_drafts(alpha):
    """alpha d + (1 - alpha) T, the mean over many tokens of drafts that are right every so often."""
    many, depth, d = 4001, 8, 2
    accepts = [int(alpha * (i + 1)) > int(alpha * i) for i in range(many)]
    per_token = wavefront_counts(accepts, many, depth, d).recur / (many - 1)
    assert per_token == pytest.approx(alpha * d + (1 - alpha) * depth, rel=0.01) and per_token < depth


def test_draft_then_verify_calls_with_blocks_of_remaining_minus_one():
    assert draft_then_verify_counts([True] * N, N, 4, 1, 4).recur == 63
    assert draft_then_verify_counts([False] * N, N, 4, 1, 4).recur == 302


def test_a_wave_at_full_draft_depth_is_autoregressive():
    counts = wavefront_counts([False] * N, N, 4, 4)
    assert counts == (156, 39, 39, 156)


def test_mature_spec_counts_drafts_and_a_fresh_verification_of_one_row_more():
    # One block of 3 drafts at d = 2, two right: 3 x 2 calls on one row, then T = 5 calls on 4 rows; then one token plainly.
    assert block_counts([Block(3, False, 2)], 5, 5, 2, reuse=False) == Counts(6 + 5 + 5, 4 + 1, 3 + 1 + 1, 6 + 5 * 4 + 5)


def test_a_block_cut_by_an_eos_runs_nothing_behind_it():
    # Two drafts, the second an EOS: reuse runs both to depth 1, then both from 1 to 4.
    assert block_counts([Block(2, True, 2)], 3, 4, 1) == Counts(2 + 3, 2, 3, 2 + 3 * 2)


def test_das_wave_counts_rounds_growth_early_stop_and_the_bonus_row():
    # J = 3, k = 2, W = 2, growth 2: widths 2, 4, 6, then T = 4 on 7 rows; all six right and the bonus token make 7.
    assert das_wave_counts([6], 8, 4, 3, 2, growth=2) == Counts(6 + 4, 4, 4, 2 * 12 + 4 * 7)
    # Without a bonus the block's last guess is the next anchor and the last token is decoded plainly.
    assert das_wave_counts([6], 8, 4, 3, 2, growth=2, bonus=False) == Counts(6 + 4 + 4, 5, 5, 2 * 12 + 4 * 6 + 4)
    # Refinement stopped after two rounds, and one guess was right: 2 tokens, then a block of the 3 that are left but one.
    assert das_wave_counts([1, 1], 6, 4, [2, 1], 1) == Counts(2 + 4 + 1 + 4 + 4, 3 + 2 + 1, 3 + 2 + 1, 2 + 3 + 4 * 4 + 2 + 4 * 3 + 4)
    # An EOS among the guesses: only what leads to it is verified.
    assert das_wave_counts([2], 3, 4, 2, 1, limit=10, cuts=[2]) == Counts(2 + 4, 3, 3, 2 + 3 + 4 * 2)


@pytest.mark.parametrize("settled, calls", [([1] * 9, 8 + 4), ([3] * 9, 24 + 4), ([None] * 9, 9 * 4), ([1, None, 2], 1 + 4 + 4), ([], 0)])
def test_a_waves_calls_are_the_depths_at_which_its_lanes_settled(settled, calls):
    assert path_calls(settled, 4) == calls


# ---- the pseudo-code of 2.3 and the re-drafting wave of 2.4, tick by tick -----------------------------------------


def play(says, tokens, depth, d, redraft, limit, eos):
    """-> (Counts, what lanes drafted). says(i, token, r): what the lane of input i, fed `token`, reads at depth r."""
    last, calls, preludes, readouts, rows = limit - 2, 0, 0, 0, 0
    committed, changes = 1, {}
    lanes = [[0, tokens[0], 0, None]] if len(tokens) > 1 else []  # input, token, depth, what it drafted
    while committed < len(tokens):
        preludes += sum(lane[2] == 0 for lane in lanes)
        calls, rows = calls + 1, rows + len(lanes)
        for lane in lanes:
            lane[2] += 1
        drafting = [lane for lane in lanes if d <= lane[2] < depth and lane[0] < last
                    and (lane[2] == d or (redraft and (lane[2] - d) % redraft == 0))]
        verifying = lanes[0][2] == depth
        readouts += bool(verifying or drafting)
        said = [(lane, says(lane[0], lane[1], lane[2])) for lane in drafting]
        for lane, token in said:
            if token != lane[3]:
                changes[calls, lane[0] + 1] = token
        if verifying:
            front, target = lanes.pop(0), tokens[committed]
            committed += 1
            if front[3] != target or not lanes:
                lanes = [[front[0] + 1, target, 0, None]]
                continue
        for lane, token in said:
            if lane in lanes and token != lane[3]:
                lane[3] = token
                del lanes[lanes.index(lane) + 1 :]
                if token not in eos:
                    lanes.append([lane[0] + 1, token, 0, None])
                break
    return Counts(calls, preludes, readouts, rows), changes


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(depth=st.integers(1, 9), d=st.integers(1, 9), redraft=st.one_of(st.none(), st.integers(1, 3)), n=st.integers(1, 14),
       extra=st.integers(0, 6), seed=st.integers(0, 10**6), vocab=st.integers(2, 5), ends=st.booleans())
def test_predicted_counts_are_those_of_the_schedule_played_tick_by_tick(depth, d, redraft, n, extra, seed, vocab, ends):
    """Any drafts, right or wrong; an EOS that ends the text before the limit, or among wrong drafts; any draft depth."""
    d = min(d, depth)

    def says(i, token, r):  # what a lane reads settles with depth, or not
        return hash((seed, i, token, min(r, seed % 7))) % vocab

    eos = (vocab - 1,) if ends else ()
    tokens = [0]
    while len(tokens) < n:
        tokens.append(says(len(tokens) - 1, tokens[-1], depth))
        if tokens[-1] in eos:
            break
    limit = n + extra if tokens[-1] in eos else len(tokens)
    counts, changes = play(says, tokens, depth, d, redraft, limit, eos)
    assert wave_counts(changes, tokens, depth, d, redraft, limit, eos) == counts
    settled = []
    for i in range(len(tokens) - 1):
        read = [r for r in range(d, depth) if r == d or (redraft and (r - d) % redraft == 0)] if i < limit - 2 else []
        drafted = [says(i, tokens[i], r) for r in read]
        at = next((r for j, r in enumerate(read) if all(t == drafted[-1] for t in drafted[j:])), None)
        settled.append(at if drafted and drafted[-1] == tokens[i + 1] else None)
    assert path_calls(settled, depth) == counts.recur
    if not (redraft or eos):
        accepts = [r is not None for r in settled]
        assert wavefront_counts(accepts, len(tokens), depth, d) == counts
