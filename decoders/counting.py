"""Block calls predicted from an accept sequence alone: no model, no decoder code.

Used as the oracle the decoders are tested against and by the plan. Positions are inputs: with N tokens committed, the
prefill's included, inputs are 0..N-2, and `accepts[i]` says whether the draft for input i+1 was right. Derived from
docs/algorithms.md, 2.2, 2.3 and 2.5; checked there against the count oracles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Counts(NamedTuple):
    """Predicted calls after prefill, and total rows over the recur calls."""

    recur: int
    prelude: int
    readout: int
    rows: int


def wavefront_counts(accepts: Sequence[bool], new_tokens: int, depth: int, draft_depth: int) -> Counts:
    """Wavefront Decoding without EOS: lane i+1 starts d ticks after lane i if its draft was right, else T ticks after."""
    last = new_tokens - 2  # last input
    if last < 0:
        return Counts(0, 0, 0, 0)
    if len(accepts) < last:
        raise ValueError(f"{new_tokens} tokens need {last} accepts, got {len(accepts)}")
    start, prelude, rows = 0, 0, 0
    reads: set[int] = set()
    end = 0
    for i in range(last + 1):
        end = start + depth
        prelude, rows = prelude + 1, rows + depth
        reads.add(end)
        if draft_depth < depth and i < last:
            reads.add(start + draft_depth)
        right = i < last and accepts[i]
        if i < last and draft_depth < depth and not right:
            # Lanes behind a wrong draft run until the tick that rejects it; each spawns the next d ticks later.
            for m in range(1, last - i + 1):
                born = start + m * draft_depth
                if born >= end:
                    break
                prelude, rows = prelude + 1, rows + end - born
                if i + m < last and born + draft_depth <= end:
                    reads.add(born + draft_depth)
        start = start + draft_depth if right and draft_depth < depth else end
    return Counts(end, prelude, len(reads), rows)


def draft_then_verify_counts(accepts: Sequence[bool], new_tokens: int, depth: int, draft_depth: int, block: int,
                             reuse: bool = True) -> Counts:
    """Draft-then-verify without EOS, blocks of K = min(block, remaining - 1). reuse: aligned reads."""
    recur = prelude = readout = rows = 0
    committed = 1
    while committed < new_tokens:
        size = min(block, new_tokens - committed - 1)
        if size == 0:
            recur, prelude, readout, rows = recur + depth, prelude + 1, readout + 1, rows + depth
        else:
            drafted = size + 1 if reuse else size
            verify = depth - draft_depth if reuse else depth
            recur += drafted * draft_depth + verify
            rows += drafted * draft_depth + verify * (size + 1)
            prelude, readout = prelude + size + 1, readout + size + 1
        run = 0
        while run < size and accepts[committed - 1 + run]:
            run += 1
        committed += run + 1
    return Counts(recur, prelude, readout, rows)


def das_wave_counts(accepted_per_block: Sequence[int], new_tokens: int, depth: int, rounds: int, updates: int,
                    capacity: int = 32, initial_width: int = 2) -> Counts:
    """DAS-Wave without EOS and without frozen rows; one entry of `accepted_per_block` for each block that had guesses."""
    recur = prelude = readout = rows = 0
    committed, blocks = 1, iter(accepted_per_block)
    while committed < new_tokens:
        most = min(capacity, new_tokens - committed - 1)
        if most == 0:
            recur, prelude, readout, rows, run = recur + depth, prelude + 1, readout + 1, rows + depth, 0
        else:
            widths = [min(most, initial_width + j) for j in range(rounds)]
            recur += rounds * updates + depth
            rows += updates * sum(widths) + depth * (widths[-1] + 1)
            prelude, readout = prelude + rounds + 1, readout + rounds + 1
            run = next(blocks)
        committed += run + 1
    return Counts(recur, prelude, readout, rows)


def autoregressive_counts(new_tokens: int, depth: int) -> Counts:
    """Autoregressive decoding: T calls, one prelude and one readout per token after the prefill's."""
    steps = new_tokens - 1
    return Counts(steps * depth, steps, steps, steps * depth)
