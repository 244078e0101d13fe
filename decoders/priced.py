"""What schedules are predicted to do and cost, with intervals over prompts and over the rounds of the timing sweep.

Where the texts were replayed, calls, accepts and what is paid for are known text by text. A cost is linear in the prices of the sweep,
so that resampled texts times resampled prices are two products of matrices. Where there is only a formula it is evaluated again for
every resample, of which there are fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from decoders.agreements import Agreements
from decoders.autoregressive import Autoregressive
from decoders.decoder import Decoder
from decoders.host import PARTS
from decoders.predict import Prediction, predict
from decoders.replay_counts import Outcome

if TYPE_CHECKING:
    from decoders.calibrate import Calibration, Cell, Price
    from probes.replay import Pass

RESAMPLES, FORMULA_RESAMPLES = 1000, 60
MEASURES = ("calls", "accepted", "per_call", "speedup")  # what has an interval


@dataclass(frozen=True)
class Played:
    """What one decoder does on the replayed texts, an entry for each: block calls, tokens, accepted drafts, runs, and what they cost."""

    calls: np.ndarray
    tokens: np.ndarray
    accepted: np.ndarray
    runs: np.ndarray
    prices: list[Price]
    exact: bool

    @classmethod
    def of(cls, decoder: Decoder, texts: Sequence[Pass], outcomes: Sequence[Outcome], calibration: Calibration) -> Played:
        prices = [calibration.price(o, decoder.label, t.prompt_length + t.lanes / 2) for t, o in zip(texts, outcomes)]
        return cls(np.array([o.recur for o in outcomes], float), np.array([t.lanes for t in texts], float),
                   np.array([o.accepted for o in outcomes], float), np.array([len(o.runs) for o in outcomes], float), prices,
                   all(o.exact for o in outcomes))

    def mean(self, per_cell: Mapping[Cell, float]) -> Prediction:
        """Over all texts, at these seconds."""
        tokens, runs = self.tokens.sum(), self.runs.sum()
        paid: Price = Counter()
        for price in self.prices:
            paid.update(price)  # not a sum of Counters: it drops the negative weights of what is read beyond the measured places
        seconds = sum(n * per_cell[cell] for cell, n in paid.items())
        host = sum(n * per_cell[cell] for cell, n in paid.items() if cell[0] == "host")
        return Prediction(float(self.calls.sum() / tokens), float(seconds / tokens), float(self.accepted.sum() / runs) if runs else 0.0,
                          float(host / tokens))


@dataclass(frozen=True)
class _Drawn:
    """Calls and seconds per token and accepted drafts per run in every resample; empty where there is nothing to resample."""

    calls: np.ndarray = field(default_factory=lambda: np.empty(0))
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    accepted: np.ndarray = field(default_factory=lambda: np.empty(0))


class _Redrawn:
    """A calibration whose prices are those of one resample: what `predict` asks of one."""

    def __init__(self, calibration: Calibration, drawn: Mapping[Cell, np.ndarray], i: int) -> None:
        self._calibration, self._prices = calibration, {cell: float(values[i]) for cell, values in drawn.items()}
        self._known: dict[tuple, float] = {}

    def seconds(self, part: str, rows: float, shape: str = "chain") -> float:
        key = part, rows, shape
        if key not in self._known:
            self._known[key] = sum(w * self._prices[cell] for cell, w in self._calibration.cells(part, rows, shape))
        return self._known[key]

    def beyond(self, feature: str, parts: Sequence[str] = PARTS) -> float:
        key = feature, parts
        if key not in self._known:
            self._known[key] = sum(self._prices[cell] for cell in self._calibration.extras.get(feature, ()) if cell[0] in parts)
        return self._known[key]


def intervals(decoders: Sequence[Decoder], found: Agreements, calibration: Calibration, depth: int, injects: bool,
              played: Mapping[str, Played], seed: int = 0) -> dict[str, dict[str, tuple[float, float]]]:
    """label -> measure -> 95 % percentile interval; nan with fewer than two prompts.

    Prompts are drawn with replacement, those of the findings and those of the replay each among themselves, and so are the rounds of the
    sweep; every decoder sees the same draws.
    """
    draw = np.random.default_rng(seed)
    redrawn = calibration.resampled(RESAMPLES, seed)
    texts = len(played["AR"].tokens) if "AR" in played else 0
    picks = draw.multinomial(texts, np.full(texts, 1 / texts), RESAMPLES).astype(float) if texts > 1 else None
    drawn = {label: _resampled(p, picks, redrawn) for label, p in played.items()} if picks is not None else {}
    prompts = found.prompts
    by_formula = [d for d in decoders if d.label not in played or (d.label == "AR" and picks is None)]
    if len(prompts) > 1 and by_formula:
        if "AR" not in played:
            by_formula = [Autoregressive(), *(d for d in by_formula if d.label != "AR")]
        drawn |= _from_formulae(by_formula, found, calibration, depth, injects, redrawn, draw)
    return {d.label: _bounds(drawn.get(d.label, _Drawn()), drawn.get("AR", _Drawn())) for d in decoders}


def _resampled(played: Played, picks: np.ndarray, redrawn: Mapping[Cell, np.ndarray]) -> _Drawn:
    cells = sorted({cell for price in played.prices for cell in price})
    paid = np.array([[price.get(cell, 0.0) for cell in cells] for price in played.prices])  # [texts, cells]
    tokens, runs = picks @ played.tokens, picks @ played.runs
    seconds = ((picks @ paid) * np.stack([redrawn[cell] for cell in cells], 1)).sum(1)
    accepted = np.divide(picks @ played.accepted, runs, out=np.zeros_like(runs), where=runs > 0)
    return _Drawn(picks @ played.calls / tokens, seconds / tokens, accepted)


def _from_formulae(decoders: Sequence[Decoder], found: Agreements, calibration: Calibration, depth: int, injects: bool,
                   redrawn: Mapping[Cell, np.ndarray], draw: np.random.Generator) -> dict[str, _Drawn]:
    made: dict[str, list[Prediction]] = {d.label: [] for d in decoders}
    prompts = found.prompts
    for i in range(FORMULA_RESAMPLES):
        again, price = found.resampled(draw.choice(prompts, len(prompts)).tolist()), _Redrawn(calibration, redrawn, i)
        for d in decoders:
            p = predict(d, again.agreement, price, depth, injects)  # type: ignore[arg-type]
            if p is not None:
                made[d.label].append(p)
    return {label: _Drawn(*(np.array([getattr(p, name) for p in all_of]) for name in ("calls_per_token", "seconds_per_token", "accepted")))
            for label, all_of in made.items() if len(all_of) == FORMULA_RESAMPLES}


def _bounds(own: _Drawn, ar: _Drawn) -> dict[str, tuple[float, float]]:
    n = min(len(own.calls), len(ar.seconds))
    if n == 0:
        return dict.fromkeys(MEASURES, (float("nan"),) * 2)
    values = {"calls": own.calls, "accepted": own.accepted, "per_call": own.seconds / own.calls,
              "speedup": ar.seconds[:n] / own.seconds[:n]}
    return {name: tuple(np.percentile(v, (2.5, 97.5)).tolist()) for name, v in values.items()}
