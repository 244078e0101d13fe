"""The report's middle: findings, plan, predictions on disk; and, once the benchmark has run, whether they held.

Nothing is measured before `planned` has written what is expected of it. What the plan was made of is saved beside the predictions, with
the call times: `plan(Findings.load(folder), Calibration.load(folder))` ranks again, without the model.
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
    from decoders.findings import Findings
    from decoders.misses import Misses
    from decoders.plan import Plan
    from decoders.replay import ReplayPrediction
    from loopscope.cli.report import Size
    from loopscope.models.looped import LoopedCore
    from loopscope.records import Result

SLOTS = 4  # of the wave with shared K/V: as few as still write most of AR's tokens on the shipped model


@dataclass(frozen=True)
class Planned:
    """A plan, the findings it was made of and their folder in the run's, the decoders to hold it to, what each will count (None where the
    model cannot be replayed), and the record on disk."""

    plan: Plan
    found: Findings
    folder: str
    chosen: list[Decoder]
    expected: ReplayPrediction | None
    record: dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What became of a plan: a table, and sentences for the report."""

    misses: Misses
    sentences: list[str]


def planned(core: LoopedCore, tables: Mapping[str, Result], calibration: Calibration, prompts: Sequence[Any], new: Sequence[Sequence[int]],
            size: Size, progress: Stages, *, folder: Path, task: str, name: str, seed: int) -> Planned:
    """Replay the prompts that will be timed, rank all schedules, and write down what is expected of the best and the usual ones.

    tables: what was measured already, by name, on the first so many of `prompts`. new: the tokens that plain decoding adds to those that
    will be timed, which are the first. folder: of the run. Findings and call times are saved
    in FOLDER/findings/NAME_TASK, predictions in FOLDER/predictions.
    """
    from decoders.autoregressive import Autoregressive
    from decoders.findings import Findings
    from decoders.foretold import write_down
    from decoders.plan import rank
    from decoders.predict import schedules
    from decoders.replay import predict_from_replay
    from probes import replay_table

    tables = dict(tables)
    compared: list[Decoder] = [Autoregressive()]  # nothing else runs where K/V of several depths are one
    with progress.stage(f"{name}, {task}: replay"):
        if not core.why_not_lossless:
            tables["replay"] = replay_table(core, prompts[: len(new)], new, limit=size.bench_tokens, task=task, model_name=name, seed=seed,
                                            progress=False)
            compared += [*schedules(core.config.depth, calibration.has("recur", "tree")), *usual(core)]
        found = Findings.of(core, tables, prompts, new_tokens=size.bench_tokens, probed_tokens=size.new_tokens, task=task, model_name=name,
                            seed=seed, rounds=size.refined_rounds, decoders=compared)
    if drafts(core):
        with progress.stage(f"{name}, {task}: hops"):
            found.trace_hops(size.hop_anchors)
    with progress.stage(f"{name}, {task}: plan"):
        fixed = usual(core)  # drafted in any case, since what each will count is written down
        plan = rank(found.tables, calibration, replay=tables.get("replay"), refinements=found, task=task,  # type: ignore[arg-type]
                    decoders=compared, screen=True, certain=fixed)
        chosen = with_usual([plan.best, *plan.rivals], fixed)
        expected = None
        if "replay" in tables:  # from the refinements themselves: the findings keep what the plan was made of and no more
            expected = predict_from_replay(tables["replay"], chosen, found.refinements)  # type: ignore[arg-type]
        written = {"plan": plan.frame} | ({} if expected is None else {"calls": expected.frame})
        record = write_down(written, folder / "predictions", f"{name}_{task}")
        own = f"findings/{name}_{task}"
        calibration.save(found.save(folder / own))
    return Planned(plan, found, own, chosen, expected, record)


def left_out(core: LoopedCore, plan: Plan) -> str:
    """Which decoders the plan has no number for, and why, in one sentence; empty where it has one for each."""
    if core.why_not_lossless:
        return f"Nothing is planned but AR: {core.why_not_lossless}."
    by_reason: dict[str, list[str]] = {}
    for label, reason in plan.left_out.items():
        by_reason.setdefault(reason, []).append(label)
    said = [f"{' and '.join(filter(None, (', '.join(labels[:-1]), labels[-1])))}: {reason}" for reason, labels in by_reason.items()]
    return f"The plan leaves out what it has no number for. {'; '.join(said)}." if said else ""


def drafts(core: LoopedCore) -> bool:
    """Whether anything but plain decoding runs on this model."""
    return core.config.depth > 1 and not core.why_not_lossless


def measured(core: LoopedCore, plan: Planned, result: BenchResult, prompt: Any, size: Size, seed: int) -> Told:
    """Predicted against counted and timed; one more decode by each decoder says how much of its time passes inside block calls."""
    from decoders import foretold
    from decoders.misses import kernel_shares, misses, sentence

    found = misses(plan.plan.frame, result, kernel_shares(core, plan.chosen, prompt, size.bench_tokens, seed))
    counted = [] if plan.expected is None else [foretold.sentence(foretold.held(plan.expected.frame, result.frame))]
    return Told(found, [s for s in (*counted, sentence(found.frame)) if s])


def usual(core: LoopedCore) -> list[Decoder]:
    """Settings that never change, so that runs can be compared with each other: those of every decoder that this model can run.

    Sharing K/V between depths leaves them as they are where T is no more than the slots, and is known to work with injection only
    (docs/algorithms.md, 2.3).
    """
    from decoders import DASWave, LoopSpec, PromptLookup, Wavefront

    config = core.config
    if not drafts(core):
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
