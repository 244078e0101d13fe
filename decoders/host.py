"""What decoding costs between the calls: the loop, its bookkeeping, the slicing and joining of states, the choice of tokens.

A sweep of single calls (decoders/calibrate.py) does not see it, and on small models it is a good part of a tick. Here a few short
decodes are timed whole; what is left after the calls they made, at the sweep's prices, is laid on ticks, rows, readouts and preludes.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import torch

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.generation import Generation
from decoders.wavefront import Wavefront

if TYPE_CHECKING:
    from decoders.calibrate import Calibration
    from loopscope.models.looped import LoopedCore

FEATURES = ("tick", "row", "readout", "prelude")  # of each, seconds of host time per one


def time_decodes(core: LoopedCore, prefix_length: int, new_tokens: int = 24, repeats: int = 3, seed: int = 0,
                 seconds: float = float("inf")) -> list[Generation]:
    """The fastest of `repeats` decodes of random tokens by each of a few decoders, orders alternated.

    seconds: no further round is begun after so many, once each has been timed.
    """
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, core.config.vocab_size, (prefix_length,), generator=draw).tolist()
    depth = core.config.depth
    decoders: list[Decoder] = [Autoregressive()]
    if depth > 1:
        decoders += [Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(1, 8), DraftThenVerify(1, 4, "deep_kv"), DASWave(6, 1)]
    best: dict[str, Generation] = {}
    begin = time.perf_counter()
    for turn in range(repeats + 1):  # the first pays for set-up
        if turn > 1 and time.perf_counter() - begin > seconds:
            break
        for i in range(len(decoders)):
            decoder = decoders[(i + turn) % len(decoders)]
            got = decoder.generate(core, prompt, new_tokens, seed=seed)
            if turn and (decoder.label not in best or got.seconds.decode < best[decoder.label].seconds.decode):
                best[decoder.label] = got
    return list(best.values())


def shape_of(decoder: str) -> str:
    """The shape of the calls that a decoder, by its label, makes on several rows at once."""
    return "wave" if decoder.startswith(("WFD", "LoopSpec")) else "chain"


def readout_rows(decoder: str, mean_width: float, depth: int) -> float:
    """About how many rows one of its readouts has, by its label, where its calls have `mean_width` rows at full depth T."""
    if decoder.startswith("DAS"):
        return mean_width
    wave = re.match(r"WFD d=([0-9]+)(?: re=([0-9]+))?", decoder)
    if wave is None:
        return 1.0
    rows, lanes = _full_wave(depth, int(wave[1]), int(wave[2]) if wave[2] else None)
    return max(1.0, min(rows, mean_width) if wave[2] is None else rows * mean_width / lanes)


def _full_wave(depth: int, draft_depth: int, redraft: int | None) -> tuple[float, float]:
    """Of a wave without rejects: rows per readout, and lanes, means over the ticks that have one.

    Lanes stand draft_depth apart. Each is read as it drafts, again after every `redraft` recurrences, and at T; the first and the last
    fall into one tick only where draft_depth divides T.
    """
    read: list[tuple[int, int]] = []
    for phase in range(1, draft_depth + 1):
        lanes = range(phase, depth + 1, draft_depth)
        due = [r for r in lanes if r in (draft_depth, depth) or (redraft and r > draft_depth and (r - draft_depth) % redraft == 0)]
        if due:
            read.append((len(due), len(lanes)))
    return sum(n for n, _ in read) / len(read), sum(n for _, n in read) / len(read)


def fit_host(generations: list[Generation], swept: Calibration) -> dict[str, float]:
    """Seconds of host time per tick, row, readout and prelude: non-negative least squares of what the calls leave unexplained.

    swept: the sweep, without host time. Every decode counts by its relative error, so that a long one does not decide alone.
    """
    import numpy as np
    from scipy.optimize import nnls

    left, counted, weight = [], [], []
    for g in generations:
        widths = Counter(Counter(e.tick for e in g.trace if e.event == "run").values())
        left.append(g.seconds.decode - swept.cost(widths, g.calls.readout, g.calls.prelude, g.decoder))
        counted.append([g.calls.recur, g.rows, g.calls.readout, g.calls.prelude])
        weight.append(1 / g.seconds.decode)
    w = np.array(weight)
    fitted, _ = nnls(np.array(counted, dtype=float) * w[:, None], np.maximum(left, 0) * w)
    return dict(zip(FEATURES, fitted.tolist()))
