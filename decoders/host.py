"""What decoding costs between the model's calls: the loop, its bookkeeping, the slicing and joining of states, the choice of tokens.

A sweep of single calls (decoders/calibrate.py) does not see it, and on small models it is a good part of a tick. Here a few short
decodes are watched: what passes from one call to the next, less what the call itself takes, by what kind of call it follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from decoders.autoregressive import Autoregressive
from decoders.calls import Embed, Recur, Request, Steps, advance
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.session import TARGET
from decoders.wavefront import Wavefront

if TYPE_CHECKING:
    from decoders.replay_counts import Outcome
    from loopscope.models.looped import LoopedCore

# Host time follows a recurrence, a prelude, or a readout: one that judges drafts and commits, one that only drafts, one nobody waits for.
FEATURES = ("tick", "prelude", "check", "draft", "round")
_CALLS = ("recur", "embed", "read")


def follows(request: Request) -> str:
    """Which of FEATURES the host time behind a call is."""
    if type(request) is Recur:
        return "tick"
    if type(request) is Embed:
        return "prelude"
    if request.on_device:  # type: ignore[union-attr]
        return "round"
    return "check" if TARGET == request.role or TARGET in request.role else "draft"


def counts_of(made: Outcome) -> tuple[int, ...]:
    """How often each of FEATURES comes up in a decode."""
    return made.recur, made.prelude, made.checks, made.readout - made.checks - made.unread, made.unread


class HostTimes:
    """Host time of a few decoders on random tokens, turn by turn in alternated orders; the first turn pays for set-up and is not kept.

    rows: (feature, turn, mean seconds behind a call). seconds: spent so far, all of it.
    """

    def __init__(self, core: LoopedCore, prefix_length: int, new_tokens: int = 24, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.core, self.new_tokens, self.seed, self.seconds, self._turn = core, new_tokens, seed, 0.0, 0
        self.prompt = torch.randint(0, core.config.vocab_size, (prefix_length,), generator=draw).tolist()
        self.decoders: list[Decoder] = [Autoregressive()]
        if core.config.depth > 1:
            self.decoders += [Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(1, 8), DraftThenVerify(1, 4, "deep_kv"), DASWave(6, 1)]
        self.rows: list[tuple[str, int, float]] = []

    def turn(self) -> None:
        """Decode once with each."""
        begin = time.perf_counter()
        behind: dict[str, list[float]] = {}
        with watched(self.core) as calls:
            for i in range(len(self.decoders)):
                decoder = self.decoders[(i + self._turn) % len(self.decoders)]
                session = decoder._open(self.core, self.prompt, self.new_tokens, seed=self.seed)
                for _ in advance(session, session.prefill()):
                    pass
                for _ in advance(session, _timed(decoder._decode(session), calls, behind)):
                    pass
        if self._turn:
            self.rows += [(name, self._turn - 1, sum(took) / len(took)) for name, took in behind.items()]
        self._turn += 1
        self.seconds += time.perf_counter() - begin

    def result(self) -> list[tuple[str, int, float]]:
        """`rows`, of one turn at least, and 0 for what never came up."""
        while self._turn < 2:
            self.turn()
        return self.rows + [(name, 0, 0.0) for name in FEATURES if name not in {row[0] for row in self.rows}]


def _timed(steps: Steps, calls: list[tuple[float, float]], behind: dict[str, list[float]]) -> Steps:
    """The same steps; what passes from one request to the next, without the call itself, is added to behind[feature]."""
    answer, request, begin = None, None, 0.0
    while True:
        try:
            following = steps.send(answer)
        except StopIteration:
            following = None
        now = time.perf_counter()
        if request is not None:
            behind.setdefault(follows(request), []).append(now - begin - calls[-1][1])
        if following is None:
            return
        request, begin = following, time.perf_counter()
        answer = yield request


@contextmanager
def watched(core: LoopedCore) -> Iterator[list[tuple[float, float]]]:
    """While it lasts, (end, seconds) of every recurrence, prelude and readout is noted."""
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
