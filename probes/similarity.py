"""Similarity of depths: linear CKA between the states of any two recurrences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.recording import Recording


@dataclass(frozen=True, eq=False)
class DepthSimilarityResult(Result):
    """One row per prompt and pair of depths, both orders and each with itself."""

    kind = "depth_similarity"
    columns = ("model", "task", "prompt", "start", "depth", "other_depth", "cka", "n_positions")


@torch.inference_mode()
def depth_similarity(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                     start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> DepthSimilarityResult:
    """Linear CKA of the states after r and after s recurrences, over a prompt's positions, r and s = 1..T.

    model: LoopedCore or LoopedModel. prompts: texts or token ids, at least 4 tokens each. CKA compares how positions lie
    to each other, whatever rotation, scale or shift (the same for all positions) lies between the two depths. A prompt
    has fewer positions than a state has channels, where the usual estimate is near 1 for unrelated states; this is the
    unbiased one: near 0 for unrelated states, and sometimes below. NaN where the states of a depth do not differ.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: Kornblith et al. 2019 (Similarity
    of Neural Network Representations Revisited), with the unbiased HSIC of Song et al. 2012 (Feature Selection via
    Dependence Maximization, equation 4), as in Nguyen et al. 2021 (Do Wide and Deep Networks Learn the Same Things?).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 4, "an unbiased estimate of how positions lie to each other")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"depth similarity {name}", unit="prompt", disable=not progress)):
        recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        values = cka(recorded.states().double()).tolist()
        rows += [(name, task, index, start, r, s, value, len(ids))
                 for r, line in enumerate(values, start=1) for s, value in enumerate(line, start=1)]
    frame = pd.DataFrame(rows, columns=list(DepthSimilarityResult.columns))
    return DepthSimilarityResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens)})


def cka(states: Tensor) -> Tensor:
    """states [depth, n, d], n >= 4 -> [depth, depth]: linear CKA of every pair, from the unbiased HSIC."""
    n = states.shape[1]
    states = states - states.mean(1, keepdim=True)  # changes nothing but rounding
    grams = states @ states.mT
    grams = grams - torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))
    sums = grams.sum(-1)  # [depth, n]
    whole = sums.sum(-1)
    flat = grams.flatten(1)
    hsic = flat @ flat.T + torch.outer(whole, whole) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (sums @ sums.T)
    own = hsic.diagonal()
    own = torch.where(own > 0, own, torch.nan).sqrt()
    return hsic / torch.outer(own, own)
