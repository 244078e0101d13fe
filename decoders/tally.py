"""The calls of a decode by kind and by number of rows, told by the calls themselves.

    made = observed(decoder, decoder._open(core, prompt, 24))     # an Outcome: what a replay would have to say of this decode

A Generation counts calls, not the rows of each prelude and readout, and does not know which recurrences went on with the rows of the
one before; what a decode costs depends on both (decoders/calibrate.py).
"""

from __future__ import annotations

from collections import Counter, deque

import torch

from decoders.calls import Request, advance
from decoders.decoder import Decoder
from decoders.host import Telling
from decoders.replay_counts import Outcome
from decoders.session import Session


class Tally:
    """Counts the calls it is told of."""

    def __init__(self) -> None:
        self.widths, self.branched, self.fresh, self.embedded, self.read = (Counter[int]() for _ in range(5))
        self.features: Counter[str] = Counter()
        self._tell = Telling()

    def __call__(self, request: Request) -> None:
        kind = self._tell(request)
        self.features[kind.feature] += 1
        if kind.part == "recur":
            self.widths[kind.rows] += 1
            self.branched[kind.rows] += len(set(request.rows.positions)) < kind.rows
            self.fresh[kind.rows] += kind.shape in ("fresh", "deep")
        else:
            (self.embedded if kind.part == "prelude" else self.read)[kind.rows] += 1

    def outcome(self, session: Session) -> Outcome:
        """With what the session itself has counted."""
        counts = session.counts
        by_rows = {name: dict(sorted((+getattr(self, name)).items())) for name in ("widths", "branched", "fresh", "embedded", "read")}
        return Outcome(counts["recur"], counts["prelude"], counts["readout"], counts["rows"], session.proposed, session.accepted,
                       [run.accepted for run in session.runs], {}, **by_rows, checks=self.features["check"], unread=self.features["round"])


@torch.inference_mode()
def observed(decoder: Decoder, session: Session) -> Outcome:
    """Decode an opened session to its end; what it did after its prefill. Raises what decoding raises."""
    tally = Tally()
    deque(advance(session, session.prefill()), maxlen=0)
    if not session.finished:
        deque(advance(session, decoder._decode(session), tally), maxlen=0)
    session.result(decoder)  # closes the last run
    return tally.outcome(session)
