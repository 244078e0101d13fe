"""The model card: the same numbers as JSON and as a page."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopscope.tiny import corpus
from loopscope.tiny.data import MIX
from loopscope.tiny.evaluate import evaluate

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore
    from loopscope.tiny.train import Run


def numbers(core: LoopedCore, run: Run, command: str) -> dict[str, Any]:
    """Everything the card says, measured on ``core`` (the written files, read back)."""
    recipe, depth = run.recipe, core.config.depth
    starts = ("keyed", "zero") if core.has_start_state else ("none",)
    train, held_out = corpus.documents(held_out=False), corpus.documents(held_out=True)
    return {
        "name": run.name,
        "command": command,
        "seed": recipe.seed,
        "steps": run.step,
        "planned_steps": recipe.steps,
        "tokens": run.step * recipe.rows * recipe.length,
        "wall_minutes": round(run.seconds / 60, 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in core.parameters()),
        "depth": depth,
        "recipe": {k: v for k, v in vars(recipe).items() if k != "config"},
        "data": {
            "mix": MIX,
            "train_modules": len(train),
            "train_characters": sum(map(len, train.values())),
            "held_out_modules": sorted(held_out),
            "held_out_characters": sum(map(len, held_out.values())),
        },
        "loss_curve": run.log[:: max(1, len(run.log) // 24)] + run.log[-1:],
        "evaluation": evaluate(core, run.tokenizer, depth, starts),
    }


def _row(label: str, values: list[float], depths: list[int], digits: int = 3) -> str:
    return f"| {label} | " + " | ".join(f"{values[d - 1]:.{digits}f}" for d in depths) + " |"


def _table(title: str, rows: dict[str, list[float]], depths: list[int]) -> str:
    head = f"| {title} | " + " | ".join(f"d={d}" for d in depths) + " |\n|" + "---|" * (len(depths) + 1)
    return "\n".join([head, *(_row(label, values, depths) for label, values in rows.items())])


def page(n: dict[str, Any]) -> str:
    """The card as Markdown."""
    depths = [d for d in (1, 2, 3, 4, 6, 8, 12, 16) if d <= n["depth"]]
    family = "Huginn" if "huginn" in n["name"] else "Ouro"
    recipe, data, evaluation = n["recipe"], n["data"], n["evaluation"]
    mix, held_out, code, maths = data["mix"], data["held_out_modules"], evaluation["tokens"]["code"], evaluation["tokens"]["maths"]
    lines = [
        f"# {n['name']}",
        "",
        f"A small {family} (official architecture, config keys and parameter names) with {n['parameters']:,} parameters and",
        f"T = {n['depth']}, trained on a CPU by this project as a subject for probes and decoders. It is not a useful language",
        "model. Weights are stored in bfloat16; every number below is that of the stored weights, computed in float32.",
        "",
        "## Training",
        "",
        f"- Reproduce: `{n['command']}` (seed {n['seed']}, {n['threads']} thread; {n['wall_minutes']} minutes here, on two cores",
        f"  busy with other work; Python {n['python']}, torch {n['torch']}).",
        f"- {n['steps']} of {n['planned_steps']} steps of {recipe['rows']} x {recipe['length']} tokens: {n['tokens']:,} tokens.",
        f"- Data: {mix['worked']:.0%} arithmetic problems with worked steps, {mix['direct']:.0%} problems answered at once,",
        f"  {mix['code']:.0%} Python code ({data['train_modules']} standard-library modules, {data['train_characters']:,} characters;",
        f"  {len(held_out)} further modules, {data['held_out_characters']:,} characters, held out by a hash of their name).",
        f"- Muon (lr {recipe['muon_lr']}, weight decay {recipe['weight_decay']}) for matrices, AdamW (lr {recipe['adam_lr']}) for the",
        f"  rest; {recipe['warmup']} steps of warm-up, then linear to zero over the last {recipe['decay_share']:.0%} of the run;",
        f"  gradients clipped at {recipe['clip']}.",
    ]
    if family == "Huginn":
        lines += [
            f"- Recurrences per step: 1 + Poisson(lognormal), mean {recipe['mean_recurrences']}, at most {recipe['most_recurrences']};",
            f"  gradients through the last {recipe['backprop_recurrences']}; a new truncated-normal start state per row and position.",
        ]
    else:
        lines += [
            "- Loss averaged over the four exits. The exit gate is trained on detached states and losses (expected loss less",
            f"  {recipe['gate_entropy']} x entropy of the exit distribution), so it shapes nothing but itself.",
        ]
    curve = ", ".join(f"{p['step']}: {p['loss']:.2f}" for p in n["loss_curve"])
    lines += ["", f"Training loss (mean of the preceding steps; all token kinds): {curve}.", ""]
    for start in [k for k in evaluation if k in ("keyed", "zero", "none")]:
        e = evaluation[start]
        state = {"keyed": ", keyed random start state (the default)", "zero": ", zero start state", "none": ""}[start]
        lines += [
            f"## Held-out data by depth{state}",
            "",
            f"Mean loss in nats per token (code: {code:,} tokens; maths: {maths:,} answer tokens of worked problems).",
            "",
            _table("loss", e["loss"], depths),
            "",
            f"Top-1 agreement with depth {n['depth']} (direct: the answer token of problems answered at once).",
            "",
            _table("agreement", e["agreement"], depths),
            "",
            "Accuracy by task and difficulty, as found. A worked answer is right when greedy decoding reproduces all of it.",
            f"Problems per cell: {min(evaluation['problems_per_cell'].values())} to {max(evaluation['problems_per_cell'].values())}.",
            "",
            _table("accuracy", e["accuracy"], depths),
            "",
        ]
    return "\n".join(lines)


def write(n: dict[str, Any], folder: Path) -> None:
    """Write ``card.json`` and ``card.md``."""
    (folder / "card.json").write_text(json.dumps(n, indent=1) + "\n")
    (folder / "card.md").write_text(page(n))
