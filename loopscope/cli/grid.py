"""`loopscope grid`: every schedule of a fixed grid predicted, written down, then measured; and what the plan's pick lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.folder import refuse_existing, run_folder
from loopscope.cli.progress import Stages
from loopscope.cli.study import continued, open_model, print_table, read_texts
from loopscope.errors import RunFolderError, SettingError

if TYPE_CHECKING:
    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration
    from decoders.grid import Expected, GridResult
    from loopscope.models.looped import LoopedCore

_SETTINGS, _PREDICTIONS = "settings.json", "predictions"
_FORESEE, _MEASURE = 1.0, 4.0  # weights of the two halves, for the time left


def run_grid(models: Sequence[str], *, tasks: Sequence[str], count: int, out: str | None, max_new_tokens: int, repeats: int,
             calibrate_seconds: float, fresh: bool, seed: int, threads: int) -> None:
    """Foresee all grids, then measure them; an interrupted run goes on with the predictions it made then.

    Raises SettingError, and RunFolderError where OUT.partial holds a run of other settings or an altered prediction.
    """
    import pandas as pd

    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration
    from decoders.grid import GridResult, RegretResult, grid_cells, regret

    if out is None:
        raise SettingError("a grid is minutes of measuring that must be kept: give --out FOLDER")
    refuse_existing(out)
    cores = {name: open_model(name, threads) for name in dict.fromkeys(models)}
    tasks = list(dict.fromkeys(tasks))
    partial = _Partial(Path(f"{out.rstrip(os.sep)}.partial"), fresh, {
        "models": list(cores), "tasks": tasks, "prompts": count, "max_new_tokens": max_new_tokens, "repeats": repeats,
        "calibrate_seconds": calibrate_seconds, "seed": seed, "threads": threads})
    cells, rows, timings, records = [], [], [], {}
    pairs = [(name, task) for name in cores for task in tasks]
    with Stages([w for _ in pairs for w in (_FORESEE, _MEASURE)]) as progress:
        for name, core in cores.items():
            for task in tasks:
                _, prompts = read_texts(core, task, count, None, seed)
                with progress.stage(f"{name}, {task}: what every schedule will cost"):
                    expected = partial.expected(core, task, prompts)
                records[f"{name}, {task}"] = partial.record(core, task)
                with progress.stage(f"{name}, {task}: {len(expected.decoders)} schedules measured") as stage:
                    measured = partial.measured(core, task, prompts, expected, stage.advance)
                cells.append(grid_cells(expected, measured))
                rows.append(measured.frame)
            timings.append(partial.calibration(core).frame)
    grid = GridResult(pd.concat([c.frame for c in cells], ignore_index=True), cells[0].meta)
    lost = RegretResult(regret(grid.frame), cells[0].meta)
    results = [grid, lost, BenchResult(pd.concat(rows, ignore_index=True), cells[0].meta),
               Calibration(pd.concat(timings, ignore_index=True))]
    _save(results, out, partial, records)
    shutil.rmtree(partial.folder, ignore_errors=True)
    _say(grid, lost)


class _Partial:
    """What an unfinished run keeps in OUT.partial: its settings, its predictions, and a journal per model and task."""

    def __init__(self, folder: Path, fresh: bool, settings: dict[str, Any]) -> None:
        from loopscope.records import write_text

        self.folder, self.settings = folder, settings
        if fresh and folder.exists():
            shutil.rmtree(folder)
        path = folder / _SETTINGS
        if path.is_file():
            found = _read_json(path)
            differs = [f"{k} {found.get(k)!r} instead of {v!r}" for k, v in settings.items() if found.get(k) != v]
            if differs:
                raise RunFolderError(f"{folder} holds an unfinished grid begun with {'; '.join(differs)}: run it as it was begun, choose "
                                     "another --out, or start afresh and lose it (--fresh)")
        elif folder.exists():
            raise RunFolderError(f"{folder} should hold an unfinished grid and has no {_SETTINGS}; choose another --out, or --fresh")
        else:
            write_text(json.dumps(settings, indent=1) + "\n", path)

    def calibration(self, core: LoopedCore) -> Calibration:
        """What calls cost; timed once per model."""
        from decoders.calibrate import Calibration, calibrate

        folder = self.folder / _PREDICTIONS / _file(core)
        if not (folder / f"{Calibration.kind}.parquet").is_file():
            calibrate(core, seconds=self.settings["calibrate_seconds"], seed=self.settings["seed"], model_name=core.source).save(folder)
        return Calibration.load(folder)

    def expected(self, core: LoopedCore, task: str, prompts: list) -> Expected:
        """What every schedule will cost on these prompts, written down; or what an interrupted run wrote down."""
        from decoders.grid import Expected, predict_grid
        from probes import depth_lens

        name, folder = f"{_file(core)}_{task}", self.folder / _PREDICTIONS
        if not (folder / f"{name}.json").is_file():
            seed, new = self.settings["seed"], self.settings["max_new_tokens"]
            found = {"depth_lens": depth_lens(core, continued(core, prompts, new, seed), task=task, seed=seed, progress=False)}
            predict_grid(core, prompts, found, self.calibration(core), new, task=task, name=core.source, seed=seed).write(folder, name)
        return Expected.read(folder, name)

    def record(self, core: LoopedCore, task: str) -> dict[str, Any]:
        """When the prediction was written, and the SHA-256 of its files."""
        return _read_json(self.folder / _PREDICTIONS / f"{_file(core)}_{task}.json")

    def measured(self, core: LoopedCore, task: str, prompts: list, expected: Expected, advance) -> BenchResult:
        """All schedules on these prompts; prompts that an interrupted run finished are not decoded again."""
        from decoders.bench import bench
        from decoders.bench_journal import Journal
        from decoders.metronome import Metronome

        with Journal(self.folder / f"{_file(core)}_{task}") as journal:
            try:
                return bench(core, prompts, expected.decoders, task, self.settings["max_new_tokens"], self.settings["repeats"],
                             self.settings["seed"], model_name=core.source, journal=journal,
                             metronome=Metronome(core), progress=advance)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted; predictions and finished prompts are kept in {self.folder}: the same command goes "
                                        "on from there, --fresh starts anew") from None


def _file(core: LoopedCore) -> str:
    from figures.gallery import slug

    return slug(core.source or core.family)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; start afresh (--fresh)") from error


def _save(results, out: str, partial: _Partial, records: dict[str, Any]) -> None:
    import figures
    from loopscope.records import manifest, write_text

    with run_folder(out) as part:
        for result in results:
            result.save(part / "tables")
        shutil.copytree(partial.folder / _PREDICTIONS, part / _PREDICTIONS)
        figures.save(results[0].plot(), results[0].frame, part / "figures", "grid")
        facts = manifest(settings=partial.settings, predictions=records, seed=partial.settings["seed"])
        write_text(json.dumps(facts, indent=1, default=str) + "\n", part / "manifest.json")


def _say(grid: GridResult, lost) -> None:
    from decoders.grid import NEAR

    exact = grid.frame[grid.frame.exact]
    print(f"{len(grid.frame)} cells; calls said to be exact: {len(exact)}, counted exactly so: {int(exact.calls_equal.sum())}")
    shown = lost.frame.rename(columns={"near": f"within_{NEAR:.0%}".replace("%", "_percent")})
    print_table(shown)
    ratio = grid.frame.ratio[grid.frame.decoder != "AR"]
    print(f"predicted speedup within {NEAR:.0%} of the measured one in {((ratio - 1).abs() <= NEAR).mean():.1%} of {len(ratio)} cells; "
          "regret: share of speed that the plan's pick loses to the best schedule measured")
