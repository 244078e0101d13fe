"""What a call takes in a decode beyond what it takes alone: on the host, the loop around it, its bookkeeping, the slicing and joining of
states, the choice of tokens; and in itself, what it is slower by where other calls came before it.

A sweep of single calls (decoders/calibrate.py) does not see it, and on small models it is a good part of a tick. Here a few short
decodes are timed from each call to the next, between rounds of the sweep, whose own times say how fast the machine is at that moment;
both parts are told by what kind of call it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoders.autoregressive import Autoregressive
from decoders.calls import Embed, Recur, Request, Steps, advance
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.session import GUESS, TARGET
from decoders.wavefront import Wavefront
from loopscope.rows import ALIGNED, Chain, Draft, Tree, Wave

if TYPE_CHECKING:
    from decoders.calibrate import Calibration
    from loopscope.models.looped import LoopedCore

# Recurrences by shape; preludes; readouts that judge drafts and commit, that only draft, and that nobody waits for.
FEATURES = ("chain", "fresh", "deep", "wave", "prelude", "check", "draft", "round")
PARTS = ("host", "context")  # behind a call, and of the call itself beyond the sweep's price
_CALLS = ("recur", "embed", "read")


class Kind(NamedTuple):
    """What a call is to the timing sweep (part, shape, rows), and which of FEATURES."""

    part: str
    shape: str
    rows: int
    feature: str


class Telling:
    """Tells the calls of one decode apart, in the order in which they are made."""

    def __init__(self) -> None:
        self._kept: tuple[int, int] | None = None  # the chain whose plan the cache keeps (loopscope/planning.py): start and rows

    def __call__(self, request: Request) -> Kind:
        rows = request.rows
        if type(request) is Embed:
            return Kind("prelude", "chain", rows.count, "prelude")
        if type(request) is not Recur:
            unread = request.on_device and request.role == GUESS  # a gated LoopSpec leaves its tokens there too, and waits for them
            feature = "check" if TARGET == request.role or TARGET in request.role else "round" if unread else "draft"
            return Kind("readout", "chain" if type(rows) is Chain else "at", request.count, feature)
        if type(rows) in (Wave, Tree):
            return Kind("recur", "wave" if type(rows) is Wave else "tree", rows.count, "wave")
        chain = (rows.start, rows.count) if type(rows) is Chain and request.policy is ALIGNED else None
        shape = "deep" if type(rows) is Draft else "fresh" if chain is None or chain != self._kept else "chain"
        self._kept = chain or self._kept
        return Kind("recur", shape, rows.count, shape)


class HostTimes:
    """A few decoders on random tokens, timed call by call in turns, orders alternated; the first turn pays for set-up and is not kept.

    seconds: spent so far, all of it.
    """

    def __init__(self, core: LoopedCore, prefix_length: int, new_tokens: int = 24, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.core, self.new_tokens, self.seed, self.seconds, self._turn = core, new_tokens, seed, 0.0, 0
        self.prompt = torch.randint(0, core.config.vocab_size, (prefix_length,), generator=draw).tolist()
        self.decoders: list[Decoder] = [Autoregressive()]
        if core.config.depth > 1 and not core.why_not_lossless:
            self.decoders += [Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(1, 8), DraftThenVerify(1, 4, "deep_kv"), DASWave(6, 1)]
        # The round of the sweep before it, and by kind of call the seconds inside and behind each.
        self._turns: list[tuple[int, dict[Kind, list[tuple[float, float]]]]] = []

    def turn(self, after: int = 0) -> None:
        """Decode once with each, behind round `after` of the sweep."""
        begin = time.perf_counter()
        took: dict[Kind, list[tuple[float, float]]] = {}
        with watched(self.core) as calls:
            for i in range(len(self.decoders)):
                decoder = self.decoders[(i + self._turn) % len(self.decoders)]
                session = decoder._open(self.core, self.prompt, self.new_tokens, seed=self.seed)
                for _ in advance(session, session.prefill()):
                    pass
                for _ in advance(session, _timed(decoder._decode(session), calls, took)):
                    pass
        if self._turn:
            self._turns.append((after, took))
        self._turn += 1
        self.seconds += time.perf_counter() - begin

    def beyond(self, swept: Calibration, length: float) -> list[tuple[str, str, int, float]]:
        """(part, feature, turn, mean seconds) of at least one turn; 0 for what never came up."""
        pace = swept.pace
        while self._turn < 2:
            self.turn(max(pace))
        rows: list[tuple[str, str, int, float]] = []
        for turn, (after, took) in enumerate(self._turns):
            spent: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
            made: Counter[str] = Counter()
            around = [pace[i] for i in (after, after + 1) if i in pace]
            slower = sum(around) / len(around)
            for kind, seconds in took.items():
                n, (inside, behind) = len(seconds), map(sum, zip(*seconds))
                spent["host"][kind.feature] += behind / slower
                spent["context"][kind.feature] += inside / slower - n * swept.seconds(kind.part, kind.rows, kind.shape, length)
                made[kind.feature] += n
            rows += [(part, feature, turn, spent[part][feature] / n) for part in PARTS for feature, n in made.items()]
        return rows + [(part, feature, 0, 0.0) for part in PARTS for feature in FEATURES if feature not in {row[1] for row in rows}]


def _timed(steps: Steps, calls: list[tuple[float, float]], took: dict[Kind, list[tuple[float, float]]]) -> Steps:
    """The same steps; took[kind] gets what each call took, and what passed from then until the next request."""
    tell, answer, kind, begin = Telling(), None, None, 0.0
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            request = None
        now = time.perf_counter()
        if kind is not None:
            inside = calls[-1][1]
            took.setdefault(kind, []).append((inside, now - begin - inside))
        if request is None:
            return
        kind, begin = tell(request), time.perf_counter()
        answer = yield request


@contextmanager
def watched(core: LoopedCore) -> Iterator[list[tuple[float, float]]]:
    """While it lasts, (end, seconds) of every recurrence, prelude and readout is noted; on CUDA the host waits for each."""
    noted: list[tuple[float, float]] = []

    def watch(call):
        def timed(*args, **kwargs):
            if core.device.type == "cuda":
                torch.cuda.synchronize(core.device)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if core.device.type == "cuda":
                    torch.cuda.synchronize(core.device)
                end = time.perf_counter()
                noted.append((end, end - begin))
        return timed

    for name in _CALLS:
        object.__setattr__(core, name, watch(getattr(core, name)))
    try:
        yield noted
    finally:
        for name in _CALLS:
            object.__delattr__(core, name)


def shape_of(decoder: str) -> tuple[str, str]:
    """The shapes of the calls that a decoder, by its label, makes: on several rows at once, and on one fresh row."""
    if decoder.startswith(("WFD", "LoopSpec")):
        return "wave", "wave"
    return "chain", "deep" if decoder.startswith("DtV") and " deep_" in decoder else "fresh"
