"""What a plan costs to make: the replay pass and the planning, over one autoregressive generation of the same tokens.

    python -m decoders.planning_cost tiny-huginn tiny-ouro --prompts 4 --tokens 64 --repeats 5

Both are run in turns in one process, the order alternated, and compared within each turn, so that a machine that is busy with other
things slows both alike; processor time is told beside wall time. The findings (depth lens, prefix channels, convergence) and the timing
sweep are there beforehand: they serve many plans and are reported apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decoders.autoregressive import Autoregressive
from decoders.calibrate import Calibration, calibrate
from decoders.carried import Refinements
from decoders.plan import Plan, rank
from loopscope.records import Result
from probes.replay import replay_table

LIMIT = 1.5  # what a plan may cost


@dataclass(frozen=True, eq=False)
class PlanningCostResult(Result):
    """One row per model, turn and clock (`wall`, `cpu`). seconds of each part; ratio: (replay_pass + planning) / generation."""

    kind = "planning_cost"
    columns = ("model", "repeat", "order", "clock", "generation", "replay_pass", "planning", "ratio")

    def summary(self, resamples: int = 2000, seed: int = 0) -> Any:
        """One row per model and clock: median ratio, its 95 % interval over turns, and the medians of the parts."""
        import numpy as np
        import pandas as pd

        draw, rows = np.random.default_rng(seed), []
        for (model, clock), part in self.frame.groupby(["model", "clock"], sort=False):
            ratios = part.ratio.to_numpy()
            again = np.median(ratios[draw.integers(len(ratios), size=(resamples, len(ratios)))], axis=1)
            low, high = np.percentile(again, (2.5, 97.5)) if len(ratios) > 1 else (np.nan, np.nan)
            rows.append((model, clock, len(ratios), np.median(ratios), low, high, *(part[name].median() for name in self.columns[4:7])))
        return pd.DataFrame(rows, columns=["model", "clock", "turns", "ratio", "low", "high", *self.columns[4:7]])


def planning_cost(model: Any, prompts: Sequence[Any], new_tokens: int, findings: dict[str, Any], calibration: Calibration, *,
                  repeats: int = 5, seed: int = 0) -> tuple[PlanningCostResult, Plan]:
    """Time both in turns, after one of each that is not counted; also the plan that was made last.

    findings: the tables that `decoders.plan.rank` takes. Every turn replays the texts anew: nothing is kept from one to the next.
    """
    import pandas as pd

    core = model.core
    name = core.source or core.family
    texts: list[list[int]] = []
    made: Plan | None = None
    rows: list[tuple] = []
    for repeat in range(-1, repeats):
        spent: dict[str, dict[str, float]] = {}
        for part in (("generation", "planning") if repeat % 2 else ("planning", "generation")):
            if part == "generation" or not texts:
                with _Clocks(spent, "generation"):
                    texts = [Autoregressive().generate(core, prompt, new_tokens, seed=seed).tokens for prompt in prompts]
            if part == "planning":
                with _Clocks(spent, "replay_pass"):
                    table = replay_table(core, prompts, texts, limit=new_tokens, seed=seed, progress=False)
                with _Clocks(spent, "planning"):
                    drafts = Refinements(core, prompts, table, seed=seed)
                    made = rank(findings, calibration, replay=table, refinements=drafts, seed=seed, screen=True)
        if repeat >= 0:
            order = "generation first" if repeat % 2 else "planning first"
            for clock in ("wall", "cpu"):
                g, r, p = (spent[part][clock] for part in PlanningCostResult.columns[4:7])
                rows.append((name, repeat, order, clock, g, r, p, (r + p) / g))
    assert made is not None
    frame = pd.DataFrame(rows, columns=list(PlanningCostResult.columns))
    facts = {"prompts": len(prompts), "new_tokens": new_tokens, "schedules": len(made.frame), "best": made.best.label}
    return PlanningCostResult(frame, facts), made


class _Clocks:
    """Adds wall and processor seconds of what runs inside it to spent[part]."""

    def __init__(self, spent: dict[str, dict[str, float]], part: str) -> None:
        self.spent, self.part = spent, part

    def __enter__(self) -> None:
        self.begin = time.perf_counter(), time.process_time()

    def __exit__(self, *_: Any) -> None:
        self.spent[self.part] = {"wall": time.perf_counter() - self.begin[0], "cpu": time.process_time() - self.begin[1]}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    import pandas as pd

    import loopscope
    from interventions import prefix_channels
    from probes import convergence, depth_lens

    parser = argparse.ArgumentParser(prog="python -m decoders.planning_cost", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", default=["tiny-huginn", "tiny-ouro"], help="names or checkpoint folders")
    for option, default, what in (("--prompts", 4, "prompts"), ("--tokens", 64, "new tokens of each"), ("--repeats", 5, "turns"),
                                  ("--seed", 0, "seed"), ("--threads", 1, "threads")):
        parser.add_argument(option, type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--task", default="maths", help="built-in prompts: maths or code")
    parser.add_argument("--out", help="folder for planning_cost.parquet")
    told = parser.parse_args(arguments)
    torch.set_num_threads(told.threads)
    results = []
    for source in told.models:
        core = loopscope.load(source, hooked=False)
        prompts = loopscope.prompts(told.task, told.prompts, told.seed)
        common = {"seed": told.seed, "progress": False}
        findings = {"convergence": convergence(core, prompts, nulls=("none",), **common), "depth_lens": depth_lens(core, prompts, **common),
                    "prefix_channels": prefix_channels(core, prompts, controls=(), new_tokens=32, max_positions=24, **common)}
        result, plan = planning_cost(core, prompts, told.tokens, findings, calibrate(core, seconds=6.0, seed=told.seed),
                                     repeats=told.repeats, seed=told.seed)
        results.append(result)
        print(f"{core.source}: {len(plan.frame)} schedules on {told.prompts} {told.task} prompts of {told.tokens} new tokens; best "
              f"{plan.best.label}, {int(plan.frame.exact_calls.sum())} of them replayed exactly", flush=True)
    together = PlanningCostResult(pd.concat([r.frame for r in results], ignore_index=True), results[-1].meta)
    print(together.summary().round(3).to_string(index=False))
    print(f"ratio: (replay pass + planning) / one autoregressive generation of the same tokens; at most {LIMIT} is wanted")
    if told.out:
        together.save(told.out)


if __name__ == "__main__":
    main()
