"""Acceptance by depth: after how many recurrences the drafts were made that verification compared, and which were right.

The draft that stands for a position is the last one made for it: a re-drafting wave replaces what it drafted before, and a block is
drafted anew after a rejection. LoopSpec alone lets two stand, made by one lane at two depths; other lanes may have stood at that
lane's position and drafted too, so its own are told by its age: a lane of depth r has run r ticks since it was born.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from decoders.generation import Event, Generation, Run


def acceptance_by_depth(generation: Generation, two_stand: bool = False) -> list[tuple[int, int, int, int]]:
    """(place in the run, depth, drafts compared, drafts accepted), both from 1 on; depth 0: copied from the text, not drafted.

    two_stand: the decoder lets a second draft stand beside the first (LoopSpec with a second_depth); both are then compared, so
    that the drafts compared are more than those the generation counts as proposed, which are places.
    """
    compared: Counter[tuple[int, int]] = Counter()
    accepted: Counter[tuple[int, int]] = Counter()
    standing = _judged(generation.trace, two_stand)
    for place, (token, right, drafts) in zip(_places(generation.runs), standing):
        for depth, drafted in drafts:
            compared[place, depth] += 1
            accepted[place, depth] += right and drafted == token
    return [(*key, compared[key], accepted[key]) for key in sorted(compared)]


def _places(runs: Sequence[Run]) -> Iterator[int]:
    """Place in its run of every draft that was judged, in order."""
    for run in runs:
        yield from range(1, run.accepted + run.rejected + 1)


def _judged(trace: Sequence[Event], two_stand: bool) -> Iterator[tuple[int, bool, list[tuple[int, int]]]]:
    """(token judged, whether it was right, [(depth, token) of every draft that stood]) of every place that was judged, in order."""
    made: defaultdict[int, list[Event]] = defaultdict(list)  # by position
    born: dict[int, int] = {}  # position -> tick at which the lane of the committed token was born
    for event in trace:
        at = event.position
        if event.event == "draft":
            made[at].append(event)
        elif event.event in ("accept", "reject"):
            stood = [e for e in made[at] if e.tick - e.depth == born[at - 1]] if two_stand else made[at][-1:]
            yield event.token, event.event == "accept", [(e.depth, e.token) for e in stood]
        elif event.event == "commit":
            lanes = [e.tick for e in made[at] if e.token == event.token and e.tick - e.depth == born.get(at - 1)]
            born[at] = lanes[0] if lanes else event.tick  # without a lane that waited, the token starts one
