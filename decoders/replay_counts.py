"""What a wave or a block decoder does, worked out from drafts alone: no model, no cache, no decoder code.

Lane i is new token i as an input. What it drafts for token i + 1, read by read, is its *history*; the token itself is its *truth*.
A lane on right inputs has a known history, so everything that decides which draft is kept and when it began is exact. Lanes behind
a wrong draft are dropped unjudged: they cost rows, preludes and readouts only. Their number is exact too as long as nothing they
say matters; where it does (another draft on re-reading, a drafted end of text) they are taken to say what the lane at their
position would, and the outcome is marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Child(NamedTuple):
    """A successor that a lane spawns `born` ticks after its own start with `token`, and drops `dropped` ticks after its own start."""

    born: int
    dropped: int
    token: int


History = Sequence[int]  # the tokens a lane drafts at its reading depths
Branching = Callable[[History], list[Child]]
UNKNOWN = -1  # the token of a lane beyond the text


@dataclass(frozen=True)
class Text:
    """What a decoder is replayed on: truth[i] is what lane i commits; limit: new tokens asked for; eos: ids that end the text."""

    truth: Sequence[int]
    limit: int
    eos: frozenset[int]

    @property
    def drafting(self) -> int:
        """Lanes below this one may draft: a later one's successor could never be an input."""
        return self.limit - 2


@dataclass(frozen=True)
class Outcome:
    """Predicted counts after prefill, as decoders.generation.Generation counts them. widths: block calls by rows per call; branched:
    those of them in which two rows stood at one position; fresh: those that did not go on with the rows of the call before (a wave's
    are not told apart: all of them plan anew how rows attend); embedded and read: preludes and readouts by rows per call. checks:
    readouts that judge drafts and commit; unread: those whose tokens the host does not wait for.

    exact: whether recur, proposed, accepted and runs are; rows_exact: whether rows, widths, prelude and readout are; note: why not.
    """

    recur: int
    prelude: int
    readout: int
    rows: int
    proposed: int
    accepted: int
    runs: list[int]
    accepts: dict[int, bool]
    widths: dict[int, int] = field(default_factory=dict)
    exact: bool = True
    rows_exact: bool = True
    note: str = ""
    branched: dict[int, int] = field(default_factory=dict)
    fresh: dict[int, int] = field(default_factory=dict)
    embedded: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    checks: int = 0
    unread: int = 0


def rereading(depths: Sequence[int], full: int) -> Branching:
    """Wavefront: a lane has one successor at a time; it is dropped, with all behind it, when a later read says another token."""

    def children(history: History) -> list[Child]:
        changes = [k for k in range(len(history)) if k == 0 or history[k] != history[k - 1]]
        ends = [depths[k] for k in changes[1:]] + [full]
        return [Child(depths[k], end, history[k]) for k, end in zip(changes, ends)]

    return children


def twice(depths: Sequence[int], full: int) -> Branching:
    """LoopSpec: a second successor beside the first where the second read says another token; both live until the lane is judged."""

    def children(history: History) -> list[Child]:
        return [Child(depth, full, token) for k, (depth, token) in enumerate(zip(depths, history)) if token not in history[:k]]

    return children


def starts(histories: Sequence[History], text: Text, full: int, children: Branching) -> list[int]:
    """The tick after which each lane first ran, in the incarnation that was verified: lane 0 at 0."""
    at = [0]
    for i in range(len(text.truth) - 1):
        at.append(at[-1] + next((c.born for c in _drafted(histories, i, text, children) if _kept(c, i, text, full)), full))
    return at[: len(text.truth)]


def _drafted(histories: Sequence[History], i: int, text: Text, children: Branching) -> list[Child]:
    return children(histories[i]) if i < min(text.drafting, len(histories)) else []


def _kept(child: Child, i: int, text: Text, full: int) -> bool:
    return child.dropped == full and child.token == text.truth[i]


def wave(histories: Sequence[History], text: Text, full: int, depths: Sequence[int], children: Branching) -> Outcome:
    """A wave at full depth T that reads its lanes at `depths` (all below T). histories: of lanes 0, 1, ..; one token per depth."""
    born = starts(histories, text, full, children)
    if not born:
        return Outcome(0, 0, 0, 0, 0, 0, [], {})
    end = born[-1] + full
    accepts = {i + 1: any(_kept(c, i, text, full) for c in _drafted(histories, i, text, children))
               for i in range(len(born)) if depths and i < text.drafting}
    side = _side_lanes(histories, text, full, depths, children, born)
    lanes = Counter({(s, s + full): 1 for s in born}) + side.lives
    reads = Counter(s + full for s in born) + Counter(s + d for i, s in enumerate(born) if i < text.drafting for d in depths) + side.reads
    widths = _widths(lanes, end)
    branched = Counter(widths[tick] for tick in _branching(side.beside, born, full, end))
    together: Counter = Counter()  # lanes that are born together share a call
    for (start, _), count in lanes.items():
        together[start] += count
    return Outcome(end, len(together), len(reads), sum(widths), len(accepts), sum(accepts.values()), runs_of(accepts), accepts,
                   ordered(Counter(widths)), True, side.exact, "; ".join(side.notes), ordered(branched),
                   embedded=ordered(Counter(together.values())), read=ordered(Counter(reads.values())), checks=len(born))


def ordered(counts: Counter) -> dict:
    """What was counted at least once, by key."""
    return dict(sorted((+counts).items()))


def _branching(beside: Sequence[Counter], born: Sequence[int], full: int, end: int) -> set[int]:
    """Ticks (from 0) in which two lanes run at one index. beside: of each index, the lanes that are dropped."""
    ticks: set[int] = set()
    for i, lives in enumerate(beside):
        if lives:
            main = Counter({(born[i], born[i] + full): 1}) if i < len(born) else Counter()
            ticks |= {tick for tick, n in enumerate(_widths(lives + main, end)) if n > 1}
    return ticks


def most_lanes(histories: Sequence[History], text: Text, full: int, depths: Sequence[int], children: Branching) -> int:
    """The most lanes that such a wave can have in flight, whatever those behind wrong drafts say."""
    born = starts(histories, text, full, children)
    if not born:
        return 0
    side = _side_lanes(histories, text, full, depths, children, born)
    return max(_widths(Counter({(s, s + full): 1 for s in born}) + side.most, born[-1] + full))


@dataclass
class _Side:
    """Lanes that are dropped: (start, dropped) -> how many; `most`: how many at most, whatever they say."""

    lives: Counter = field(default_factory=Counter)
    beside: list[Counter] = field(default_factory=list)  # the same by index
    most: Counter = field(default_factory=Counter)
    reads: Counter = field(default_factory=Counter)  # ticks -> rows that are read
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.notes


def _side_lanes(histories: Sequence[History], text: Text, full: int, depths: Sequence[int], children: Branching,
                born: Sequence[int]) -> _Side:
    side, n = _Side(), len(born)
    now: Counter = Counter()  # dropped lanes at index i: (start, dropped) -> how many
    now_most: Counter = Counter()
    wavers = ends = False
    anything = list(range(UNKNOWN - len(depths), UNKNOWN))  # a history in which every read says something new
    for i in range(max(text.limit - 1, 0)):
        side.lives.update(now)
        side.beside.append(now)
        side.most.update(now_most)
        behind: Counter = Counter()
        behind_most: Counter = Counter()
        if i < text.drafting:
            known = histories[i] if i < len(histories) else [UNKNOWN] * len(depths)
            for (start, dropped), count in now.items():
                side.reads.update({start + d: count for d in depths if start + d <= dropped})
                wavers |= any(start + d < dropped for d in depths[1:])
                ends |= start + depths[0] < dropped
                behind.update(_spawn(start, dropped, count, children(known), text))
            for (start, dropped), count in now_most.items():
                behind_most.update(_spawn(start, dropped, count, children(anything), text))
            if i < n:
                last = i == n - 1  # a right draft of the last lane is either no lane (it ends the text) or dropped with the rest
                wrong = [c for c in _drafted(histories, i, text, children) if last or not _kept(c, i, text, full)]
                spawned = _spawn(born[i], born[i] + full, 1, wrong, text)
                behind.update(spawned)
                behind_most.update(spawned)
        now, now_most = behind, behind_most
        if i >= n and not now and not now_most:
            break
    notes = []
    if wavers:
        notes.append("what lanes behind a wrong draft say when they are read again is not known")
    if ends and text.eos:
        notes.append("lanes behind a wrong draft may draft an end of text, which spawns nothing")
    side.notes = tuple(notes)
    return side


def _spawn(start: int, dropped: int, count: int, children: Sequence[Child], text: Text) -> Counter:
    """Lanes spawned by `count` lanes that live from `start` until `dropped`."""
    spawned: Counter = Counter()
    for child in children:
        if child.token not in text.eos and start + child.born < dropped:
            spawned[start + child.born, min(dropped, start + child.dropped)] += count
    return spawned


def _widths(lives: Counter, end: int) -> list[int]:
    """Rows of each of the ticks 1..end; a lane runs in the ticks after its start, up to the one that drops it."""
    change = [0] * (end + 1)
    for (start, dropped), count in lives.items():
        change[start] += count
        change[dropped] -= count
    widths, now = [], 0
    for tick in range(end):
        now += change[tick]
        widths.append(now)
    return widths


def runs_of(accepts: dict[int, bool]) -> list[int]:
    """Drafts accepted between two rejected ones; a run that the end of the text cuts counts unless it is empty."""
    runs, run = [], 0
    for right in accepts.values():
        if right:
            run += 1
        else:
            runs.append(run)
            run = 0
    return [*runs, run] if run else runs


class Block(NamedTuple):
    """One block of draft-then-verify: its first lane, its drafts, how many were right, and whether one was wrong."""

    anchor: int
    drafts: int
    accepted: int
    rejected: bool
    rows: int


Chain = Callable[[int, int], Sequence[int]]  # (anchor, how many at most) -> drafts of a block from there


def blocks(drafts: Sequence[int] | Chain, text: Text, size: int) -> list[Block]:
    """Draft-then-verify in blocks of K = min(size, remaining - 1), cut behind a drafted end of text.

    drafts: of every lane, where they are the same in any block; else the drafts of a block by its anchor, which must be the decoder's
    own up to the first wrong one.
    """
    out, anchor = [], 0
    while anchor < len(text.truth):
        most = max(min(size, text.limit - anchor - 2), 0)
        own = (drafts(anchor, most) if most else []) if callable(drafts) else drafts[anchor : anchor + most]
        truth = text.truth[anchor:]
        ended = next((j + 1 for j, token in enumerate(own) if token in text.eos), None)
        right = next((j for j, (draft, token) in enumerate(zip(own, truth)) if draft != token), min(len(own), len(truth), most))
        if ended is not None and ended > right + 1:
            ended = None  # lanes behind a wrong draft say something else
        count = most if ended is None else ended
        right = min(right, count)
        over = anchor + right >= len(text.truth)  # the text ended inside the block
        rejected = right < count and not over
        out.append(Block(anchor, count, right, rejected, count + (ended is None)))
        anchor += right + 1
    return out


def block_counts(drafts: Sequence[int] | Chain, text: Text, full: int, draft_depth: int, size: int, reuse: bool = True) -> Outcome:
    """Draft-then-verify; drafts as for `blocks`, made at `draft_depth`. reuse: aligned reads, whose states verification goes on from."""
    recur = rows = 0
    widths, fresh, embedded, read = Counter(), Counter(), Counter(), Counter()
    accepts: dict[int, bool] = {}
    runs, uncertain, made = [], False, blocks(drafts, text, size)
    for block in made:
        alone, together = (block.rows * draft_depth, full - draft_depth) if reuse else (block.drafts * draft_depth, full)
        if block.drafts == 0:
            alone, together = full, 0
        recur, rows = recur + alone + together, rows + alone + together * block.rows
        embedded[1] += block.rows
        read[1] += block.drafts
        read[block.rows] += 1
        widths[1] += alone
        widths[block.rows] += together
        fresh[1] += (block.rows if reuse else alone) if block.drafts else 1
        fresh[block.rows] += together > 0
        accepts |= {block.anchor + j + 1: True for j in range(block.accepted)}
        if block.rejected:
            accepts[block.anchor + block.accepted + 1] = False
        uncertain |= bool(text.eos) and block.drafts > block.accepted + block.rejected
        if block.accepted or block.rejected:
            runs.append(block.accepted)
    note = "a draft behind a wrong one may be an end of text, which cuts its block" if uncertain else ""
    return Outcome(recur, embedded.total(), read.total(), rows, len(accepts), sum(accepts.values()), runs, accepts, ordered(widths),
                   not uncertain, not uncertain, note, fresh=ordered(fresh), embedded=ordered(embedded), read=ordered(read),
                   checks=len(made))
