"""Sequential drafts on a foreign read policy, replayed: what draft-then-verify drafts from any anchor of a known text.

Such a draft reads the verified prefix at full depth, so no teacher-forced pass has its state, and it depends on where its block began:
the rows between are drafts on current K/V. But up to the first wrong draft a block stands on the text's own tokens, so its chains can be
run many at once, from every anchor, on rows that are kept outside the cache (rows.Forest): the very call of
interventions.prefix_channels. What a block accepts, and the draft that ends it, are then the decoder's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoders.session import Session
from interventions.drafts import chains
from loopscope.rows import Chain, ReadPolicy

_SHORT, _LONG = 4, 16  # drafts that are made from every anchor at once, and from one that needs more
_ROWS_PER_CALL = 256  # rows read each other through a dense mask


class Chains:
    """Chains of drafts along one text. session: holds the whole text, ids, at every depth; first: the position of its lane 0."""

    def __init__(self, session: Session, ids: Sequence[int], first: int) -> None:
        self.session, self.first = session, first
        rows = Chain(0, len(ids), prefix=session.prefix)
        self.lanes = len(ids) - 1 - first  # the last token is no input
        self._truth = list(ids[first + 1 :])
        self._x = session.core.embed(torch.tensor([list(ids)], device=session.core.device), rows, session.cache)
        self._start = session.start(self._x, rows)
        self._made: dict[tuple[str, int], dict[int, list[int]]] = {}

    def drafts(self, read: str, depth: int, anchor: int, most: int) -> list[int]:
        """Up to `most` drafts after `depth` recurrences from lane `anchor`, the first wrong one at the end."""
        made = self._made.get((read, depth))
        if made is None:
            made = self._made[read, depth] = self._run(range(self.lanes), _SHORT, read, depth)
        most = min(most, self.lanes - anchor)
        if len(made[anchor]) < most and self._right(made[anchor], anchor):
            made |= self._run([anchor], max(most, _LONG), read, depth)
        own = made[anchor][:most]
        wrong = next((i for i, token in enumerate(own) if token != self._truth[anchor + i]), len(own))
        return own[: wrong + 1]

    def _right(self, drafts: Sequence[int], anchor: int) -> bool:
        return list(drafts) == self._truth[anchor : anchor + len(drafts)]

    def _run(self, anchors: Sequence[int], length: int, read: str, depth: int) -> dict[int, list[int]]:
        """Chains of at most `length` from every anchor; shorter ones where the text ends."""
        core, policy = self.session.core, ReadPolicy.named(read, self.session.depth)
        sizes: dict[int, list[int]] = {}
        for anchor in anchors:
            sizes.setdefault(min(length, self.lanes - anchor), []).append(anchor)
        out: dict[int, list[int]] = {}
        for size, group in sizes.items():
            step = max(1, _ROWS_PER_CALL // size)
            for begin in range(0, len(group), step):
                some = group[begin : begin + step]
                rows = chains([self.first + a for a in some], size)
                at = rows.at.to(self._x.device)
                x, state = self._x[:, at], self._start[:, at]
                for r in range(1, depth + 1):
                    state = core.recur(state, x, rows.at_depth(r), self.session.cache, policy)
                top: Tensor = core.read(state, rows.at_depth(depth), self.session.cache)[0].max(-1).indices
                out |= dict(zip(some, top.view(-1, size).tolist()))
        return out
