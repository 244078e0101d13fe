"""The plan held to a fixed grid: every schedule predicted, then every one measured, and what the plan's pick lost to the best of them.

    expected = predict_grid(core, prompts, calibration, new_tokens=48)         # written down before anything is measured
    record = expected.write(folder, "tiny-huginn_maths")                       # files, time and SHA-256
    cells = grid_cells(expected, bench(core, prompts, expected.decoders, ...))
    regret(cells.frame)

A plan that is compared only with the few decoders it chose itself can look right and still miss the best one. Here all cells of the
grid are timed, whatever the plan thinks of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoders.autoregressive import Autoregressive
from decoders.carried import Refinements
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.foretold import altered, held, write_down
from decoders.named import decoder as by_label
from decoders.plan import Plan, rank
from decoders.replay import ReplayPrediction, predict_from_replay, replay
from decoders.wavefront import Wavefront
from loopscope.errors import RunFolderError
from loopscope.records import Result, read_table

if TYPE_CHECKING:
    import pandas as pd

    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration

NEAR = 0.15  # a predicted speedup within this of the measured one is a hit


@dataclass(frozen=True, eq=False)
class GridResult(Result):
    """One row per model, task and schedule. ratio: measured over predicted speedup; speedups are of all decode seconds over all tokens.

    seconds: per committed token. exact: the calls were predicted exactly; calls_equal: they were, and proposed and accepted drafts too,
    on every prompt and repeat. planned: the schedule that the plan picks.
    """

    kind = "grid"
    columns = ("model", "task", "decoder", "calls_predicted", "calls_counted", "exact", "calls_equal", "seconds_predicted",
               "seconds_measured", "speedup_predicted", "speedup_measured", "ratio", "planned")


@dataclass(frozen=True, eq=False)
class RegretResult(Result):
    """One row per model and task: what `regret` says of its grid."""

    kind = "regret"
    columns = ("model", "task", "schedules", "best", "best_speedup", "picked", "picked_speedup", "regret", "near", "wrong")


@dataclass(frozen=True)
class Expected:
    """What is expected of a grid on some prompts."""

    decoders: list[Decoder]
    plan: Plan
    calls: ReplayPrediction

    def write(self, folder: Path, name: str) -> dict[str, Any]:
        """Put it on disk, as decoders.foretold.write_down does; returns the record. Raises RunFolderError."""
        return write_down({"plan": self.plan, "calls": self.calls}, folder, name)

    @classmethod
    def read(cls, folder: Path, name: str) -> Expected:
        """What `write` left. Raises RunFolderError where a file is missing or is not what its record says."""
        path = Path(folder) / f"{name}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            wrong = altered(record, folder)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path} cannot be read as the record of a prediction: {error}; start afresh (--fresh)") from error
        if wrong:
            raise RunFolderError(f"{', '.join(str(Path(folder) / n) for n in wrong)} changed after it was predicted, or is gone; what was "
                                 "measured cannot be held against it: start afresh (--fresh)")
        (plan, facts), (calls, more) = (read_table(Path(folder) / f"{name}_{kind}.parquet") for kind in ("plan", "calls"))
        return cls([by_label(label) for label in dict.fromkeys(calls.decoder)], Plan(plan, facts), ReplayPrediction(calls, more))


def schedules_of(depth: int) -> Iterator[Decoder]:
    """The grid at full depth T, the same for every model of that depth: at least 40 schedules from T = 4 on."""
    yield Autoregressive()
    shallow = [d for d in (1, 2, 3, 4, 6, 8) if d < depth]
    for d in shallow:
        yield Wavefront(d)
        for again in (n for n in (1, 2, 4) if d + n < depth):
            yield Wavefront(d, redraft=again)
        for block in (1, 2, 3, 4, 6, 8, 12) if depth <= 8 else (2, 4, 8):
            yield DraftThenVerify(d, block)
    for updates in (1, 2):
        for rounds in (2, 3, 4, 6, 8, 12):
            if rounds * updates <= 3 * depth:
                yield DASWave(rounds, updates)
    for width in (4, 8):
        for rounds in (2, 4, 6):
            yield DASWave(rounds, 1, initial_width=width)


def predict_grid(core: Any, prompts: Sequence[Any], findings: Mapping[str, Any], calibration: Calibration, new_tokens: int, *,
                 task: str = "", name: str | None = None, seed: int = 0, decoders: Sequence[Decoder] | None = None) -> Expected:
    """Calls of every schedule from a replay of these prompts, and its speed by the calibration. findings: as for decoders.plan.rank."""
    grid = list(decoders or schedules_of(core.config.depth))
    table = replay(core, prompts, new_tokens, task=task, model_name=name, seed=seed, progress=False)
    blocks = Refinements(core, prompts, table, seed=seed)
    plan = rank(findings, calibration, replay=table, refinements=blocks, task=task, decoders=grid)
    return Expected(grid, plan, predict_from_replay(table, grid, blocks))


def grid_cells(expected: Expected, result: BenchResult) -> GridResult:
    """Predicted beside measured for every schedule of the grid."""
    import pandas as pd

    said = expected.plan.frame.set_index("decoder")
    summary = result.summary(resamples=1).set_index("decoder")
    counted = held(expected.calls.frame, result.frame).set_index("decoder")
    model, task = result.frame.model.iloc[0], result.frame.task.iloc[0]
    ar, ar_said = summary.seconds_per_token["AR"], said.seconds_per_token["AR"]
    rows = []
    for label in (d.label for d in expected.decoders if d.label in said.index):
        p, m = said.loc[label], summary.loc[label]
        speedup, fast = ar_said / p.seconds_per_token, ar / m.seconds_per_token
        equal = label in counted.index and counted.prompts_differ[label] == 0
        rows.append((model, task, label, p.calls_per_token, m.calls_per_token, bool(p.exact_calls), bool(equal), p.seconds_per_token,
                     m.seconds_per_token, speedup, fast, fast / speedup, label == expected.plan.best.label))
    return GridResult(pd.DataFrame(rows, columns=list(GridResult.columns)), dict(result.meta))


def regret(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per model and task: the best measured schedule, the plan's pick, and the share of speed that the pick loses to the best.

    near: share of the cells, AR's left out, whose predicted speedup is within 15 % of the measured one; wrong: cells whose calls were
    said to be exact and are not.
    """
    import pandas as pd

    rows = []
    for (model, task), part in cells.groupby(["model", "task"], observed=True, sort=False):
        best, picked = part.loc[part.speedup_measured.idxmax()], part[part.planned].iloc[0]
        timed = part[part.decoder != "AR"]
        rows.append((model, task, len(part), best.decoder, best.speedup_measured, picked.decoder, picked.speedup_measured,
                     1 - picked.speedup_measured / best.speedup_measured, float(((timed.ratio - 1).abs() <= NEAR).mean()),
                     int((part.exact & ~part.calls_equal).sum())))
    return pd.DataFrame(rows, columns=list(RegretResult.columns))
