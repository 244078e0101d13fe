"""Head stability: at which depth a head already looks where it will look at full depth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.hook_names import PATTERN
from loopscope.records import Result
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.recording import Recording


@dataclass(frozen=True, eq=False)
class HeadStabilityResult(Result):
    """One row per prompt, core layer, head and depth; `js_nats` is averaged over query positions."""

    kind = "head_stability"
    columns = ("model", "task", "prompt", "start", "layer", "head", "depth", "js_nats", "n_positions")


@torch.inference_mode()
def head_stability(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                   start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> HeadStabilityResult:
    """Jensen-Shannon divergence of each head's attention pattern at depth r = 1..T from its pattern at T, in nats, 0 to ln 2.

    model: LoopedCore or LoopedModel. prompts: texts or token ids, at least 2 tokens each. The first position is left
    out: it has one key to read, so that its pattern can never differ. HRM-Text: the slow stack's heads.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source of the divergence: Lin 1991
    (Divergence measures based on the Shannon entropy).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 2, "a pattern with a choice of keys")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"head stability {name}", unit="prompt", disable=not progress)):
        recorded = Recording(core, ids, (PATTERN,), depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        for layer in range(core.config.n_core):
            patterns = recorded.stack(PATTERN, layer).double()[:, :, 1:]  # [depth, heads, queries, keys]
            means = js_nats(patterns, patterns[-1:]).mean(-1)
            rows += [(name, task, index, start, layer, head, r, value, len(ids) - 1)
                     for head in range(means.shape[1]) for r, value in enumerate(means[:, head].tolist(), start=1)]
    frame = pd.DataFrame(rows, columns=list(HeadStabilityResult.columns))
    return HeadStabilityResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens)})


def js_nats(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions over the last axis: H((p + q) / 2) - (H(p) + H(q)) / 2, in nats."""
    def entropy(x: Tensor) -> Tensor:
        return torch.special.entr(x).sum(-1)

    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)
