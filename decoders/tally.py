"""The calls of a decode by kind and by number of rows, told by the calls themselves.

    made = observed(decoder, decoder._open(core, prompt, 24))     # an Outcome: what a replay would have to say of this decode

A Generation counts calls, not the rows of each prelude and readout, and does not know which recurrences went on with the rows of the
one before; what a decode costs depends on both (decoders/calibrate.py).
"""

from __future__ import annotations

from collections import Counter, deque

import torch

from decoders.calls import Embed, Recur, Request, advance
from decoders.decoder import Decoder
from decoders.host import follows
from decoders.replay_counts import Outcome
from decoders.session import Session
from loopscope.rows import ALIGNED, Chain


class Tally:
    """Counts the calls it is told of."""

    def __init__(self) -> None:
        self.widths: Counter[int] = Counter()
        self.branched: Counter[int] = Counter()
        self.fresh: Counter[int] = Counter()
        self.embedded: Counter[int] = Counter()
        self.read: Counter[int] = Counter()
        self.behind: Counter[str] = Counter()  # calls by what follows them
        self._kept: tuple[int, int] | None = None  # the chain that a cache keeps the plan of: (start, count)

    def __call__(self, request: Request) -> None:
        rows = request.rows
        self.behind[follows(request)] += 1
        if type(request) is Embed:
            self.embedded[rows.count] += 1
        elif type(request) is not Recur:
            self.read[request.count] += 1
        else:
            self.widths[rows.count] += 1
            self.branched[rows.count] += len(set(rows.positions)) < rows.count
            chain = (rows.start, rows.count) if type(rows) is Chain and request.policy is ALIGNED else None
            self.fresh[rows.count] += chain is None or chain != self._kept
            self._kept = chain or self._kept

    def outcome(self, session: Session) -> Outcome:
        """With what the session itself has counted."""
        counts = session.counts
        by_rows = {name: dict(sorted((+getattr(self, name)).items())) for name in ("widths", "branched", "fresh", "embedded", "read")}
        return Outcome(counts["recur"], counts["prelude"], counts["readout"], counts["rows"], session.proposed, session.accepted,
                       [run.accepted for run in session.runs], {}, **by_rows, checks=self.behind["check"], unread=self.behind["round"])


@torch.inference_mode()
def observed(decoder: Decoder, session: Session) -> Outcome:
    """Decode an opened session to its end; what it did after its prefill. Raises what decoding raises."""
    tally = Tally()
    deque(advance(session, session.prefill()), maxlen=0)
    if not session.finished:
        deque(advance(session, decoder._decode(session), tally), maxlen=0)
    session.result(decoder)  # closes the last run
    return tally.outcome(session)
