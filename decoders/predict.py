"""Predicted calls and seconds per committed token: the formulae of docs/algorithms.md, section 4, one per decoder.

All take a table of agreements (how often a draft equals the full-depth token) and, for seconds, a Calibration.
They describe the long run: prompts end, blocks shrink near the limit and EOS comes early, which the benchmark sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.draft_then_verify import DraftThenVerify
from decoders.decoder import Decoder
from decoders.loopspec import LoopSpec
from decoders.wavefront import Wavefront
from loopscope.errors import SettingError
from loopscope.rows import POLICIES

if TYPE_CHECKING:
    from decoders.calibrate import Calibration

_FLOOR = 1e-4  # an error rate measured as 0 is below what the sample resolves, not 0


class ErrorLaw:
    """e(m): how often a draft after m recurrences is wrong; e(0) = 1.

    Between measured depths and beyond the last a power law through the two nearest (log e linear in log m); below the
    first measured depth linear from e(0) = 1. `agreement` maps depth -> agreement.
    """

    def __init__(self, agreement: Mapping[int, float]) -> None:
        if not agreement:
            raise SettingError("an error law needs the agreement at one depth at least")
        self.depths = sorted(agreement)
        self.errors = [min(max(1 - agreement[m], _FLOOR), 1.0) for m in self.depths]

    def __call__(self, m: float) -> float:
        depths, errors = self.depths, self.errors
        if m <= depths[0]:
            return 1 + (errors[0] - 1) * m / depths[0]
        if len(depths) == 1:
            return errors[0]
        i = next((i for i in range(1, len(depths)) if m <= depths[i]), len(depths) - 1)
        slope = math.log(errors[i] / errors[i - 1]) / math.log(depths[i] / depths[i - 1])
        if m > depths[i]:
            slope = min(slope, 0.0)  # noise in the last two depths must not let errors grow without end
        return min(1.0, errors[i] * (m / depths[i]) ** slope)


Agreement = Callable[[str, int, int], float | None]  # (policy, depth, lag) -> agreement, None where nothing is known


@dataclass(frozen=True)
class Prediction:
    """What one schedule is predicted to cost per committed token."""

    calls_per_token: float
    seconds_per_token: float
    accepted: float  # E[A], drafts accepted per verification (waves: per run between corrections)
    host_per_token: float = 0.0  # of seconds_per_token, what passes between calls

    @property
    def seconds_per_call(self) -> float:
        """All seconds, preludes and readouts included, per block call: what a benchmark can see from outside."""
        return self.seconds_per_token / self.calls_per_token


def expected_accepted(agreements: Sequence[float]) -> float:
    """E[A] = sum_i prod_{j<=i} a_j for drafts judged one after the other."""
    total, chance = 0.0, 1.0
    for a in agreements:
        chance *= a
        total += chance
    return total


def frontier_accepted(error: Callable[[float], float], rounds: int, updates: int, initial_width: int, proposals: int) -> float:
    """E[A] of a carried block: A = sum_i P(H_1 + .. + H_i <= J), P(H > s) = e(k s).

    A guess can become right only after its input token is right; that hop takes H rounds. The i-th guess comes from a
    row that is active only from round i + 1 - W_init on. Source: the frontier law of docs/algorithms.md, section 4.
    """
    import numpy as np

    survive = np.minimum(1.0, [error(updates * s) for s in range(rounds + 1)])
    hop = np.concatenate(([0.0], np.maximum(0.0, survive[:-1] - survive[1:])))
    done = np.zeros(rounds + 1)  # done[j] = P(guess i became right in exactly j rounds)
    done[0] = 1.0
    total = 0.0
    for i in range(1, proposals + 1):
        earliest = max(0, i - initial_width)  # rounds that pass before the row of guess i exists
        if earliest >= rounds:
            break
        ready = done.copy()
        ready[earliest] += ready[:earliest].sum()
        ready[:earliest] = 0.0
        done = np.convolve(ready, hop)[: rounds + 1]
        total += float(done.sum())
    return total


def wave_cycle(alpha: float, draft_depth: int, depth: int) -> tuple[float, float, list[float]]:
    """(ticks, tokens, ticks at each width 1..) of a wave's mean cycle from one restart to the next.

    A cycle commits n tokens with P(n > i) = alpha^i and lasts T + (n - 1) d ticks; the wave gains a lane every d ticks
    until it is full.
    """
    full = math.ceil(depth / draft_depth)
    alpha = min(alpha, 1 - 1e-6)  # at 1 a cycle never ends; the ratio of the two has a limit
    tokens = 1 / (1 - alpha)
    widths = [0.0] * full
    for tick in range(depth):
        widths[min(tick // draft_depth, full - 1)] += 1
    widths[-1] += (tokens - 1) * draft_depth
    return depth + (tokens - 1) * draft_depth, tokens, widths


def why_not(decoder: Decoder, injects: bool = True) -> str | None:
    """Why no formula says what this decoder will do, where none does; only a replay can (decoders/replay.py, decoders/carried.py)."""
    if isinstance(decoder, DASWave):
        if decoder.carry is False:
            return "states that restart every round never settle as a carried one does"
        if decoder.read != "deep_kv":
            return f"states carried behind a {decoder.read.replace('_', ' ')} prefix do not settle on the full-depth token"
        if decoder.stable is not None:
            return "no agreement says when guesses stop changing"
        return None
    if isinstance(decoder, Wavefront) and decoder.lossless:
        return None if decoder.redraft is None else "no agreement says how often a draft changes as it deepens"
    if isinstance(decoder, (Autoregressive, DraftThenVerify)) and decoder.lossless:
        return None
    return "its drafts are no fixed depth's" if decoder.lossless else "its tokens need not be the model's own"


def predict(decoder: Decoder, agreement: Agreement, calibration: Calibration, depth: int, injects: bool = True, *,
            beyond: bool = False) -> Prediction | None:
    """Predicted cost of one decoder at full depth T; None where the findings lack what it needs, and where no formula holds (`why_not`).

    injects: whether the embedding enters every recurrence, which is what lets DAS-Wave carry its states beyond T. beyond: use the
    frontier law where it is known not to hold too, as the back-test does to say by how much it is off there.
    """
    if why_not(decoder, injects) and not (beyond and isinstance(decoder, DASWave)):
        return None
    made = _counted(decoder, agreement, depth, injects)
    if made is None:
        return None
    calls, committed, accepted, spent = made
    seconds = spent(_Costs(calibration.seconds, calibration.beyond))
    host = spent(_Costs(lambda *_: 0.0, lambda feature: calibration.beyond(feature, ("host",))))
    return Prediction(calls / committed, seconds / committed, accepted, host / committed)


class _Costs:
    """What one call costs in a decode: alone by the sweep, and what it takes beyond that."""

    def __init__(self, alone: Callable[..., float], beyond: Callable[[str], float]) -> None:
        self._alone, self._beyond = alone, beyond

    def recur(self, rows: int, shape: str = "chain") -> float:
        return self._alone("recur", rows, shape) + self._beyond(shape)

    def prelude(self, rows: int = 1) -> float:
        return self._alone("prelude", rows, "chain") + self._beyond("prelude")

    def readout(self, feature: str, rows: int = 1, shape: str = "chain") -> float:
        return self._alone("readout", rows, shape) + self._beyond(feature)

    def verification(self, rows: int, recurrences: int) -> float:
        """Recurrences of the same rows, one depth after the other: how they attend is planned for the first."""
        return self.recur(rows, "fresh") + (recurrences - 1) * self.recur(rows) if recurrences else 0.0


_Counted = tuple[float, float, float, Callable[[_Costs], float]]  # calls, tokens committed, accepted, and what they cost


def _counted(decoder: Decoder, agreement: Agreement, depth: int, injects: bool) -> _Counted | None:
    if isinstance(decoder, Autoregressive):
        return depth, 1, 0.0, lambda c: c.verification(1, depth) + c.prelude() + c.readout("check")
    if isinstance(decoder, DraftThenVerify):
        return _draft_then_verify(decoder, agreement, depth)
    return _das_wave(decoder, agreement, depth, injects) if isinstance(decoder, DASWave) else _wavefront(decoder, agreement, depth)


def _draft_then_verify(decoder, agreement: Agreement, depth: int) -> _Counted | None:
    d, block = decoder.draft_depth, decoder.block
    rates = [agreement(decoder.read, d, lag) for lag in range(1, block + 1)]
    if any(rate is None for rate in rates):
        return None
    accepted = expected_accepted(rates)
    aligned = decoder.read == "aligned"
    # Aligned, every row's first d recurrences are reused, and the last row drafts nothing; else verification starts afresh.
    calls = (block + 1) * d + depth - d if aligned else block * d + depth

    def spent(c: _Costs) -> float:
        drafting = (block + 1) * c.verification(1, d) if aligned else block * d * c.recur(1, "deep")
        ends = (block + 1) * c.prelude() + block * c.readout("draft") + c.readout("check", block + 1)
        return drafting + c.verification(block + 1, depth - d if aligned else depth) + ends

    return calls, accepted + 1, accepted, spent


def _wavefront(decoder, agreement: Agreement, depth: int) -> _Counted | None:
    d = decoder.draft_depth
    lag = math.ceil(depth / d)  # how far behind the newest verified token a full wave drafts
    alpha = agreement("aligned", d, lag) if d < depth else 0.0
    if alpha is None:
        return None
    ticks, tokens, widths = wave_cycle(alpha, d, depth)
    spawned = ticks / d  # one prelude and one draft readout every d ticks, and one verify readout per token
    together = tokens if depth % d == 0 else 0.0

    def spent(c: _Costs) -> float:
        recur = sum(n * c.recur(width, "wave") for width, n in enumerate(widths, start=1))
        checks = together * c.readout("check", 2, "at") + (tokens - together) * c.readout("check")
        return recur + spawned * c.prelude() + checks + (spawned - together) * c.readout("draft")

    return ticks, tokens, alpha / (1 - alpha) if alpha < 1 else math.inf, spent


def _das_wave(decoder, agreement: Agreement, depth: int, injects: bool) -> _Counted | None:
    law = error_law(agreement, decoder.read, depth)
    if law is None:
        return None
    rounds, k = decoder.rounds, decoder.updates
    widths = [min(decoder.capacity, decoder.initial_width + j) for j in range(rounds)]
    proposals = widths[-1]
    error = law if injects else lambda m: law(min(m, depth))  # without injection a state freezes at T
    accepted = frontier_accepted(error, rounds, k, decoder.initial_width, proposals)
    looks = ["round" if injects and j < rounds - 1 else "draft" for j in range(rounds)]  # rows that freeze are looked at every round

    def spent(c: _Costs) -> float:
        refining = sum(k * c.recur(w, "fresh") + c.prelude(w) + c.readout(look, w) for w, look in zip(widths, looks))
        return refining + c.verification(proposals + 1, depth) + c.prelude(proposals + 1) + c.readout("check", proposals + 1)

    return rounds * k + depth, accepted + 1, accepted, spent  # a correction or a bonus token ends every block


def error_law(agreement: Agreement, policy: str, depth: int) -> ErrorLaw | None:
    """e(m) of rows right behind the prefix, from every depth at which the policy was measured."""
    known = {m: a for m in range(1, depth) if (a := agreement(policy, m, 1)) is not None}
    return ErrorLaw(known) if known else None


def schedules(depth: int, branches: bool = False) -> Iterator[Decoder]:
    """The decoders, read policies and settings a plan compares at full depth T. branches: whether trees can run and have a price."""
    yield Autoregressive()
    for d in (d for d in (1, 2, 4, 8) if d < depth):
        yield Wavefront(d)
        for again in (n for n in (1, 2, 4) if d + n < depth):
            yield Wavefront(d, redraft=again)
        for block in (2, 4, 8, 16):
            yield DraftThenVerify(d, block)
            for read in POLICIES[1:] if block in (4, 8) else ():
                yield DraftThenVerify(d, block, read)
        for second in (2 * d, 4 * d) if branches and d < 4 else ():
            if second < depth:
                yield LoopSpec(d, second)
    for updates in (1, 2):
        for rounds in (j for j in (4, 8, 12, 16, 24) if j * updates <= 3 * depth):  # drafting longer than that cannot pay
            yield DASWave(rounds, updates)
