"""`loopscope report`: probes, interventions, plan and benchmark of some models, as one run folder.

The order is the argument of the page: what settles (convergence, depth lens, second candidates, runs), what can be read early (prefix
channels, depth grid), which decoder follows (hops and plan, before anything is timed), and what it then did (benchmark).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.folder import run_folder
from loopscope.cli.planned import drafts, left_out, measured, planned
from loopscope.cli.progress import Stages
from loopscope.cli.study import continued, open_model
from loopscope.errors import SettingError

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore
    from loopscope.records import Result

TASKS = ("maths", "code")


@dataclass(frozen=True)
class Size:
    """How much of everything a report measures."""

    probe_prompts: int = 16
    grid_prompts: int = 8
    new_tokens: int = 48  # of the continuation that drafts are judged on
    max_positions: int = 48  # anchors per prompt
    bench_prompts: int = 10
    bench_tokens: int = 64
    repeats: int = 2
    trace_tokens: int = 32
    calibrate_seconds: float = 12.0
    refined_rounds: int = 24  # DAS-Wave with more is predicted by formula
    hop_anchors: int = 8  # per prompt
    factorial_prompts: int = 8
    factorial_tokens: int = 48


FULL = Size()
QUICK = Size(probe_prompts=5, grid_prompts=2, new_tokens=32, max_positions=20, bench_prompts=4, bench_tokens=32, repeats=1,
             trace_tokens=24, calibrate_seconds=4.0, factorial_prompts=2, factorial_tokens=16, hop_anchors=4)
# Seconds of each stage at full size, for the time left: processor seconds of a run on the shipped models, (T = 4, T = 16), mean of both
# tasks. What counts is their proportion: the time left is scaled by what was spent.
_WEIGHTS = {"calibrate": (4.9, 11.2), "continue": (2.7, 8.9), "convergence": (0.8, 2.1), "depth lens": (0.35, 1.5),
            "prefix channels": (6.7, 19.8), "candidates": (0.4, 1.2), "depth grid": (1.5, 4.7), "replay": (0.5, 1.6), "hops": (1.7, 3.6),
            "plan": (7.8, 11.0), "benchmark": (45.0, 85.0), "factorial": (15.4, 22.5), "schedules": (1.0, 2.1)}
_FIGURES, _QUICK_SHARE = 50.0, 0.24  # seconds of drawing per model, on one core; of everything else at --quick


def write_run(names: Sequence[str], out: str | Path, *, quick: bool, seed: int, threads: int, published: bool = False) -> str:
    """Make the run folder; returns a line that says where the report is. published: as for figures.report.write_report."""
    from loopscope.models.loading import shipped_models

    names = list(dict.fromkeys(names)) or shipped_models()
    if not names:
        raise SettingError("no model is shipped with this installation; name a checkpoint folder: loopscope report FOLDER --out DIR")
    labels = _labels(names)
    size, begin = QUICK if quick else FULL, time.monotonic()
    with run_folder(out) as part:
        cores = {label: open_model(source, threads) for label, source in labels.items()}  # a wrong name is said before anything runs
        run = Run(size, seed, part)
        with Stages(_weights(list(cores.values()), quick)) as progress:
            for name, core in cores.items():
                run.study(name, core, progress)
            with progress.stage("figures and report"):
                facts = _facts(labels, size, seed, threads, quick) | {"predictions": run.predictions, "planned_from": run.planned_from,
                                                                      "stages": progress.seconds}
                finish(part, run.tables(), facts, run.findings, begin, published)
    return f"report: {Path(out) / 'report.html'}  ({time.monotonic() - begin:.0f} s)"


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Label in tables and figures -> model. Raises SettingError where two models would share one: their rows would be one model's."""
    labels: dict[str, str] = {}
    for source in names:
        label = Path(source).name or str(source)
        if label in labels:
            raise SettingError(f"{labels[label]} and {source} would both be called {label!r} in the report; rename one of the folders, or "
                               "make one report of each")
        labels[label] = source
    return labels


def _starts(core: LoopedCore) -> tuple[str | None, ...]:
    """Both start states where there is one to choose: a zero start may hide what mature values repair."""
    return (None, "zero") if core.has_start_state and core.config.state_std else (None,)


def _continued(core: LoopedCore, prompts: Sequence[str], size: Size, seed: int, advance) -> tuple[list[list[int]], list[list[int]]]:
    """(what probes read: prompts with their new tokens; the new tokens of those that are replayed), each prompt decoded once."""
    read, new = [], []
    for i, prompt in enumerate(prompts):
        replays = i < size.bench_prompts and not core.why_not_lossless
        whole = continued(core, [prompt], max(size.new_tokens, size.bench_tokens if replays else 0), seed)[0]
        start = len(core.prompt_tokens(prompt))
        if i < size.probe_prompts:
            read.append(whole[: start + size.new_tokens])
        if replays:
            new.append(whole[start : start + size.bench_tokens])
        advance(i + 1, len(prompts))
    return read, new


def _stages(core: LoopedCore) -> list[str]:
    probed = [*["convergence", "depth lens", "prefix channels"] * len(_starts(core)), "candidates", "depth grid"]
    per_task = ["continue", *probed, "replay", "hops", "plan", "benchmark", "factorial", "schedules"]
    per_task = [stage for stage in per_task if drafts(core) or stage not in ("hops", "factorial")]
    return ["calibrate", *per_task * len(TASKS)]


def _weights(models: Sequence[LoopedCore], quick: bool) -> list[float]:
    """About how many seconds each stage takes, drawing last: between and beyond the depths that were timed, linear in T."""
    from figures.drawing import cores

    out = []
    for core in models:
        for stage in _stages(core):
            shallow, deep = _WEIGHTS[stage]
            seconds = max(0.1, shallow + (deep - shallow) * (core.config.depth - 4) / 12)
            out.append(seconds * (_QUICK_SHARE if quick else 1))
    return [*out, _FIGURES * len(models) / min(cores(), 4)]


class Run:
    """Collects the results of all models and tasks, table by table."""

    def __init__(self, size: Size, seed: int, folder: Path) -> None:
        self.size, self.seed, self.folder = size, seed, folder
        self.results: dict[str, list[Result]] = {}
        self.findings: list[dict[str, Any]] = []
        self.predictions: dict[str, Any] = {}  # of each model and task: when they were written, and the SHA-256 of each file
        self.planned_from: dict[str, str] = {}  # of each model and task: the folder of the findings, from the run's own

    def add(self, *results: Result | None) -> None:
        for result in results:
            if result is not None and len(result.frame):
                self.results.setdefault(result.kind, []).append(result)

    def tables(self) -> dict[str, Any]:
        """kind -> one frame of all models and tasks."""
        import pandas as pd

        return {kind: pd.concat([r.frame for r in results], ignore_index=True) for kind, results in self.results.items()}

    def study(self, name: str, core: LoopedCore, progress: Stages) -> None:
        from decoders.calibrate import calibrate

        with progress.stage(f"{name}: timing a block call") as stage:
            calibration = calibrate(core, seconds=self.size.calibrate_seconds, seed=self.seed, model_name=name, progress=stage.advance)
        self.add(calibration)
        for task in TASKS:
            self._task(name, core, task, calibration, progress)

    def _task(self, name: str, core: LoopedCore, task: str, calibration, progress: Stages) -> None:
        from decoders.bench import bench
        from decoders.factorial import factorial
        from decoders.trace import trace
        from loopscope.tiny.prompts import prompts as built_in
        from probes.runs import candidates_and_runs

        size, seed = self.size, self.seed
        prompts = built_in(task, max(size.probe_prompts, size.bench_prompts), seed)
        probed, timed = prompts[: size.probe_prompts], prompts[: size.bench_prompts]
        own: dict[str, Result] = {}
        with progress.stage(f"{name}, {task}: continuing the prompts") as stage:
            tokens, new = _continued(core, prompts, size, seed, stage.advance)
        for start in _starts(core):
            found = self._probe(name, core, task, probed, tokens, start, progress)
            own = own or found
        with progress.stage(f"{name}, {task}: second candidates and runs"):
            both = candidates_and_runs(core, tokens, task=task, model_name=name, seed=seed, progress=False)
            own |= {table.kind: table for table in both}
        with progress.stage(f"{name}, {task}: depth grid"):
            own["depth_grid"] = self._grid(name, core, task, probed)
        self.add(*both, own["depth_grid"])
        plan = planned(core, own, calibration, prompts, new, size, progress, folder=self.folder, task=task, name=name, seed=seed)
        self.predictions[f"{name}, {task}"], self.planned_from[f"{name}, {task}"] = plan.record, plan.folder
        with progress.stage(f"{name}, {task}: benchmark of {len(plan.chosen)} decoders") as stage:
            result = bench(core, timed, plan.chosen, task, size.bench_tokens, size.repeats, seed, model_name=name, progress=stage.advance)
            told = measured(core, plan, result, timed[0], size, seed)
        sentences = [("left_out", left_out(core, plan.plan)), *(("prediction", sentence) for sentence in told.sentences)]
        self.findings.append({"model": name, "task": task, "topic": "decoder", "sentence": plan.plan.evidence,
                              "decoder": plan.plan.best.label})
        self.findings += [{"model": name, "task": task, "topic": topic, "sentence": sentence} for topic, sentence in sentences if sentence]
        self.add(plan.found.tables.get("hops"), result, result.acceptance, result.by_depth,
                 plan.plan.shortlist(labels=[d.label for d in plan.chosen]).beside(result), told.misses, plan.expected)
        if drafts(core):
            with progress.stage(f"{name}, {task}: factorial of DAS-Wave") as stage:
                self.add(factorial(core, prompts[: size.factorial_prompts], 12, 1, task, size.factorial_tokens, 1, seed, model_name=name,
                                   progress=stage.advance))
        with progress.stage(f"{name}, {task}: schedules"):
            self.add(trace(core, timed[0], plan.chosen, task, size.trace_tokens, seed, model_name=name))

    def _probe(self, name: str, core: LoopedCore, task: str, prompts, tokens, start: str | None, progress: Stages) -> dict[str, Result]:
        from interventions import mature_v_verdict, prefix_channels
        from probes import convergence, depth_lens

        options = {"task": task, "model_name": name, "start_state": start, "seed": self.seed, "progress": False}
        label = f"{name}, {task}" + (", zero start" if start == "zero" else "")
        with progress.stage(f"{label}: convergence"):
            settling = convergence(core, tokens, **options)
            self.add(settling)
        with progress.stage(f"{label}: depth lens"):
            lens = depth_lens(core, tokens, **options)
            self.add(lens, *([lens.settle] if lens.settle is not None else []))
        with progress.stage(f"{label}: prefix channels"):
            channels = prefix_channels(core, prompts, new_tokens=self.size.new_tokens, max_positions=self.size.max_positions, **options)
            effects = channels.effects()
            self.add(channels, effects)
        for v in mature_v_verdict(effects):
            self.findings.append({"model": v.model, "task": v.task, "start": v.start, "verdict": v.verdict, "topic": "mature_v",
                                  "sentence": v.sentence})
        return {"convergence": settling, "depth_lens": lens, **({} if lens.settle is None else {"settle": lens.settle}),
                "prefix_channels": channels}

    def _grid(self, name: str, core: LoopedCore, task: str, prompts) -> Result:
        from interventions import depth_grid

        return depth_grid(core, prompts[: self.size.grid_prompts], 1, task=task, model_name=name, seed=self.seed,
                          new_tokens=self.size.new_tokens, max_positions=self.size.max_positions, progress=False)


def _facts(labels: Mapping[str, str], size: Size, seed: int, threads: int, quick: bool) -> dict[str, Any]:
    from loopscope.records import manifest

    facts = manifest(models=list(labels.values()), tasks=list(TASKS), seed=seed, threads=threads, quick=quick, size=vars(size))
    return facts | {"sources": dict(labels), "commands": commands(facts)}


def commands(facts: Mapping[str, Any]) -> dict[str, str]:
    """Table -> the command that measures it again, with the sizes of a run's manifest.

    {model}, {task}, {start} and {decoders} are filled in for each figure. Tables that no command alone makes (the plan, the
    timing sweep, the schedules) are left out: the whole run makes them.
    """
    size = vars(Size()) | dict(facts["size"])
    rest = f"--seed {facts['seed']} --threads {facts['threads']}"
    probe = f"loopscope probe {{model}} --task {{task}} --start {{start}} --prompts {size['probe_prompts']}"
    probe += f" --new-tokens {size['new_tokens']}"
    intervene = f"loopscope intervene {{model}} --task {{task}} --start {{start}} --prompts {{prompts}} --new-tokens {size['new_tokens']}"
    intervene += f" --positions {size['max_positions']}"
    bench = (f"loopscope bench {{model}} --task {{task}} --prompts {size['bench_prompts']} --max-new-tokens {size['bench_tokens']} "
             f"--repeats {size['repeats']} {{decoders}}")
    channels = intervene.replace("{prompts}", str(size["probe_prompts"]))
    grid = intervene.replace("{prompts}", str(size["grid_prompts"])) + " --grid --draft-depth 1"
    factorial = (f"loopscope factorial {{model}} --task {{task}} --prompts {size['factorial_prompts']} "
                 f"--max-new-tokens {size['factorial_tokens']}")
    read = f"{probe} --only second_candidate,agreement_runs {rest}"
    return {"convergence": f"{probe} {rest}", "depth_lens": f"{probe} {rest}", "settle": f"{probe} {rest}", "second_candidate": read,
            "agreement_runs": read,
            "prefix_channels": f"{channels} {rest}", "prefix_effects": f"{channels} {rest}", "depth_grid": f"{grid} {rest}",
            "bench": f"{bench} {rest}", "acceptance": f"{bench} {rest}", "acceptance_by_depth": f"{bench} {rest}",
            "join": f"{bench} {rest}", "factorial": f"{factorial} {rest}"}


def finish(folder: Path, tables: dict[str, Any], facts: dict[str, Any], findings: list[dict[str, Any]], begin: float | None = None,
           published: bool = False) -> None:
    """Tables, figures, report.html and manifest of a run; tables in the order in which a reader meets them.

    begin: when the run began (time.monotonic), for the manifest's seconds, which count the drawing too. published: as
    for write_report.
    """
    from figures.advice import marked
    from figures.drawing import cores
    from figures.gallery import in_order
    from figures.predicted import remeasured
    from figures.report import write_report
    from loopscope.records import write_table, write_text

    tables = in_order(tables)
    if "plan" in tables:
        tables["plan"] = marked(tables["plan"], findings)
    if "plan" in tables and "bench" in tables:
        tables["plan"] = remeasured(tables["plan"], tables["bench"])
    for kind, frame in tables.items():
        write_table(frame, folder / "tables" / f"{kind}.parquet")
    write_report(folder, tables, facts, findings, published, cores())
    if begin is not None:
        facts = facts | {"seconds": round(time.monotonic() - begin, 1)}
    write_text(json.dumps(facts | {"findings": findings}, indent=1, default=str) + "\n", folder / "manifest.json")
