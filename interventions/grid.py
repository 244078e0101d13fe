"""Depth grid: one draft depth, the prefix's keys and values read at every pair of depths."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from interventions.drafts import anchors_of, compare, greedy_continuation, target_pass
from interventions.prefix import draft_depths_of
from loopscope.errors import DepthError
from loopscope.records import Result
from loopscope.rows import ReadPolicy
from probes.inputs import chosen, core_of, name_of, read_prompts, start_label


@dataclass(frozen=True, eq=False)
class DepthGridResult(Result):
    """One row per prompt and (key depth, value depth); averaged over the prompt's anchors."""

    kind = "depth_grid"
    columns = ("model", "task", "prompt", "start", "draft_depth", "k_depth", "v_depth", "agreement", "kl_nats", "n_positions")


@torch.inference_mode()
def depth_grid(model: Any, prompts: Iterable[Any], draft_depth: int = 2, depths: Iterable[int] | None = None, *, task: str = "",
               model_name: str | None = None, depth: int | None = None, start_state: str | Tensor | None = None, seed: int = 0,
               new_tokens: int = 0, max_positions: int = 96, only: Container[int] | None = None,
               each: Callable[[int, Mapping[str, list]], None] | None = None, progress: bool = True) -> DepthGridResult:
    """Agreement and KL of a draft right behind the prefix (lag 1), its prefix read at (kappa, nu) for all pairs of `depths`.

    draft_depth: recurrences of the draft. depths: what kappa and nu run over (default: powers of two up to T, and T).
    Every recurrence of the draft reads the same kappa and nu, so for draft_depth 1 the cell (1, 1) is the aligned read;
    a deeper aligned draft moves along the diagonal and is no cell. (T, T) is deep K/V. Other arguments, columns and
    errors as in prefix_channels.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: algorithms.md 3.
    """
    import pandas as pd

    core = core_of(model)
    full = core.check_depth(depth)
    if core.check_depth(draft_depth) > full:
        raise DepthError(f"draft depth {draft_depth} is beyond full depth {full}")
    grid = grid_depths(full) if depths is None else draft_depths_of(depths, full)
    tokens = read_prompts(core, prompts, 2, "a draft behind one verified token")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index in tqdm(chosen(tokens, only), desc=f"depth grid {name}", unit="prompt", disable=not progress):
        ids, found = tokens[index], []
        whole = greedy_continuation(core, ids, new_tokens, full, start_state, seed)
        target = target_pass(core, whole, full, start_state, seed)
        anchors = anchors_of(target.length, 1, max_positions, len(ids) if new_tokens else 1)
        for k in grid:
            for v in grid:
                pair = compare(core, target, anchors, (draft_depth,), (1,), ReadPolicy(k, v))[draft_depth, 1]
                found.append((name, task, index, start, draft_depth, k, v, *pair, len(anchors)))
        rows += found
        if each is not None:
            each(index, {DepthGridResult.kind: found})
    frame = pd.DataFrame(rows, columns=list(DepthGridResult.columns))
    return DepthGridResult(frame, {"depth": full, "seed": seed, "prompts": len(tokens), "new_tokens": new_tokens,
                                   "max_positions": max_positions})


def grid_depths(full: int) -> tuple[int, ...]:
    """1, 2, 4, .. below T, and T."""
    return (*(2**i for i in range(full.bit_length()) if 2**i < full), full)
