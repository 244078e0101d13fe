"""The report's middle: replay, plan, predictions on disk; and, once the benchmark has run, whether they held.

Nothing is measured before `planned` has written what is expected of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.progress import Stages

if TYPE_CHECKING:
    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration
    from decoders.decoder import Decoder
    from decoders.misses import Misses
    from decoders.plan import Plan
    from decoders.replay import ReplayPrediction
    from loopscope.cli.report import Size
    from loopscope.models.looped import LoopedCore

SLOTS = 4  # of the wave with shared K/V: as few as still write most of AR's tokens on the shipped model


@dataclass(frozen=True)
class Planned:
    """A plan, the decoders to hold it to, what each will count (None where the model cannot be replayed), and the record on disk."""

    plan: Plan
    chosen: list[Decoder]
    expected: ReplayPrediction | None
    record: dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What became of a plan: a table, and sentences for the report."""

    misses: Misses
    sentences: list[str]


def planned(core: LoopedCore, findings: Mapping[str, Any], calibration: Calibration, prompts: Sequence[Any], size: Size, progress: Stages,
            *, folder: Path, task: str, name: str, seed: int) -> Planned:
    """Replay the prompts that will be timed, rank all schedules, and write down what is expected of the best and the usual ones."""
    from decoders.autoregressive import Autoregressive
    from decoders.carried import Refinements
    from decoders.foretold import write_down
    from decoders.plan import rank
    from decoders.predict import schedules
    from decoders.replay import predict_from_replay, replay

    table = blocks = expected = None
    with progress.stage(f"{name}, {task}: replay"):
        if not core.why_not_lossless:
            table = replay(core, prompts, size.bench_tokens, task=task, model_name=name, seed=seed, progress=False)
            blocks = Refinements(core, prompts, table, size.refined_rounds, seed=seed)
    with progress.stage(f"{name}, {task}: plan"):
        fixed: list[Decoder] = usual(core)
        compared: list[Decoder] = [Autoregressive()]  # nothing else runs where K/V of several depths are one
        if not core.why_not_lossless:
            compared += [*schedules(core.config.depth, calibration.has("recur", "tree")), *fixed]
        plan = rank(findings, calibration, replay=table, refinements=blocks, task=task, decoders=compared, screen=True)
        chosen = with_usual([plan.best, *plan.rivals], fixed)
        if table is not None:
            expected = predict_from_replay(table, chosen, blocks)
        tables = {"plan": plan.frame} | ({} if expected is None else {"calls": expected.frame})
        record = write_down(tables, folder, f"{name}_{task}")
    return Planned(plan, chosen, expected, record)


def measured(core: LoopedCore, plan: Planned, result: BenchResult, calibration: Calibration, prompt: Any, size: Size, seed: int) -> Told:
    """Predicted against counted and timed; one more decode by each decoder says how much of its time passes inside block calls."""
    from decoders import foretold
    from decoders.misses import kernel_shares, misses, sentence

    found = misses(plan.plan.frame, result, calibration, kernel_shares(core, plan.chosen, prompt, size.bench_tokens, seed))
    counted = [] if plan.expected is None else [foretold.sentence(foretold.held(plan.expected.frame, result.frame))]
    return Told(found, [s for s in (*counted, sentence(found.frame)) if s])


def usual(core: LoopedCore) -> list[Decoder]:
    """Settings that never change, so that runs can be compared with each other: those of every decoder that this model can run.

    Sharing K/V between depths leaves them as they are where T is no more than the slots, and is known to work with injection only
    (docs/algorithms.md, 2.3).
    """
    from decoders import DASWave, LoopSpec, PromptLookup, Wavefront

    config = core.config
    if config.depth < 2 or core.why_not_lossless:
        return []
    out: list[Decoder] = [Wavefront(1), DASWave(12, 1), PromptLookup()]
    if config.depth > 2:
        out.append(Wavefront(1, redraft=1))
    if config.depth > 2 and not getattr(config, "window", 0):  # branches do not run on sliding windows
        out.append(LoopSpec(1, 2))
    if config.depth > SLOTS and config.injects:
        out.append(Wavefront(1, slots=SLOTS))
    return out


def with_usual(chosen: list[Decoder], usual: Sequence[Decoder]) -> list[Decoder]:
    """The plan's best of every kind, then the usual settings that are not among them."""
    labels = {d.label for d in chosen}
    return chosen + [d for d in usual if d.label not in labels]
