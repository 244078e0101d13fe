"""Layer fixed points: whether every block of the loop settles at a point of its own, and how far apart those points lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.paths import BACK, LABELS, LEAST, labels, measure
from probes.recording import Recording

STATE_LAYER = -1  # the state, which belongs to the whole recurrence


@dataclass(frozen=True, eq=False)
class LayerFixedPointsResult(Result):
    """One row per prompt, core layer (-1: the state) and depth 1..T, averaged over positions."""

    kind = "layer_fixed_points"
    columns = ("model", "task", "prompt", "start", "layer", "depth", "step", "angle_degrees", "distance", "contraction", "fixed_point",
               "orbit", "slider", "period", "apart", "n_positions")


@torch.inference_mode()
def layer_fixed_points(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                       start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> LayerFixedPointsResult:
    """The path over depth of what each core block leaves, h_{l,1} .. h_{l,T}, and of the state (layer -1).

    A loop whose state is at rest still moves through its blocks: at rest, each block has a fixed point of its own, and
    the recurrence is a cycle through them. step, angle_degrees, distance, contraction, fixed_point, orbit and slider are
    those of `probes.trajectories` for one block's outputs, so that distance is the way to that block's own end. The path
    begins at depth 1, so names need 5 recurrences.

    period: of positions that orbit, how many recurrences ago (at least 2) the path was last as near to where it is now as
    that name asks; NaN where none orbits. apart: |h_{l,r} - h_{l',r'}| / |h_{l,r}| with l' the block that
    ran before l (for layer 0 the last block of recurrence r - 1: NaN at depth 1): how far a block's point lies from its
    predecessor's. Fixed points are distinct where distance goes to 0 and apart does not. HRM-Text: the slow stack's blocks.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: Blayney et al. 2026 (A Mechanistic
    Analysis of Looped Reasoning Language Models, arXiv 2604.11791); the rule for names is ours.
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a path")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rounding = 100 * torch.finfo(core.dtype).eps
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"layer fixed points {name}", unit="prompt", disable=not progress)):
        recorded = Recording(core, ids, ("hook_resid_post",), depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        layers = [recorded.stack("hook_resid_post", layer).double() for layer in range(core.config.n_core)]
        for layer, path in [*enumerate(layers), (STATE_LAYER, recorded.states().double())]:
            before = apart(layers, layer) if layer != STATE_LAYER else [float("nan")] * depth
            for r, values in enumerate(measure(path, rounding), start=1):
                rows.append((name, task, index, start, layer, r, *values, period(path[:r], rounding), before[r - 1], len(ids)))
    frame = pd.DataFrame(rows, columns=list(LayerFixedPointsResult.columns))
    return LayerFixedPointsResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens)})


def apart(layers: list[Tensor], layer: int) -> list[float]:
    """layers: one [depth, n, d] each -> at each depth the distance of one block's output to that of the block that ran before it."""
    own = layers[layer]
    before = layers[layer - 1] if layer else torch.cat((torch.full_like(own[:1], torch.nan), layers[-1][:-1]))
    return ((own - before).norm(dim=-1) / own.norm(dim=-1)).mean(-1).tolist()


def period(path: Tensor, rounding: float) -> float:
    """path [r, n, d] -> recurrences since the path was last where it is, a mean over positions that orbit; NaN without any."""
    if len(path) <= LEAST:
        return float("nan")
    orbits = labels(path, rounding) == LABELS.index("orbit")
    half = path[(len(path) - 1) // 2 :]
    near = (half[:-2] - half[-1]).norm(dim=-1) <= BACK * half.diff(dim=0).norm(dim=-1).mean(0)  # as `labels` asks it
    places = torch.arange(len(near), device=near.device)[:, None]
    back = len(half) - 1 - (places * near).amax(0)  # the latest return: multiples of a period come back too
    return float(back[orbits].double().mean()) if bool(orbits.any()) else float("nan")
