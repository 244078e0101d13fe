"""Several sequences in one call: their caches side by side, their rows one after the other.

    group = CacheGroup([cache_a, cache_b])
    rows = Merged((Chain(7, 1, 3), Wave(4, (5, 4, 3))), sequences=(0, 1))
    state = core.recur(state, x, rows, group, (ALIGNED, ALIGNED))       state, x [1, 4, d_model]

A call then reads the model's weights once for all of them, which is what a batch is for; attention runs on each
sequence's own cache, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopscope.cache import DepthCache


class CacheGroup:
    """The caches of the sequences of a merged call, in the order of its parts. A layer gives one K/V pair for each."""

    def __init__(self, members: Sequence[DepthCache]) -> None:
        self.members = list(members)
        self.prelude, self.core, self.coda = (list(zip(*(getattr(cache, part) for cache in self.members)))
                                              for part in ("prelude", "core", "coda"))
