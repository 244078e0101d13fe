"""Trajectories: how the state moves over depth. Step sizes, turning angles, contraction, a path in two dimensions, and where it ends up."""

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

LABELS = ("fixed_point", "orbit", "slider")  # whatever is none of them wanders
LEAST = 4  # recurrences that a label needs
NEAR, BACK, STRAIGHT = 0.05, 0.6, 0.5


@dataclass(frozen=True, eq=False)
class TrajectoriesResult(Result):
    """One row per prompt and depth 0..T (0: the start state), averaged over positions; pc1 and pc2 are of the last position."""

    kind = "trajectories"
    columns = ("model", "task", "prompt", "start", "depth", "step", "angle_degrees", "distance", "contraction", "fixed_point", "orbit",
               "slider", "pc1", "pc2", "n_positions")


@torch.inference_mode()
def trajectories(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                 start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> TrajectoriesResult:
    """The path h_0 .. h_T of the state, position by position, with d_r = h_r - h_(r-1).

    step: |d_r| / |h_(r-1)|. angle_degrees: between d_r and d_(r-1); 0 goes straight on, 180 turns back. distance:
    |h_r - h_T| / |h_T|. contraction: |d_r| / |d_(r-1)|, a geometric mean over positions; below 1 the steps shrink.
    Angle and contraction leave out positions whose steps are down to rounding; NaN where none is left. pc1, pc2: the
    last position's h_r - h_T on the two main directions of all prompts' paths together, so that every path ends at the
    origin; `meta["explained"]` is the share of their squared length that each direction holds.

    fixed_point, orbit, slider: shares of positions whose path up to r, over its second half (w steps), is
      fixed_point  the way still to go, |d_r| q / (1 - q) if steps go on shrinking by their mean factor q, is below 5 %
                   of |h_r|, or the last step is down to rounding;
      orbit        else, the state is back within 0.6 mean steps of where it was 2 to w steps before;
      slider       else, it is at least half as far from where the half began as the way that it went.
    They need 4 recurrences (NaN before). The names are those of Geiping et al. 2025 (Scaling up Test-Time Compute with
    Latent Reasoning, section 7), the rule is ours.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError.
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a path")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    ends: list[Tensor] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"trajectories {name}", unit="prompt", disable=not progress)):
        recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        first = core.start(core.embed(core.as_tokens(ids)), seed=seed, start_state=start_state)[0, :, : core.config.d_model]
        states = torch.cat((first[None], recorded.states())).double()
        rounding = 100 * torch.finfo(core.dtype).eps
        rows += [(name, task, index, start, r, *values, len(ids)) for r, values in enumerate(measure(states, rounding))]
        ends.append(states[:, -1] - states[-1, -1])
    flat, explained = plane(torch.cat(ends))
    columns = [c for c in TrajectoriesResult.columns if c not in ("pc1", "pc2")]
    frame = pd.DataFrame(rows, columns=columns).assign(pc1=flat[:, 0].tolist(), pc2=flat[:, 1].tolist())
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens), "explained": explained}
    return TrajectoriesResult(frame[list(TrajectoriesResult.columns)], meta)


def measure(states: Tensor, rounding: float) -> list[tuple[float, ...]]:
    """states [T + 1, n, d] -> at each depth 0..T: step, angle, distance, contraction, and the shares of LABELS."""
    nan = float("nan")
    steps, sizes = states.diff(dim=0), states.norm(dim=-1)
    lengths = steps.norm(dim=-1)
    moving = lengths > rounding * sizes[1:]
    distance = ((states - states[-1]).norm(dim=-1) / sizes[-1]).mean(-1).tolist()
    found = []
    for r in range(len(states)):
        step = (lengths[r - 1] / sizes[r - 1])[sizes[r - 1] > 0] if r else lengths[:0]
        angle, contraction = nan, nan
        if r > 1 and bool((both := moving[r - 1] & moving[r - 2]).any()):
            cosine = torch.cosine_similarity(steps[r - 1][both], steps[r - 2][both], dim=-1).clamp(-1, 1)
            angle = float(torch.rad2deg(torch.arccos(cosine)).mean())
            contraction = float((lengths[r - 1] / lengths[r - 2])[both].log().mean().exp())
        kinds = labels(states[: r + 1], rounding) if r >= LEAST else None
        shares = [nan] * len(LABELS) if kinds is None else [float((kinds == i).double().mean()) for i in range(len(LABELS))]
        found.append((float(step.mean()) if step.numel() else nan, angle, distance[r], contraction, *shares))
    return found


def labels(states: Tensor, rounding: float) -> Tensor:
    """states [r + 1, n, d], r >= 2 -> [n]: index into LABELS of each position's path, len(LABELS) where it wanders."""
    last = states[-1]
    half = states[(len(states) - 1) // 2 :]
    lengths = half.diff(dim=0).norm(dim=-1)  # [w, n]
    w = len(lengths)
    end = lengths[-1]
    q = (end / lengths[0]).pow(1 / (w - 1))
    to_go = torch.where(q < 1, end * q / (1 - q), torch.inf)
    arrived = (to_go < NEAR * last.norm(dim=-1)) | (end <= rounding * last.norm(dim=-1))
    back = (half[: w - 1] - last).norm(dim=-1).amin(0) <= BACK * lengths.mean(0)
    straight = (last - half[0]).norm(dim=-1) >= STRAIGHT * lengths.sum(0)
    kinds = torch.full_like(end, len(LABELS), dtype=torch.long)
    for index, is_one in reversed(list(enumerate((arrived, back, straight)))):
        kinds[is_one] = index
    return kinds


def plane(points: Tensor) -> tuple[Tensor, list[float]]:
    """points [m, d] -> ([m, 2] on their two main directions through the origin, the share of squared length on each)."""
    _, values, directions = torch.linalg.svd(points, full_matrices=False)
    directions, values = directions[:2], values.square()
    strongest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(strongest < 0, -1.0, 1.0)  # a direction's sign means nothing: the same each time
    flat = torch.nn.functional.pad(points @ directions.T, (0, 2 - len(directions)))
    whole = float(values.sum())
    return flat, [float(v) / whole if whole else 0.0 for v in values[:2]]
