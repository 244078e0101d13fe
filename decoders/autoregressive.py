"""Autoregressive decoding: T recurrences, one prelude and one readout per token. The reference for all others."""

from __future__ import annotations

from decoders.generation import Decoder, Session
from loopscope.rows import Chain


class Autoregressive(Decoder):
    """One token at a time, through the same cache and the same calls as every other decoder."""

    label = "AR"
    one_by_one = True

    def _check(self, core, depth):
        pass

    def _decode(self, session: Session) -> None:
        while not session.finished:
            step(session)


def step(session: Session) -> None:
    """Run the newest committed token at full depth, commit its successor."""
    position = len(session.tokens) - 1
    x = session.embed(session.tokens[-1:], Chain(position, 1))
    state = session.start(x, Chain(position, 1))
    for r in range(1, session.depth + 1):
        rows = Chain(position, 1, r)
        state = session.recur(state, x, rows)
        session.ran(rows)
    token = session.read(state, Chain(position, 1, session.depth))
    session.cache.commit(position + 1)
    session.commit(int(token))
