"""LoopSpec under a cap on its lanes, tick by tick, from drafts alone.

Which proposals a full tree refuses depends on what lanes behind wrong drafts propose, and no teacher-forced pass knows that. Here
they propose what the lane at their position would, which is an approximation; without a binding cap decoders/replay_counts.py is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from decoders.replay_counts import UNKNOWN, History, Outcome, Text, ordered, runs_of


@dataclass(eq=False)
class _Lane:
    index: int  # which new token it takes as its input
    token: int
    parent: _Lane | None
    depth: int = 0
    proposed: list[int] = field(default_factory=list)

    def descends(self, root: _Lane) -> bool:
        lane: _Lane | None = self
        while lane is not None and lane is not root:
            lane = lane.parent
        return lane is root


def capped_tree(histories: Sequence[History], text: Text, full: int, depths: Sequence[int], most_lanes: int, note: str = "") -> Outcome:
    """A tree of branches at full depth T that never holds more than `most_lanes` lanes; nearer positions propose first."""
    widths: Counter = Counter()
    branched: Counter = Counter()
    accepts: dict[int, bool] = {}
    embedded, read, checks = Counter(), Counter(), 0
    lanes: list[_Lane] = []
    born = [_Lane(0, UNKNOWN, None)] if text.truth else []
    while born or lanes:
        embedded[len(born)] += bool(born)
        lanes = sorted([*lanes, *born], key=lambda lane: lane.index)
        for lane in lanes:
            lane.depth += 1
        widths[len(lanes)] += 1
        branched[len(lanes)] += len({lane.index for lane in lanes}) < len(lanes)
        root, born = lanes[0], []
        verify = root.depth == full
        checks += verify
        drafting = [lane for lane in lanes if lane.depth in depths and lane.index < text.drafting]
        read[verify + len(drafting)] += bool(verify or drafting)
        if verify:
            target, following = text.truth[root.index], root.index + 1
            if root.proposed:
                accepts[following] = target in root.proposed
            if following == len(text.truth):
                break
            kept = next((lane for lane in lanes if lane.parent is root and lane.token == target), None)
            if kept is None:
                lanes, born = [], [_Lane(following, target, None)]
                continue
            lanes = [lane for lane in lanes if lane.descends(kept)]
            kept.parent = None
            drafting = [lane for lane in drafting if lane in lanes]
        for lane in drafting:
            history = histories[lane.index] if lane.index < len(histories) else [UNKNOWN] * len(depths)
            token = history[depths.index(lane.depth)]
            ends = token in text.eos
            if token in lane.proposed or (not ends and len(lanes) + len(born) >= most_lanes):
                continue
            lane.proposed.append(token)
            if not ends:
                born.append(_Lane(lane.index + 1, token, lane))
    rows = sum(w * n for w, n in widths.items())
    return Outcome(widths.total(), embedded.total(), read.total(), rows, len(accepts), sum(accepts.values()), runs_of(accepts), accepts,
                   ordered(widths), False, False, note, ordered(branched), embedded=ordered(embedded), read=ordered(read),
                   checks=checks)
