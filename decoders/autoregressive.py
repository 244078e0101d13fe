"""Autoregressive decoding: T recurrences, one prelude and one readout per token. The reference for all others."""

from __future__ import annotations

from decoders.calls import Steps
from decoders.decoder import Decoder, at_least
from decoders.generation import APPROXIMATE
from decoders.session import Session
from loopscope.rows import Chain


class Autoregressive(Decoder):
    """One token at a time, through the same cache and the same calls as every other decoder.

    slots: let the core's depths share so many K/V slots (cross-recurrence KV sharing; Wavefront Decoding, arXiv 2609.23033):
    depth r writes and reads slot r mod s, the last write wins. Approximate; the reference for a Wavefront with as many slots.
    """

    one_by_one = True

    def __init__(self, slots: int | None = None) -> None:
        self.slots = None if slots is None else at_least("slots", slots)
        if slots is not None:
            self.fidelity = APPROXIMATE

    @property
    def label(self) -> str:
        return "AR" if self.slots is None else f"AR s={self.slots} (approximate)"

    def _check(self, core, depth):
        pass

    def _decode(self, session: Session) -> Steps:
        while not session.finished:
            yield from step(session)


def step(session: Session) -> Steps:
    """Run the newest committed token at full depth, commit its successor."""
    position = len(session.tokens) - 1
    x = yield session.embed(session.tokens[-1:], Chain(position, 1))
    state = session.start(x, Chain(position, 1))
    for r in range(1, session.depth + 1):
        rows = Chain(position, 1, r)
        state = yield session.recur(state, x, rows)
        session.ran(rows)
    token = yield session.read(state, Chain(position, 1, session.depth))
    session.cache.commit(position + 1)
    session.commit(int(token))
