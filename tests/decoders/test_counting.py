"""The count oracles of docs/algorithms.md, 2.3: closed numbers worked out by hand there."""

import pytest

from decoders.counting import draft_then_verify_counts, wavefront_counts

N = 40


@pytest.mark.parametrize("depth, draft_depth, calls", [(4, 1, 42), (4, 2, 80), (4, 3, 118), (8, 2, 84), (32, 4, 184), (32, 1, 70)])
def test_wavefront_calls_when_every_draft_is_right(depth, draft_depth, calls):
    assert wavefront_counts([True] * (N - 2), N, depth, draft_depth).recur == calls == depth + (N - 2) * draft_depth


@pytest.mark.parametrize("depth, draft_depth, calls", [(4, 1, 156), (32, 4, 1248)])
def test_wavefront_calls_when_every_draft_is_wrong(depth, draft_depth, calls):
    assert wavefront_counts([False] * (N - 2), N, depth, draft_depth).recur == calls == (N - 1) * depth


def test_draft_then_verify_calls_with_blocks_of_remaining_minus_one():
    assert draft_then_verify_counts([True] * N, N, 4, 1, 4).recur == 63
    assert draft_then_verify_counts([False] * N, N, 4, 1, 4).recur == 302


def test_a_wave_at_full_draft_depth_is_autoregressive():
    counts = wavefront_counts([False] * N, N, 4, 4)
    assert counts == (156, 39, 39, 156)
