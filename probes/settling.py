"""Convergence: how far Q, K, V, the attention output and the state are from their full-depth values at each depth.

Notable: the three nulls. A contraction converges whatever it computes (random weights); a shared offset makes any two
vectors look alike (token mean removed); and Q, K and V are linear maps of one normed state, so they settle together
(random map). Only a gap beyond the last null says something about a channel. docs/algorithms.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result
from probes.distance import cosine, relative_l2
from probes.inputs import check_finite, check_names, chosen, core_of, name_of, read_prompts, start_label
from probes.nulls import apply_channel, channel_weights, generator, random_map, random_weight_model
from probes.recording import Recording

if TYPE_CHECKING:
    from loopscope.models.layers import Block
    from loopscope.models.looped import LoopedCore

NULLS = ("none", "token_mean_removed", "random_weights", "random_map")
CHANNELS = ("q", "k", "v", "attn_out", "state")
METRICS = {"cosine": cosine, "rel_l2": relative_l2}
STATE_LAYER = -1  # the state belongs to the whole recurrence, not to one layer


@dataclass(frozen=True, eq=False)
class ConvergenceResult(Result):
    """One row per prompt, null, channel, layer, depth and metric; `value` is averaged over positions and heads."""

    kind = "convergence"
    columns = ("model", "task", "prompt", "start", "null", "channel", "layer", "depth", "metric", "value", "n_positions")


@torch.inference_mode()
def convergence(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                start_state: str | Tensor | None = None, seed: int = 0, nulls: Iterable[str] = NULLS, rotated: bool = False,
                only: Container[int] | None = None, each: Callable[[int, Mapping[str, list]], None] | None = None,
                progress: bool = True) -> ConvergenceResult:
    """Cosine and relative L2 of X^r to X^T for X in Q, K, V, attention output and state, by layer and depth r = 1..T.

    model: LoopedCore or LoopedModel. prompts: texts or token ids, at least 2 tokens each. depth: T (default: the
    model's own). Each distance is taken per position and head and then averaged, one row per prompt; attention output
    and state have no heads, the state has layer -1. The attention output is what the block adds to its stream (Ouro:
    after its norm). Q and K are taken before the rotary embedding, or after it with `rotated`; it is a rotation, so
    their distances do not change.

    nulls ("none" is the measurement itself):
      token_mean_removed  the prompt's mean over positions is subtracted at each depth before comparing;
      random_weights      a model whose weight matrices are permuted entry by entry (probes.nulls.random_weight_model);
      random_map          for Q, K, V: the same normed states through a random matrix with the channel's own singular
                          values (bias and heads as in the original), one draw per layer and channel.

    only: measure these prompts (by index; default: all), as one of several processes that share a run does. each: called with a
    prompt's index and {table: its rows} as soon as it is measured.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: algorithms.md 3 (Convergence).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    nulls = check_names(nulls, NULLS, "null")
    tokens = read_prompts(core, prompts, 2, "removing the token mean")
    name, start = name_of(core, model_name), start_label(core, start_state)
    null_core = random_weight_model(core, seed) if "random_weights" in nulls else None
    maps = _random_maps(core, seed) if "random_map" in nulls else {}
    rows: list[tuple] = []
    for index in tqdm(chosen(tokens, only), desc=f"convergence {name}", unit="prompt", disable=not progress):
        ids, found = tokens[index], []
        settings = {"depth": depth, "start_state": start_state, "seed": seed}
        recorded = _record(core, ids, rotated, **settings)
        sources: list[tuple[str, Iterator]] = []
        if "none" in nulls:
            sources.append(("none", channels(core, recorded, rotated)))
        if "token_mean_removed" in nulls:
            centred = ((c, layer, x - x.mean(1, keepdim=True)) for c, layer, x in channels(core, recorded, rotated))
            sources.append(("token_mean_removed", centred))
        if null_core is not None:
            sources.append(("random_weights", channels(null_core, _record(null_core, ids, rotated, **settings), rotated)))
        if maps:
            sources.append(("random_map", _mapped(core, recorded, maps)))
        for null, source in sources:
            for channel, layer, values in source:
                for metric, measured in distances(values).items():
                    found += [(name, task, index, start, null, channel, layer, r, metric, value, len(ids))
                              for r, value in enumerate(measured, start=1)]
        rows += found
        if each is not None:
            each(index, {ConvergenceResult.kind: found})
    frame = pd.DataFrame(rows, columns=list(ConvergenceResult.columns))
    return ConvergenceResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens), "rotated": rotated})


def distances(values: Tensor) -> dict[str, list[float]]:
    """values [depth, positions, ..., d] -> metric -> one number per depth, the mean over positions and heads."""
    return {metric: f(values, values[-1:]).flatten(1).mean(1).tolist() for metric, f in METRICS.items()}


def _record(core: LoopedCore, ids: Tensor, rotated: bool, **settings) -> Recording:
    rot = "rot_" if rotated else ""
    names = (f"attn.hook_{rot}q", f"attn.hook_{rot}k", "attn.hook_v", "hook_attn_out", "hook_resid_pre")
    recorded = Recording(core, ids, names, **settings)
    check_finite(recorded.logits, "a full-depth pass")
    return recorded


def channels(core: LoopedCore, recorded: Recording, rotated: bool = False) -> Iterator[tuple[str, int, Tensor]]:
    """(channel, layer, values [depth, positions, (heads,) d] in float64), one channel of one layer at a time."""
    rot = "rot_" if rotated else ""
    names = {"q": f"attn.hook_{rot}q", "k": f"attn.hook_{rot}k", "v": "attn.hook_v", "attn_out": "hook_attn_out"}
    for layer in range(core.config.n_core):
        for channel, hook in names.items():
            yield channel, layer, recorded.stack(hook, layer).double()
    yield "state", STATE_LAYER, recorded.states().double()


def normed_states(core: LoopedCore, recorded: Recording, layer: int) -> Tensor:
    """What a layer's Q, K and V are maps of: [depth, positions, d_model]."""
    return cast("Block", core.blocks[layer]).attention_input(recorded.stack("hook_resid_pre", layer))


def _random_maps(core: LoopedCore, seed: int) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    return {(channel, layer): (random_map(weight, generator(seed, "map", layer, channel)), bias)
            for layer, block in enumerate(core.blocks)
            for channel, (weight, bias) in channel_weights(cast("Block", block).attn).items()}


def _mapped(core: LoopedCore, recorded: Recording, maps: dict) -> Iterator[tuple[str, int, Tensor]]:
    for layer in range(core.config.n_core):
        normed = normed_states(core, recorded, layer)
        for channel in "qkv":
            yield channel, layer, apply_channel(normed, *maps[channel, layer])
