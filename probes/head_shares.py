"""Head attribution: direct logit attribution carried one step further, from each attention to its heads.

An attention's output is a sum over heads once what acts on all of them together is held: a gate, and the norms behind
it. So a head's contribution is its part of that sum times the covector on what the attention adds (probes/frozen.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.hook_names import block_prefix
from loopscope.models.dory import DoryAttention, DoryBlock
from loopscope.models.hrm_text import HrmTextAttention
from loopscope.models.layers import BranchSandwichBlock, PostNormBlock
from loopscope.records import Result
from probes.direct import check_sum, explain, read_explained
from probes.frozen import FrozenRun, l2_factor, rms_factor
from probes.inputs import core_of, name_of, start_label

_Z = "attn.hook_z"


@dataclass(frozen=True, eq=False)
class HeadAttributionResult(Result):
    """One row per prompt and attention head; those of an attention add up to its row in the `attribution` table."""

    kind = "head_attribution"
    columns = ("model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "head", "value_logits", "logit",
               "n_positions")


@torch.inference_mode()
def head_attribution(model: Any, prompts: Iterable[Any], *, target: str | int = "next", against: str | int | None = None,
                     positions: str = "all", task: str = "", model_name: str | None = None, depth: int | None = None,
                     start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> HeadAttributionResult:
    """What each attention head, at each depth, adds to a token's logit by its direct path.

    Arguments as for `probes.attribution`, whose attention rows are split here: the heads' values of one attention add up
    to its value, which is checked for every one. Held at the run's values, besides the norm scales of `attribution`: the
    scale of a norm on the attention's output (Ouro, OLMo 2, Dory), and the gates on what is read (HRM-Text, Dory).

    Raises PromptError, DepthError, ContextError, SettingError, and NumericsError where heads do not add up.
    Source: direct logit attribution of heads (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_explained(core, prompts, target, against, positions)
    name, start = name_of(core, model_name), start_label(core, start_state)
    blocks: dict[str, Any] = {"prelude": core.prelude, "core": core.blocks, "coda": core.coda, "inner": getattr(core, "low", ())}
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"head attribution {name}", unit="prompt", disable=not progress)):
        run = FrozenRun(core, ids, depth, start_state=start_state, seed=seed, also=(_Z,))
        found = explain(run, ids, target, against, positions)
        whole = {(s.part, s.depth, s.cycle, s.layer): s.value for s in found.shares if s.branch == "attn"}
        labels = (name, task, index, start, str(target), "" if against is None else str(against))
        logit = float(found.logit[found.kept].mean())
        for key, onto in run.onto.items():
            part, r, cycle, layer = key
            prefix = block_prefix("blocks" if part in ("core", "inner") else part, layer, r, cycle)
            outputs = head_outputs(blocks[part][layer], run.at(prefix + "hook_resid_pre"), run.at(prefix + _Z))
            values = torch.einsum("nhd,nd->hn", outputs, onto)
            check_sum(values, whole[key], core.dtype, f"what attention {layer} of {part} adds at depth {r}")
            means = values[:, found.kept].mean(1).tolist()
            rows += [(*labels, *key, head, value, logit, found.averaged) for head, value in enumerate(means)]
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens), "target": target, "against": against, "positions": positions}
    return HeadAttributionResult(pd.DataFrame(rows, columns=list(HeadAttributionResult.columns)), meta)


def head_outputs(block: Any, pre: Tensor, z: Tensor) -> Tensor:
    """pre [n, d], a block's input, z [n, heads, d_head], what its heads read -> [n, heads, d]: their parts of what its attention adds."""
    attn = block.attn
    if isinstance(attn, (DoryAttention, HrmTextAttention)):
        x = block.attention_input(pre.to(attn.out.weight.dtype))
        if isinstance(attn, HrmTextAttention):
            gate = torch.sigmoid(attn.gqkv(x)[..., : attn.width])
        else:
            gate = torch.sigmoid(attn.gate(x) * (attn.s_gate * attn.gate_scale).square())
        flat = z.flatten(-2) * gate.double()
        z = (flat * l2_factor(flat) if isinstance(attn, DoryAttention) else flat).view_as(z)
    weight = attn.out.weight.double().unflatten(1, z.shape[1:])  # [d, heads, d_head]
    parts = torch.einsum("nhe,dhe->nhd", z, weight)
    whole = parts.sum(1)
    if isinstance(block, BranchSandwichBlock):
        return parts * rms_factor(block.norm_2, whole)[:, None]
    if isinstance(block, PostNormBlock):
        return parts * rms_factor(block.norm_1, whole)[:, None]
    if isinstance(block, DoryBlock):
        return parts * ((block.lambda_1.double() * block.scale).abs() * l2_factor(whole))[:, None]
    return parts
