"""Block calls predicted from what was drafted and committed: no model, no decoder code.

Used as the oracle the decoders are tested against and by the plan. Positions are inputs: with N tokens committed, the
prefill's included, inputs are 0..N-2, and `accepts[i]` says whether the draft for input i+1 was right. `limit` is how many
tokens decoding was allowed (default: N): decoders draft up to it, and an EOS may end them before. Derived from
docs/algorithms.md, 2.2 to 2.5; checked there against the count oracles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


def wave_counts(changes: Mapping[tuple[int, int], int], tokens: Sequence[int], depth: int, draft_depth: int, redraft: int | None = None,
                limit: int | None = None, eos: Collection[int] = ()) -> Counts:
    """A wavefront, re-drafting or not, as lives of lanes: each is born, reads at its depths, and ends when something in front says so.

    tokens: what was committed, tokens[0] by the prefill. changes: (tick, i) -> token, whenever the lane of input i - 1 drafted
    token i for the first time or anew at that tick; ticks count calls from 1, and a lane born at tick b has depth r at b + r.
    """
    last = (limit or len(tokens)) - 2
    depths = [r for r in range(draft_depth, depth) if r == draft_depth or (redraft and (r - draft_depth) % redraft == 0)]
    reads: set[int] = set()
    prelude = rows = 0

    def live(i: int, born: int, end: int) -> list[tuple[int, int]]:
        """Count the lane of input i until `end`; the (tick, token) of what it drafted and did not itself void at `end`."""
        nonlocal prelude, rows
        prelude, rows = prelude + 1, rows + end - born
        if i >= last:
            return []
        reads.update(born + r for r in depths if born + r <= end)
        return [(born + r, changes[born + r, i + 1]) for r in depths if born + r < end and (born + r, i + 1) in changes]

    def behind(i: int, drafted: list[tuple[int, int]], end: int) -> None:
        """Lanes at input i, one for each draft, until the next draft or the end takes their place."""
        for (tick, token), until in zip(drafted, [t for t, _ in drafted[1:]] + [end]):
            if token not in eos:
                behind(i + 1, live(i, tick, until), until)

    born = 0
    for i in range(len(tokens) - 1):
        end = born + depth
        reads.add(end)
        drafted = live(i, born, end)
        right = bool(drafted) and drafted[-1][1] == tokens[i + 1] and i + 2 < len(tokens)
        if right:  # the lanes of its earlier, wrong drafts ended when it changed them
            behind_wrong, born = drafted[:-1], drafted[-1][0]
            behind(i + 1, behind_wrong, born)
        else:
            behind(i + 1, drafted, end)
            born = end
    return Counts(end if len(tokens) > 1 else 0, prelude, len(reads), rows)


def path_calls(settled: Sequence[int | None], depth: int) -> int:
    """Block calls of any wave: settled[i] is the depth at which lane i last drafted what was committed, None where it never did.

    Lane i+1 starts when lane i's reading last changed to the final token (docs/algorithms.md, 2.4). One entry for each input.
    """
    if not settled:
        return 0
    return sum(depth if r is None else r for r in settled[:-1]) + depth


class Block(NamedTuple):
    """A verified block: drafts judged in it at most, whether an EOS among them cut it, how many were accepted, rounds of refinement.

    gained: tokens it committed; None: the accepted and one more, as where no end of the text lies among the accepted.
    """

    drafts: int
    ends: bool
    accepted: int
    rounds: int = 0
    gained: int | None = None


def draft_then_verify_counts(accepts: Sequence[bool], new_tokens: int, depth: int, draft_depth: int, block: int,
                             reuse: bool = True) -> Counts:
    """Draft-then-verify without EOS, blocks of K = min(block, remaining - 1). reuse: aligned reads."""
    blocks, committed = [], 1
    while committed < new_tokens - 1:
        size = min(block, new_tokens - committed - 1)
        run = 0
        while run < size and accepts[committed - 1 + run]:
            run += 1
        blocks.append(Block(size, False, run))
        committed += run + 1
    return block_counts(blocks, new_tokens, depth, draft_depth, reuse)


def block_counts(blocks: Sequence[Block], new_tokens: int, depth: int, draft_depth: int, reuse: bool = True) -> Counts:
    """Draft-then-verify, block by block; tokens that no block committed were decoded plainly. draft_depth 0: drafts cost nothing."""
    recur = prelude = readout = rows = 0
    committed = 1
    for drafts, ends, accepted, _, gained in blocks:
        verified = drafts if ends else drafts + 1  # nothing is run behind an EOS
        drafted = verified if reuse else drafts
        deeper = depth - draft_depth if reuse else depth
        recur += drafted * draft_depth + deeper
        rows += drafted * draft_depth + deeper * verified
        prelude += verified if draft_depth else 1
        readout += (drafts if draft_depth else 0) + 1
        committed += accepted + 1 if gained is None else gained
    plain = max(new_tokens - committed, 0)
    return Counts(recur + plain * depth, prelude + plain, readout + plain, rows + plain * depth)


def das_wave_counts(accepted_per_block: Sequence[int], new_tokens: int, depth: int, rounds: int | Sequence[int], updates: int,
                    capacity: int = 32, initial_width: int = 2, growth: int = 1, bonus: bool = True,
                    limit: int | None = None, cuts: Sequence[int | None] = ()) -> Counts:
    """DAS-Wave without frozen rows; one entry of `accepted_per_block` for each block that had guesses.

    rounds: of all blocks, or of each (where refinement stops early). cuts: of each block, how many guesses there were up to an EOS
    among them (None: no EOS).
    """
    recur = prelude = readout = rows = 0
    committed, block = 1, 0
    while committed < new_tokens:
        most = min(capacity, (limit or new_tokens) - committed - 1)
        if most == 0:
            recur, prelude, readout, rows, gained = recur + depth, prelude + 1, readout + 1, rows + depth, 1
        else:
            j = rounds if isinstance(rounds, int) else rounds[block]
            widths = [min(most, initial_width + growth * i) for i in range(j)]
            cut = cuts[block] if block < len(cuts) else None
            verified = cut if cut is not None else widths[-1] + bonus
            recur += j * updates + depth
            rows += updates * sum(widths) + depth * verified
            prelude, readout = prelude + j + 1, readout + j + 1
            gained = min(accepted_per_block[block] + 1, verified)
            block += 1
        committed += gained
    return Counts(recur, prelude, readout, rows)


def autoregressive_counts(new_tokens: int, depth: int) -> Counts:
    """Autoregressive decoding: T calls, one prelude and one readout per token after the prefill's."""
    steps = new_tokens - 1
    return Counts(steps * depth, steps, steps, steps * depth)
