"""What a block call costs on this machine: a short timing sweep, read by the plan.

u(n) is the time of one recurrence on n rows behind a prefix of typical length, for rows of one depth (chain) and rows
of different depths (wave); prelude and readout likewise (docs/algorithms.md, section 4). Cells are measured round by
round, so that a machine that slows down for a while slows all of them alike, and their medians are used. What decoding costs between
the calls is timed on a few short decodes (decoders/host.py) and kept in the same table, as part "host".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from decoders.host import FEATURES, fit_host, readout_rows, shape_of, time_decodes
from loopscope.errors import SettingError
from loopscope.records import Result
from loopscope.rows import At, Chain, Wave

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

ROWS = (1, 2, 4, 8, 16, 32)
_TRIES = 6
_HOST_TOKENS = 24


@dataclass(frozen=True, eq=False)
class Calibration(Result):
    """Timing table; `seconds(part, rows, shape)` interpolates its medians."""

    kind = "timing"
    columns = ("model", "part", "shape", "rows", "prefix_length", "seconds", "repeat")

    @cached_property
    def _medians(self) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
        out: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        for (part, shape, rows), seconds in self.frame.groupby(["part", "shape", "rows"])["seconds"].median().items():
            counts, medians = out.setdefault((part, shape), ([], []))
            counts.append(int(rows))
            medians.append(float(seconds))
        return out

    def seconds(self, part: str, rows: float, shape: str = "chain") -> float:
        """Median seconds of one call on `rows` rows: linear between the measured row counts, and beyond the last.

        A shape that was not measured for a part is read as a chain. Raises SettingError for an unknown part.
        """
        table = self._medians.get((part, shape)) or self._medians.get((part, "chain"))
        if table is None:
            known = ", ".join(sorted({p for p, _ in self._medians}))
            raise SettingError(f"the timing table has no part {part!r}; it has {known}")
        counts, medians = table
        if len(counts) == 1 or rows <= counts[0]:
            return medians[0]
        i = next((i for i in range(1, len(counts)) if rows <= counts[i]), len(counts) - 1)
        low, high = counts[i - 1], counts[i]
        slope = (medians[i] - medians[i - 1]) / (high - low)
        if rows > high:
            slope = max(slope, 0.0)  # noise must not make many rows free
        return medians[i] + slope * (rows - high)

    def host(self, ticks: float, rows: float, readouts: float, preludes: float) -> float:
        """Seconds that a decode of so many calls takes between them; 0 in a table that was not timed for it."""
        return sum(n * self._host.get(name, 0.0) for name, n in zip(FEATURES, (ticks, rows, readouts, preludes)))

    @cached_property
    def _host(self) -> dict[str, float]:
        return {shape: values[1][0] for (part, shape), values in self._medians.items() if part == "host"}

    def cost(self, widths: Mapping[int, float], readouts: float, preludes: float, decoder: str) -> float:
        """Seconds of a decode: block calls by their number of rows, readouts and preludes, host time included.

        decoder: its label, which says what shape its calls have and about how many rows it reads at once.
        """
        shape, calls, rows = shape_of(decoder), sum(widths.values()), sum(n * w for w, n in widths.items())
        recur = sum(n * self.seconds("recur", w, shape if w > 1 else "chain") for w, n in widths.items())
        at = readout_rows(decoder, rows / calls if calls else 1.0)
        return recur + readouts * self.seconds("readout", at, "at" if at > 1 else "chain") + preludes * self.seconds("prelude", 1) \
            + self.host(calls, rows, readouts, preludes)

    def spread(self, part: str, rows: int, shape: str = "chain") -> tuple[float, float]:
        """First and third quartile of the seconds measured for one cell."""
        cell = self.frame.query("part == @part and rows == @rows and shape == @shape")["seconds"]
        return float(cell.quantile(0.25)), float(cell.quantile(0.75))


@torch.inference_mode()
def calibrate(model, *, prefix_length: int = 128, rows: Sequence[int] = ROWS, repeats: int = 50, seconds: float = 20.0,
              seed: int = 0, model_name: str | None = None, host: bool = True,
              progress: Callable[[int, int], None] | None = None) -> Calibration:
    """Time one recurrence, prelude and readout on `rows` rows behind a prefix of `prefix_length` positions.

    model: LoopedModel or LoopedCore. A wave has one lane per depth at most, so wider waves than T are not measured.
    host: also time a few short decodes, for what they cost between the calls.
    The sweep stops after `repeats` rounds, or after `seconds` once every cell has been measured three times.
    progress: called with (rounds done, rounds planned). Raises SettingError for row counts below 1.
    """
    import pandas as pd

    core: LoopedCore = model.core
    if not rows or min(rows) < 1 or prefix_length < 1 or repeats < 1:
        raise SettingError(f"rows, prefix_length and repeats must be at least 1, got {list(rows)}, {prefix_length}, {repeats}")
    prefix_length = max(1, min(prefix_length, core.config.context - max(rows)))
    rows = [n for n in rows if prefix_length + n <= core.config.context]
    cells = _cells(core, prefix_length, rows, seed)
    for call in cells.values():  # the first call of a shape pays for its set-up
        call()
    observations = []
    begin = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repeat in range(repeats):
            for (part, shape, n), call in cells.items():
                observations.append((part, shape, n, prefix_length, _time(call, core.device), repeat))
            if progress is not None:
                progress(repeat + 1, repeats)
            if repeat >= 2 and time.perf_counter() - begin > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    frame = pd.DataFrame(observations, columns=list(Calibration.columns[1:]))
    frame.insert(0, "model", model_name or core.source or core.family)
    swept = Calibration(frame, _facts(core, prefix_length))
    if not host:
        return swept
    short = min(_HOST_TOKENS, core.config.context - prefix_length)
    fitted = fit_host(time_decodes(core, prefix_length, short, seed=seed), swept) if short > 1 else dict.fromkeys(FEATURES, 0.0)
    rest = pd.DataFrame([(frame["model"][0], "host", name, 1, prefix_length, value, 0) for name, value in fitted.items()],
                        columns=frame.columns)
    return Calibration(pd.concat([frame, rest], ignore_index=True), swept.meta)


def _cells(core: LoopedCore, prefix: int, rows: Sequence[int], seed: int) -> dict[tuple[str, str, int], Callable[[], Any]]:
    """(part, shape, rows) -> a call to be timed, all on one cache with a real prefix."""
    depth, width = core.config.depth, max(rows)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, core.config.vocab_size, (1, prefix + width), generator=draw).to(core.device)
    cache = core.make_cache(prefix + width, depth)
    core(tokens[:, :prefix], cache=cache)
    new = tokens[:, prefix:]
    x = core.embed(new, Chain(prefix, width), cache)
    state = core.start(x, Chain(prefix, width))
    cells: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for n in rows:
        chain = Chain(prefix, n, depth)
        cells["recur", "chain", n] = lambda n=n, chain=chain: core.recur(state[:, :n], x[:, :n], chain, cache)
        cells["prelude", "chain", n] = lambda n=n, chain=chain: core.embed(new[:, :n], chain, cache)
        cells["readout", "chain", n] = lambda n=n, chain=chain: core.read(state[:, :n], chain, cache)[0].max(-1)
        if 1 < n <= depth:
            wave = Wave(prefix, tuple(range(n, 0, -1)))
            cells["recur", "wave", n] = lambda n=n, wave=wave: core.recur(state[:, :n], x[:, :n], wave, cache)
        if n > 1:  # a wave's readout: the verify row in front, draft rows behind
            at = At(tuple(prefix + i for i in range(n)), depth)
            cells["readout", "at", n] = lambda n=n, at=at: core.read(state[:, :n], at, cache)[0].max(-1)
    if ("recur", "wave", 2) in cells:
        cells["recur", "wave", 1] = cells["recur", "chain", 1]
    return cells


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call. On a busy machine the system takes the core away for milliseconds, many calls' worth: an
    observation in which it did is made again, a few times, and the shortest is kept if all were interrupted.
    """
    cuda = device.type == "cuda"
    best = float("inf")
    for _ in range(_TRIES):
        if cuda:
            torch.cuda.synchronize(device)
        interruptions = _interruptions()
        begin = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
        if _interruptions() == interruptions:
            break
    return best


def _interruptions() -> int:
    """How often the system has taken the core away from this thread; 0 where it does not say (only Linux does)."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    except (ImportError, AttributeError):
        return 0


def _facts(core: LoopedCore, prefix_length: int) -> dict[str, Any]:
    return {"depth": core.config.depth, "injects": core.config.injects, "dtype": str(core.dtype).removeprefix("torch."),
            "device": str(core.device), "threads": torch.get_num_threads(), "prefix_length": prefix_length}
