"""What a block call costs on this machine: a short timing sweep, read by the plan.

u(n, L) is the time of one recurrence on n rows behind a prefix of L positions, for rows of one depth (chain; fresh, where they are not
the rows of the call before), rows of different depths (wave), rows of branches (tree) and a draft that reads the prefix deeper than it
stands (deep); prelude and readout likewise (docs/algorithms.md, section 4). Each is measured at two prefix lengths
and read as a straight line in both n and L. Cells are measured round by round, so that a machine that slows down for a while slows all of
them alike. A cell's price is the lower quartile of its rounds: what else runs on a machine only ever adds to a time, often for seconds on
end, and the quartile stands as long as one round in four was left alone; unlike the shortest round it does not fall as more are made.
Resampled rounds say how uncertain prices are. What a call takes beyond that in a decode is timed in a few short ones (decoders/host.py),
which run between the rounds, so that they meet the same machine, and is kept in the same table, as parts "host" and "context".
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from decoders.host import PARTS, HostTimes, shape_of
from loopscope.errors import SettingError
from loopscope.records import Result
from loopscope.rows import At, Chain, Draft, ReadPolicy, Tree, Wave

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from decoders.graphs import Captured, Eager
    from decoders.replay_counts import Outcome
    from loopscope.cache import DepthCache
    from loopscope.models.looped import LoopedCore

ROWS = (1, 2, 4, 8, 16, 32)
_TRIES = 6
_HOST_TOKENS = 16
_QUIET = 0.25  # of a cell's rounds, the quantile that is its price
_HOST_SHARE = 0.4  # of the seconds asked for

Cell = tuple[str, str, int, int]  # (part, shape, prefix length, rows)
Price = Counter  # of cells: what a decode costs is the sum of its cells' seconds, each so many times (fractions where one is read between)


@dataclass(frozen=True, eq=False)
class Calibration(Result):
    """Timing table; `seconds(part, rows, shape, length)` interpolates its prices."""

    kind = "timing"
    columns = ("model", "part", "shape", "rows", "prefix_length", "seconds", "repeat")

    @cached_property
    def prices(self) -> dict[Cell, float]:
        """Seconds of every measured cell: the lower quartile of its rounds."""
        return {(str(p), str(s), int(length), int(n)): float(seconds) for (p, s, length, n), seconds
                in self.frame.groupby(["part", "shape", "prefix_length", "rows"])["seconds"].quantile(_QUIET).items()}

    @cached_property
    def _measured(self) -> dict[tuple[str, str], dict[int, list[int]]]:
        """(part, shape) -> prefix length -> row counts, increasing."""
        out: dict[tuple[str, str], dict[int, list[int]]] = {}
        for part, shape, length, n in sorted(self.prices):
            out.setdefault((part, shape), {}).setdefault(length, []).append(n)
        return out

    @cached_property
    def _read(self) -> dict[tuple, tuple[tuple[Cell, float], ...]]:
        return {}

    @cached_property
    def length(self) -> float:
        """The prefix length that is meant where none is given: the middle of those measured."""
        lengths = {length for part, _, length, _ in self.prices if part == "recur"} or {1}
        return (min(lengths) + max(lengths)) / 2

    @cached_property
    def scatter(self) -> float:
        """By how much a call's time differs from round to round: median over the cells of the interquartile range over the median.

        Cells that were measured once say nothing; 0 where all are such.
        """
        cells = self._swept.groupby(["part", "shape", "prefix_length", "rows"])["seconds"]
        low, middle, high = (cells.quantile(q)[cells.size() > 1] for q in (0.25, 0.5, 0.75))
        relative = ((high - low) / middle)[middle > 0]
        return float(relative.median()) if len(relative) else 0.0

    @property
    def _swept(self) -> pd.DataFrame:
        return self.frame[~self.frame["part"].isin(PARTS)]

    @cached_property
    def pace(self) -> dict[int, float]:
        """Round of the sweep -> how long its calls took as a multiple of their prices: the median over the cells."""
        import pandas as pd

        cells = self._swept
        prices = [self.prices[str(p), str(s), int(length), int(n)] for p, s, length, n
                  in zip(*(cells[name] for name in ("part", "shape", "prefix_length", "rows")))]
        relative = pd.Series(cells["seconds"].to_numpy() / prices).groupby(cells["repeat"].to_numpy()).median()
        return {int(i): float(x) for i, x in relative.items()}

    def __repr__(self) -> str:
        model = self.frame["model"].iloc[0] if len(self.frame) else "nothing"
        facts = ", ".join(f"{name} {self.meta[name]}" for name in ("device", "dtype", "threads") if name in self.meta)
        chain = sorted({n for part, shape, _, n in self.prices if (part, shape) == ("recur", "chain")})
        ends = sorted({*chain[:1], *chain[-1:]})
        calls = "; ".join(f"{n} row{'s' if n > 1 else ''} {1e3 * self.seconds('recur', n):.4g} ms" for n in ends)
        return (f"Calibration of {model}{f' ({facts})' if facts else ''}: {len(self.prices)} cells, scatter {self.scatter:.0%}"
                + (f"; a block call: {calls}" if calls else ""))

    def has(self, part: str, shape: str) -> bool:
        """Whether calls of this shape were measured."""
        return (part, shape) in self._measured

    def cells(self, part: str, rows: float, shape: str = "chain", length: float | None = None) -> tuple[tuple[Cell, float], ...]:
        """The measured cells that one call on `rows` rows behind `length` positions is read from, and the weight of each.

        A shape that was not measured for a part is read as a chain. Raises SettingError for an unknown part.
        """
        length = self.length if length is None else length
        key = part, rows, shape, length
        if key not in self._read:
            table = self._measured.get((part, shape)) or self._measured.get((part, "chain"))
            if table is None:
                known = ", ".join(sorted({p for p, _ in self._measured}))
                raise SettingError(f"the timing table has no part {part!r}; it has {known}")
            shape = shape if (part, shape) in self._measured else "chain"
            own = {at: self._mixed([((part, shape, at, n), n) for n in counts], rows, floor=True) for at, counts in table.items()}
            seconds = {at: sum(w * self.prices[cell] for cell, w in mix) for at, mix in own.items()}
            between = _line([(at, seconds[at]) for at in sorted(own)], length, floor=False)
            total: Counter[Cell] = Counter()
            for at, weight in between:
                for cell, w in own[at]:
                    total[cell] += weight * w
            self._read[key] = tuple((cell, w) for cell, w in total.items() if w)
        return self._read[key]

    def _mixed(self, cells: list[tuple[Cell, int]], rows: float, floor: bool) -> list[tuple[Cell, float]]:
        at = {n: cell for cell, n in cells}
        return [(at[n], w) for n, w in _line([(n, self.prices[cell]) for cell, n in cells], rows, floor)]

    def seconds(self, part: str, rows: float, shape: str = "chain", length: float | None = None) -> float:
        """Seconds of one call on `rows` rows behind `length` positions: linear between the measured cells, and beyond the last."""
        return sum(w * self.prices[cell] for cell, w in self.cells(part, rows, shape, length))

    def beyond(self, feature: str, parts: Sequence[str] = PARTS) -> float:
        """Seconds that a call takes in a decode beyond its own, by its feature (decoders.host.FEATURES); 0 in a table without them."""
        return sum(self.prices[cell] for cell in self.extras.get(feature, ()) if cell[0] in parts)

    @cached_property
    def extras(self) -> dict[str, list[Cell]]:
        """Feature -> the cells of what its calls take beyond the sweep's price."""
        found: dict[str, list[Cell]] = {}
        for cell in self.prices:
            if cell[0] in PARTS:
                found.setdefault(cell[1], []).append(cell)
        return found

    def price(self, made: Outcome, decoder: str, length: float | None = None) -> Price:
        """What a decode's calls are made of, cell by cell: every call by its kind and its number of rows, host time included.

        decoder: its label, which says what shape its calls have. length: the mean prefix of its calls. Wave calls with two rows at one
        position are trees.
        """
        price: Price = Counter()
        several, single = shape_of(decoder)
        wanted: list[tuple[float, str, float, str]] = []
        for w, n in made.widths.items():
            if several == "wave":
                wanted += [(n - made.branched.get(w, 0), "recur", w, "wave"), (made.branched.get(w, 0), "recur", w, "tree")]
            else:
                anew = made.fresh.get(w, 0)
                wanted += [(n - anew, "recur", w, "chain"), (anew, "recur", w, "fresh" if w > 1 else single)]
        wanted += [(n, "prelude", w, "chain") for w, n in made.embedded.items()]
        wanted += [(n, "readout", w, "at" if several == "wave" and w > 1 else "chain") for w, n in made.read.items()]
        features = Counter(prelude=made.prelude, check=made.checks, draft=made.readout - made.checks - made.unread, round=made.unread)
        for n, part, w, shape in wanted:
            if n:
                for cell, weight in self.cells(part, w, shape, length):
                    price[cell] += n * weight
                if part == "recur":
                    features["wave" if shape == "tree" else shape] += n
        for feature, n in features.items():
            for cell in self.extras.get(feature, ()) if n else ():
                price[cell] += n
        return price

    def cost(self, made: Outcome, decoder: str, length: float | None = None) -> float:
        """Seconds of a decode (`price`)."""
        return sum(n * self.prices[cell] for cell, n in self.price(made, decoder, length).items())

    def resampled(self, resamples: int, seed: int = 0) -> dict[Cell, np.ndarray]:
        """Prices by rounds drawn with replacement, the same rounds for all cells: [resamples] for every cell.

        Cells that were measured once have no spread.
        """
        import numpy as np

        draw = np.random.default_rng(seed)
        shares = draw.random((resamples, int(self.frame.groupby(["part", "shape", "prefix_length", "rows"]).size().max())))
        out = {}
        for (part, shape, length, n), seconds in self.frame.groupby(["part", "shape", "prefix_length", "rows"])["seconds"]:
            values = seconds.to_numpy()
            picked = values[(shares[:, : len(values)] * len(values)).astype(int)]
            out[str(part), str(shape), int(length), int(n)] = np.quantile(picked, _QUIET, axis=1)
        return out

    def interval(self, part: str, rows: float, shape: str = "chain", length: float | None = None, resamples: int = 1000,
                 seed: int = 0) -> tuple[float, float]:
        """95 % interval of `seconds` over the rounds of the sweep."""
        import numpy as np

        drawn = self.resampled(resamples, seed)
        low, high = np.percentile(sum(w * drawn[cell] for cell, w in self.cells(part, rows, shape, length)), (2.5, 97.5))
        return float(low), float(high)

    def spread(self, part: str, rows: int, shape: str = "chain") -> tuple[float, float]:
        """First and third quartile of the seconds measured for one part, shape and row count, at all prefix lengths."""
        cell = self.frame.query("part == @part and rows == @rows and shape == @shape")["seconds"]
        return float(cell.quantile(0.25)), float(cell.quantile(0.75))


def _line(points: Sequence[tuple[int, float]], x: float, floor: bool) -> list[tuple[int, float]]:
    """Weights of the measured places that a straight line through the two around x reads from; x beyond the last goes on along it.

    floor: below the first place its value stands. What falls towards an end is not followed beyond it: noise must not make many rows,
    or a long prefix, free.
    """
    if len(points) == 1 or (floor and x <= points[0][0]):
        return [(points[0][0], 1.0)]
    i = next((i for i in range(1, len(points)) if x <= points[i][0]), len(points) - 1)
    (low, first), (high, second) = points[i - 1], points[i]
    if second < first and not low <= x <= high:
        return [(high if x > high else low, 1.0)]
    share = (x - low) / (high - low)
    return [(low, 1 - share), (high, share)]


@torch.inference_mode()
def calibrate(model, *, prefix_length: int | Sequence[int] = 128, rows: Sequence[int] = ROWS, repeats: int = 50, seconds: float = 20.0,
              seed: int = 0, model_name: str | None = None, host: bool = True, runner: Eager | Captured | None = None,
              progress: Callable[[int, int], None] | None = None) -> Calibration:
    """Time one recurrence, prelude and readout on `rows` rows behind prefixes of two lengths.

    model: LoopedModel or LoopedCore. prefix_length: where the decodes will typically be, of which half and one and a half times are
    measured; or the lengths themselves. A wave has one lane per depth at most, so wider waves than T are not measured; nor are trees on
    a model with sliding windows, which runs none. host: also time a few short decodes, for what they cost between the calls.
    seconds: about how long it all may take; the sweep stops after `repeats` rounds or its share of them, but not before every cell
    has been measured three times. runner: how the calls run (decoders/graphs.py); captured, they have no launch gaps. progress: called
    with (rounds done, rounds planned). Raises SettingError for row counts below 1.
    """
    import pandas as pd

    core: LoopedCore = model.core
    wanted = [prefix_length // 2, prefix_length + prefix_length // 2] if isinstance(prefix_length, int) else list(prefix_length)
    if not rows or min(rows) < 1 or repeats < 1 or not wanted or (prefix_length if isinstance(prefix_length, int) else min(wanted)) < 1:
        raise SettingError(f"rows, prefix_length and repeats must be at least 1, got {list(rows)}, {prefix_length}, {repeats}")
    if min(rows) >= core.config.context:
        raise SettingError(f"a context of {core.config.context} positions has no room for {min(rows)} rows behind a "
                           "prefix of 1: give fewer rows")
    lengths = sorted({max(1, min(n, core.config.context - max(rows))) for n in wanted})
    cells = {}
    for length in lengths:
        fitting = [n for n in rows if length + n <= core.config.context]
        cells |= {(part, shape, length, n): call for (part, shape, n), call in _cells(core, length, fitting, seed).items()}
    if runner is not None:
        cells = {key: partial(runner.run, key, call) for key, call in cells.items()}
    for call in cells.values():  # the first call of a shape pays for its set-up
        call()
    middle = (lengths[0] + lengths[-1]) // 2
    short = min(_HOST_TOKENS, core.config.context - middle)
    between = HostTimes(core, middle, short, seed) if host and short > 1 else None
    observations = []
    begin = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repeat in range(repeats):
            for (part, shape, length, n), call in cells.items():
                call()  # decoding finds its weights and code where the last such call left them; after another cell's they are elsewhere
                calls = core.config.depth if (part, shape) == ("recur", "chain") else 1
                observations.append((part, shape, n, length, _time(call, core.device) / calls, repeat))
            while between is not None and between.seconds < _HOST_SHARE * (time.perf_counter() - begin):
                between.turn(repeat)
            if progress is not None:
                progress(repeat + 1, repeats)
            if repeat >= 2 and time.perf_counter() - begin > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    frame = pd.DataFrame(observations, columns=list(Calibration.columns[1:]))
    frame.insert(0, "model", model_name or core.source or core.family)
    swept = Calibration(frame, _facts(core, lengths))
    if between is None:
        return swept
    name, left = frame["model"][0], between.beyond(swept, middle)
    rest = pd.DataFrame([(name, part, feature, 1, middle, seconds, turn) for part, feature, turn, seconds in left], columns=frame.columns)
    return Calibration(pd.concat([frame, rest], ignore_index=True), swept.meta)


def _cells(core: LoopedCore, prefix: int, rows: Sequence[int], seed: int) -> dict[tuple[str, str, int], Callable[[], Any]]:
    """(part, shape, rows) -> a call to be timed, all on one cache with a real prefix."""
    depth, width = core.config.depth, max(rows)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, core.config.vocab_size, (1, prefix + width), generator=draw).to(core.device)
    cache = core.make_cache(prefix + width, depth, spare=width)
    core(tokens[:, :prefix], cache=cache)
    new = tokens[:, prefix:]
    x = core.embed(new, Chain(prefix, width), cache)
    state = core.start(x, Chain(prefix, width))
    cells: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for n in rows:
        chain = Chain(prefix, n, depth)
        each = [chain.at_depth(r) for r in range(1, depth + 1)]
        cells["recur", "chain", n] = partial(_burst, core, state[:, :n], x[:, :n], cache, each)
        cells["recur", "fresh", n] = partial(_burst, core, state[:, :n], x[:, :n], cache, each[:1])
        cells["prelude", "chain", n] = lambda n=n, chain=chain: core.embed(new[:, :n], chain, cache)
        cells["readout", "chain", n] = lambda n=n, chain=chain: core.read(state[:, :n], chain, cache)[0].max(-1)
        if 1 < n <= depth:
            wave = Wave(prefix, tuple(range(n, 0, -1)))
            cells["recur", "wave", n] = lambda n=n, wave=wave: core.recur(state[:, :n], x[:, :n], wave, cache)
        if n > 1:  # a wave's readout: the verify row in front, draft rows behind
            at = At(tuple(prefix + i for i in range(n)), depth)
            cells["readout", "at", n] = lambda n=n, at=at: core.read(state[:, :n], at, cache)[0].max(-1)
        if n > 1 and depth > 1 and not getattr(core.config, "window", 0):
            tree = _tree(prefix, n, depth, prefix + width)
            cells["recur", "tree", n] = lambda n=n, tree=tree: core.recur(state[:, :n], x[:, :n], tree, cache)
    deep = ReadPolicy.named("deep_kv", depth)
    if depth > 1 and not core.why_not_lossless:  # where depths share their K/V there is no deeper one to read
        draft = Draft(prefix, prefix + (width > 1), 1)
        cells["recur", "deep", 1] = lambda: core.recur(state[:, :1], x[:, :1], draft, cache, deep)
    if ("recur", "wave", 2) in cells and ("recur", "fresh", 1) in cells:
        cells["recur", "wave", 1] = cells["recur", "fresh", 1]
    return cells


def _burst(core: LoopedCore, state: torch.Tensor, x: torch.Tensor, cache: DepthCache, rows: Sequence[Chain]) -> None:
    """Recurrences of the same rows, one depth after the other, as plain decoding and verification run them: the plan of how rows attend
    is made for the first and kept for the others."""
    cache.chain = None
    for chain in rows:
        core.recur(state, x, chain, cache)


def _tree(prefix: int, n: int, depth: int, spare: int) -> Tree:
    """n rows, two at each position: two branches from one root, deepest first."""
    at = [prefix + (i + 1) // 2 for i in range(n)]
    cells = [prefix + (i + 1) // 2 if i % 2 or not i else spare + i // 2 - 1 for i in range(n)]
    own: list[tuple[int, ...]] = [(cells[0],)]
    for i in range(1, n):
        own.append((*(own[i - 2] if i > 2 else own[0]), cells[i]))
    return Tree(tuple(at), tuple(cells), tuple(own), tuple(max(depth - p + prefix, 1) for p in at), prefix)


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


def _facts(core: LoopedCore, lengths: Sequence[int]) -> dict[str, Any]:
    return {"depth": core.config.depth, "injects": core.config.injects, "dtype": str(core.dtype).removeprefix("torch."),
            "device": str(core.device), "threads": torch.get_num_threads(), "prefix_length": (lengths[0] + lengths[-1]) // 2,
            "prefix_lengths": list(lengths)}
