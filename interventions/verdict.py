"""Does Mature-V hold? One verdict per model, task and start state, in numbers and in one sentence.

Mature-V (DAS, arXiv 2609.34538) is the claim that a shallow draft does better when it reads the verified prefix's values
at full depth. It is a property of a model and its data, not a law, so the answer is read off one cell chosen beforehand:
the shallowest draft right behind the prefix, where the claim should show most. Other cells are counted, not searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interventions.effects import NOISE, EffectsResult
from loopscope.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

_CEILING = 0.97  # aligned agreement from which little is left to gain
_FEW = 6  # below this a sign test cannot reach 5 %, whatever the bootstrap says
HELPS, HURTS, UNCLEAR = "helps", "hurts", "no clear effect"


@dataclass(frozen=True)
class Verdict:
    """Effect of mature V on top-1 agreement (a share of positions) in one cell, and what it means.

    verdict: "helps" if the interval lies above 0, "hurts" if below (by more than rounding), else "no clear effect".
    kl_effect, kl_low, kl_high: the change in KL, nats. aligned: the aligned draft's own agreement (None where unknown).
    helps_at, hurts_at, cells: how many (depth, lag) cells of the table say so. control, control_effect: the control that did
    best in the same cell (None without controls); specific: whether mature V clearly beat it (its interval lies above the
    control's interval, which is stricter than a paired comparison).
    """

    model: str
    task: str
    start: str
    depth: int
    lag: int
    verdict: str
    effect: float
    low: float
    high: float
    n_prompts: int
    kl_effect: float
    kl_low: float
    kl_high: float
    aligned: float | None
    helps_at: int
    hurts_at: int
    cells: int
    control: str | None
    control_effect: float | None
    specific: bool | None
    sentence: str


def mature_v_verdict(effects: EffectsResult | pd.DataFrame, *, depth: int | None = None, lag: int | None = None) -> list[Verdict]:
    """One Verdict per model, task and start in a prefix_effects table; depth and lag default to the smallest there."""
    frame = effects.frame if isinstance(effects, EffectsResult) else effects
    deep_v = frame[frame.policy == "deep_v"]
    return [_judge(key, group, depth, lag) for key, group in deep_v.groupby(["model", "task", "start"], sort=False, dropna=False)]


def _judge(key: tuple, group: pd.DataFrame, depth: int | None, lag: int | None) -> Verdict:
    import pandas as pd

    agreement = group[group.metric == "agreement"]
    real = agreement[agreement.control == "none"]
    depth = int(real.depth.min()) if depth is None else depth
    lag = int(real.lag.min()) if lag is None else lag
    cell = _row(real, depth, lag)
    kl = _row(group[(group.metric == "kl_nats") & (group.control == "none")], depth, lag)
    controls = agreement[(agreement.control != "none") & (agreement.depth == depth) & (agreement.lag == lag)]
    best = controls.loc[controls.effect.idxmax()] if len(controls) else None
    verdict = HELPS if cell.low > NOISE else HURTS if cell.high < -NOISE else UNCLEAR
    facts = dict(zip(("model", "task", "start"), key)) | {
        "depth": depth, "lag": lag, "verdict": verdict, "effect": float(cell.effect), "low": float(cell.low),
        "high": float(cell.high), "n_prompts": int(cell.n_prompts), "kl_effect": float(kl.effect), "kl_low": float(kl.low),
        "kl_high": float(kl.high), "aligned": None if pd.isna(cell.get("aligned")) else float(cell["aligned"]),
        "helps_at": int((real.low > NOISE).sum()), "hurts_at": int((real.high < -NOISE).sum()), "cells": len(real),
        "control": None if best is None else str(best.control), "control_effect": None if best is None else float(best.effect),
        "specific": None if best is None else bool(cell.low > best.high + NOISE)}
    return Verdict(**facts, sentence=_sentence(facts))


def _row(frame: pd.DataFrame, depth: int, lag: int):
    found = frame[(frame.depth == depth) & (frame.lag == lag)]
    if found.empty:
        raise SettingError(f"the effects have no mature-V row at draft depth {depth}, lag {lag}")
    return found.iloc[0]


def _sentence(f: dict) -> str:
    where = f"{f['model']}{', ' + f['task'] if f['task'] else ''} ({f['start']} start)"
    kind = {HELPS: "Mature-V holds", HURTS: "Mature-V does harm", UNCLEAR: "Mature-V shows no clear effect"}[f["verdict"]]
    if f["n_prompts"] < 2:
        size = f"one prompt gives no interval (change in agreement {100 * f['effect']:+.1f} points)"
    else:
        size = (f"reading the prefix's values at full depth changes a depth-{f['depth']} draft's agreement with the full model by "
                f"{100 * f['effect']:+.1f} points [{100 * f['low']:+.1f}, {100 * f['high']:+.1f}] over {f['n_prompts']} prompts")
    if 2 <= f["n_prompts"] < _FEW:
        size += " (an interval over so few prompts is too narrow)"
    if f["n_prompts"] >= 2:
        size += f", and its KL divergence from it by {f['kl_effect']:+.3f} nats [{f['kl_low']:+.3f}, {f['kl_high']:+.3f}] (lower is nearer)"
    if f["aligned"] is not None and f["aligned"] >= _CEILING:
        size += f"; the aligned draft already agrees {100 * f['aligned']:.1f} % of the time, so little could change for the better"
    text = f"{where}: {kind}: {size}; of {f['cells']} depths and lags it helps at {f['helps_at']} and hurts at {f['hurts_at']}"
    if f["control"] is not None and f["verdict"] == HELPS:
        names = {"shuffled_v": "shuffled values", "other_prompt_v": "another prompt's values", "noise_v": "noise of the same size"}
        text += (f"; the best wrong values ({names[f['control']]}) change it by {100 * f['control_effect']:+.1f} points"
                 + ("" if f["specific"] else ", so the gain is not shown to come from the values being the right ones"))
    return text + "."
