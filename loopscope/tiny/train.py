"""Train a shipped model from nothing: ``python -m loopscope.tiny.train NAME``.

The run is seeded and resumable: batches, recurrence counts and start states are pure functions of (seed, step), so a
run that was stopped and resumed equals one that was not. Checkpoints and the log go to ``runs/tiny/NAME``, the
finished model (bf16 weights, config, tokenizer, card) to the package's ``weights/NAME`` or to ``--out``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.tiny import NAMES, WEIGHTS, optim
from loopscope.tiny import tokenizer as tok
from loopscope.tiny.data import IGNORE, Stream, tokenizer_texts
from loopscope.tiny.recipe import RECIPES, Recipe

CHECKPOINT_EVERY_S = 180.0
LOG_EVERY = 20


def generator(recipe: Recipe, step: int) -> torch.Generator:
    """The random numbers of one step."""
    return torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)


def initialise(core: torch.nn.Module, recipe: Recipe) -> None:
    """Fresh weights: normal matrices with the config's standard deviations, unit norms, zero biases."""
    config, g = recipe.config, torch.Generator().manual_seed(recipe.seed)
    values = config.get("init_values")
    std = values["std"] if values else config["initializer_range"]
    with torch.no_grad():
        for name, p in core.named_parameters():
            if "norm" in name:
                p.fill_(1.0)
            elif "bias" in name:
                p.zero_()
            elif values is None and name.startswith("wte"):
                p.normal_(0.0, 0.5, generator=g)  # comparable to what the unit-norm branches add to it
            elif values and name.endswith(("attn.out.weight", "mlp.down.weight")):
                p.normal_(0.0, values["out_proj"], generator=g)
            else:
                p.normal_(0.0, std, generator=g)


def draw_recurrences(recipe: Recipe, g: torch.Generator) -> int:
    """Recurrences of one training step, 1 + Poisson(lognormal) as Huginn was trained (arXiv 2502.05171, section 3.3)."""
    sigma, mean = 0.5, recipe.mean_recurrences - 1
    rate = torch.exp(torch.randn((), generator=g) * sigma + math.log(mean) - sigma**2 / 2)
    return min(1 + int(torch.poisson(rate, generator=g)), recipe.most_recurrences)


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction=reduction
    )


def huginn_loss(core: Any, inputs: Tensor, targets: Tensor, recipe: Recipe, g: torch.Generator) -> Tensor:
    """Loss after a random number of recurrences from a random start state; gradients through the last few only."""
    e = core.embed(inputs)
    std = core.config.state_std
    s = torch.empty(e.shape)
    torch.nn.init.trunc_normal_(s, std=std, a=-3 * std, b=3 * std, generator=g)
    total = draw_recurrences(recipe, g)
    with torch.no_grad():
        for _ in range(total - recipe.backprop_recurrences):
            s = core.recur(s, e)
    for _ in range(min(total, recipe.backprop_recurrences)):
        s = core.recur(s, e)
    return _cross_entropy(core.read(s), targets)


def ouro_loss(core: Any, inputs: Tensor, targets: Tensor, recipe: Recipe, g: torch.Generator) -> Tensor:
    """Mean loss over the exits (a loss on the last exit alone leaves the shallow ones useless).

    The exit gate learns beside it, on detached states and losses: expected loss under its exit distribution, less
    ``gate_entropy`` times that distribution's entropy (Ouro, arXiv 2510.25741, stage I), so that the gate shapes
    nothing but itself.
    """
    e = core.embed(inputs)
    s, states, losses = core.start(e), [], []
    for _ in range(recipe.config["total_ut_steps"]):
        s = core.recur(s, e)
        states.append(s)
        losses.append(_cross_entropy(core.read(s), targets, "none"))
    per_token = torch.stack(losses, -1)[targets.flatten() != IGNORE]  # [counted, depth]
    exits = core.exit_pdf(torch.stack(states).detach()).flatten(0, 1)[targets.flatten() != IGNORE]
    entropy = -(exits * exits.clamp_min(1e-9).log()).sum(-1)
    gate = (exits * per_token.detach()).sum(-1) - recipe.gate_entropy * entropy
    # the gate's value is no part of the reported loss: only its gradient is added
    return per_token.mean() + gate.mean() - gate.mean().detach()


class Run:
    """One training run: model, optimizers, data and the folder they are saved in."""

    def __init__(self, name: str, recipe: Recipe, folder: Path):
        from loopscope.models.looped import LoopedCore
        from loopscope.models.registry import config_from_dict

        self.name, self.recipe, self.folder = name, recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer" / "tokenizer.json").exists():
            tok.save(tok.train(tokenizer_texts(), recipe.config["vocab_size"]), folder / "tokenizer")
        self.tokenizer = tok.load(folder / "tokenizer")
        self.core = LoopedCore.from_config(config_from_dict(recipe.config))
        initialise(self.core, recipe)
        self.optimizers = optim.build(self.core, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay)
        self.stream = Stream(self.tokenizer, recipe.seed, recipe.rows, recipe.length)
        self.loss = ouro_loss if recipe.config["model_type"] == "ouro" else huginn_loss
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, float]] = []

    def one_step(self) -> float:
        """One update; returns the loss.

        Raises:
            FloatingPointError: if the loss is not a number.
        """
        recipe = self.recipe
        loss = self.loss(self.core, *self.stream.batch(self.step), recipe, generator(recipe, self.step))
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"{self.name}: the loss is {loss.item()} at step {self.step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.core.parameters(), recipe.clip)
        optim.set_rate(self.optimizers, recipe.rate(self.step))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def train(self, minutes: float | None = None) -> bool:
        """Train to the recipe's last step, or for some minutes; says whether the last step was reached."""
        recipe, began, saved, recent = self.recipe, time.monotonic(), time.monotonic(), []
        before = self.seconds
        bar = tqdm(total=recipe.steps, initial=self.step, desc=self.name, unit="step", mininterval=2)
        while self.step < recipe.steps and (minutes is None or time.monotonic() - began < 60 * minutes):
            recent.append(self.one_step())
            self.seconds = before + time.monotonic() - began
            bar.update()
            if self.step % LOG_EVERY == 0 or self.step == recipe.steps:
                mean = sum(recent) / len(recent)
                self.log.append({"step": self.step, "loss": round(mean, 4), "seconds": round(self.seconds, 1)})
                with (self.folder / "log.jsonl").open("a") as file:
                    file.write(json.dumps(self.log[-1]) + "\n")
                bar.set_postfix(loss=f"{mean:.3f}")
                recent = []
            if time.monotonic() - saved > CHECKPOINT_EVERY_S:
                self.save()
                saved = time.monotonic()
        bar.close()
        self.save()
        return self.step >= recipe.steps

    def save(self) -> None:
        """Write the checkpoint; it appears under its name only when complete."""
        state = {
            "model": self.core.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
            "recipe": self._fingerprint(),
        }
        part = self.folder / "checkpoint.part"
        torch.save(state, part)
        os.replace(part, self.folder / "checkpoint.pt")

    def _fingerprint(self) -> str:
        return json.dumps(vars(self.recipe), sort_keys=True, default=str)

    def resume(self) -> None:
        """Go on from the folder's checkpoint.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it was written by another recipe.
        """
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: {path} does not exist; start without --resume")
        state = torch.load(path, weights_only=True)
        if state["recipe"] != self._fingerprint():
            raise ValueError(f"{path} was written by another recipe (or number of steps); start without --resume")
        self.core.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]

    def export(self, out: Path, command: str) -> None:
        """Write the model as it ships: bf16 weights under official names, config, tokenizer, card.

        The card's numbers are those of the written files, read back. The folder appears only when complete.
        """
        from loopscope.models.loading import load_core
        from loopscope.tiny import card

        part = out.with_name(out.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        rounded = copy.deepcopy(self.core).to(torch.bfloat16)
        rounded.save_pretrained(part)
        tok.save(self.tokenizer, part)
        card.write(card.numbers(load_core(part), self, command), part)
        for file in part.iterdir():
            file.chmod(0o644)  # temporary files start private; package data must be readable by all
        shutil.rmtree(out, ignore_errors=True)
        os.replace(part, out)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m loopscope.tiny.train", description=__doc__)
    parser.add_argument("name", choices=NAMES, help="which shipped model")
    parser.add_argument("--out", type=Path, help="folder of the finished model (default: inside the package)")
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny"), help="folder of checkpoints and logs")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the recipe's")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes; go on later with --resume")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (small matrices gain nothing from more)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export-only", action="store_true", help="write the model of the last checkpoint as it is")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    recipe = RECIPES[given.name].shortened(given.steps) if given.steps else RECIPES[given.name]
    command = f"python -m loopscope.tiny.train {given.name}" + (f" --steps {given.steps}" if given.steps else "")
    run = Run(given.name, recipe, given.runs / given.name)
    try:
        if given.resume or given.export_only:
            run.resume()
        elif (run.folder / "checkpoint.pt").exists():
            raise FileExistsError(f"{run.folder} holds a checkpoint: pass --resume to go on, or remove the folder")
        finished = given.export_only or run.train(given.minutes)
    except (FileNotFoundError, FileExistsError, ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped at step {run.step}; the last checkpoint is kept, go on with --resume", file=sys.stderr)
        return 130
    if not finished:
        print(f"stopped at step {run.step} of {recipe.steps}; go on with --resume")
        return 0
    out = given.out or WEIGHTS / given.name
    run.export(out, command)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
