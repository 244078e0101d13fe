"""What decoding costs between the calls: the loop, its bookkeeping, the slicing and joining of states, the choice of tokens.

A sweep of single calls (decoders/calibrate.py) does not see it, and on small models it is a good part of a tick. Here a few short
decodes are timed whole; what is left after the calls they made, at the sweep's prices, is laid on ticks, rows, readouts and preludes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.replay_counts import Outcome
from decoders.tally import observed
from decoders.wavefront import Wavefront

if TYPE_CHECKING:
    from decoders.calibrate import Calibration
    from loopscope.models.looped import LoopedCore

FEATURES = ("tick", "row", "readout", "prelude")  # of each, seconds of host time per one


class Decodes:
    """A few decoders on random tokens, timed turn by turn in alternated orders; the first turn pays for set-up and counts their calls.

    seconds: spent so far, all of it.
    """

    def __init__(self, core: LoopedCore, prefix_length: int, new_tokens: int = 24, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.core, self.new_tokens, self.seed, self.seconds, self._turn = core, new_tokens, seed, 0.0, 0
        self.prompt = torch.randint(0, core.config.vocab_size, (prefix_length,), generator=draw).tolist()
        self.decoders: list[Decoder] = [Autoregressive()]
        if core.config.depth > 1:
            self.decoders += [Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(1, 8), DraftThenVerify(1, 4, "deep_kv"), DASWave(6, 1)]
        self._made: dict[str, Outcome] = {}
        self._took: dict[str, list[float]] = {}

    def turn(self) -> None:
        """Decode once with each."""
        begin = time.perf_counter()
        for i in range(len(self.decoders)):
            decoder = self.decoders[(i + self._turn) % len(self.decoders)]
            if not self._turn:
                self._made[decoder.label] = observed(decoder, decoder._open(self.core, self.prompt, self.new_tokens, seed=self.seed))
                continue
            got = decoder.generate(self.core, self.prompt, self.new_tokens, seed=self.seed)
            self._took.setdefault(decoder.label, []).append(got.seconds.decode)
        self._turn += 1
        self.seconds += time.perf_counter() - begin

    def timed(self, quantile: float) -> list[tuple[str, Outcome, float]]:
        """(label, what it made, that quantile of its decodes' seconds) of each; the turns that are missing for it are made up for."""
        while self._turn < 2:
            self.turn()
        ordered = {label: sorted(took) for label, took in self._took.items()}
        return [(label, self._made[label], took[int(quantile * (len(took) - 1))]) for label, took in ordered.items()]


def shape_of(decoder: str) -> tuple[str, str]:
    """The shapes of the calls that a decoder, by its label, makes: on several rows at once, and on one fresh row."""
    if decoder.startswith(("WFD", "LoopSpec")):
        return "wave", "wave"
    return "chain", "deep" if decoder.startswith("DtV") and " deep_" in decoder else "fresh"


def fit_host(decodes: Sequence[tuple[str, Outcome, float]], swept: Calibration) -> dict[str, float]:
    """Seconds of host time per tick, row, readout and prelude: non-negative least squares of what the calls leave unexplained.

    decodes: label, what was called, and seconds of each. swept: the sweep, without host time. Every decode counts by its relative error,
    so that a long one does not decide alone.
    """
    import numpy as np
    from scipy.optimize import nnls

    left = np.array([seconds - swept.cost(made, label) for label, made, seconds in decodes])
    done = np.array([[made.recur, made.rows, made.readout, made.prelude] for _, made, _ in decodes], dtype=float)
    w = 1 / np.array([seconds for _, _, seconds in decodes])
    fitted, _ = nnls(done * w[:, None], np.maximum(left, 0) * w)
    return dict(zip(FEATURES, fitted.tolist()))
