"""Why a plan's winner wins, in one sentence of numbers from the tables it was made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from decoders.agreements import Agreements
from decoders.autoregressive import Autoregressive
from decoders.decoder import Decoder
from decoders.predict import Prediction
from decoders.priced import Played

if TYPE_CHECKING:
    import pandas as pd

    from probes.replay import ReplayResult

ROUGH = 0.25  # scatter of call times above which seconds are called rough
_DEEP = {"deep_v": "deep V", "deep_k": "deep K", "deep_kv": "deep K/V"}


def evidence(best: Decoder, rivals: Sequence[str], predicted: Mapping[str, Prediction], found: Agreements, depth: int,
             played: Mapping[str, Played], replay: ReplayResult | None, convergence: pd.DataFrame | None, label: str,
             speedup: tuple[float, float] = (math.nan, math.nan), scatter: float = 0.0) -> str:
    """The sentence. convergence: that table, for what a winner that reads deeper stands on; label: what the plan is called.

    speedup: its 95 % interval (nan: none); scatter: by how much call times differed from round to round (Calibration.scatter).
    """
    rough = ""
    if scatter > ROUGH:
        rough = f"; call times scattered by {100 * scatter:.0f} % while they were measured, so seconds are rough"
    p, ar = predicted[best.label], predicted["AR"]
    against = next((label for label in rivals if label != "AR"), None)
    if isinstance(best, Autoregressive):
        reason = "no draft was measured"
        if against:
            reason = (f"the best other, {against}, would need {predicted[against].calls_per_token:.2f} block calls per token instead of "
                      f"{depth}, but ones that cost more than they save")
        return f"The {label} is AR: {reason}{rough}."
    d = getattr(best, "draft_depth", getattr(best, "updates", 1))
    policy = getattr(best, "read", "aligned")
    right = found.agreement(policy, d, 1)
    how = f"{p.accepted:.1f} drafts are accepted per check"
    if right is not None:
        n = found.positions(policy, d, 1)
        how = (f"a draft after {d} of {depth} recurrences ({policy.replace('_', ' ')} reads) already names the full-depth token "
               f"at {right:.0%} of {n} position{'' if n == 1 else 's'}")
    settled = settle_depth(replay) if replay is not None and getattr(best, "redraft", None) is not None else None
    if settled is not None:
        how += f", and one that is read again as it deepens is final after {settled:.1f} on average"
    exact = best.label in played and played[best.label].exact
    text = f"The {label} is {best.label}: {how}"
    lift = channels(policy, d, found, convergence)
    if lift:
        text += f" ({lift})"
    text += f", so a token costs {p.calls_per_token:.2f} block calls instead of {ar.calls_per_token:.0f}"
    if exact:
        texts = len(played[best.label].tokens)
        text += f", replayed exactly on {texts} text{'s' if texts > 1 else ''}"
    if against:
        calls = predicted[against].calls_per_token
        text += f" ({against} would need {calls:.2f}{', but dearer ones' if calls < p.calls_per_token else ''})"
    low, high = speedup
    between = "" if math.isnan(low) else f" (95 % interval {low:.2f} to {high:.2f})"
    times = ar.seconds_per_token / p.seconds_per_token
    return f"{text}; by the call times of this machine that is {times:.2f}x the speed of AR{between}{rough}."


def channels(policy: str, d: int, found: Agreements, convergence: pd.DataFrame | None) -> str:
    """What a deep read stands on: how far keys and values at depth d are from mature, and what reading them deep does to agreement.

    Empty for aligned reads, and where nothing was measured.
    """
    aligned, deep = found.agreement("aligned", d, 1), found.agreement(policy, d, 1)
    if policy == "aligned" or aligned is None or deep is None:
        return ""
    name, before, after = _DEEP[policy], _share(aligned), _share(deep)
    others = [(_DEEP[other], _share(a)) for other in _DEEP if other != policy and (a := found.agreement(other, d, 1)) is not None]
    if {after, *(share for _, share in others)} == {before}:
        text = f"agreement is {before} whichever is read"
    elif after == before:
        text = f"{name} leaves agreement at {before}"
    elif deep > aligned:
        text = f"{name} lifts agreement from {before} to {after}"
    else:
        text = f"{name} does not lift agreement, which falls from {before} to {after}"
    if others and "whichever" not in text:
        text += ", " + " and ".join(f"{other} {'takes it ' if after == before else ''}to {share}" for other, share in others)
    cosines = _cosines(convergence, d)
    if cosines:
        text = f"V at depth {d} has cosine {_share(cosines['v'])} to mature, K {_share(cosines['k'])}: {text}"
    return text


def _cosines(convergence: Any, d: int) -> dict[str, float]:
    """Cosine of K and V at depth d to those at full depth, over layers and prompts."""
    if convergence is None or not len(convergence):
        return {}
    t = convergence
    t = t[(t["null"] == "none") & (t["metric"] == "cosine") & (t["depth"] == d) & t["channel"].isin(["k", "v"])]
    means = t.groupby("channel", observed=True)["value"].mean()
    return means.to_dict() if {"k", "v"} <= set(means.index) else {}


def _share(x: float) -> str:
    """.57, as the papers print it."""
    return f"{x:.2f}".removeprefix("0") if x < 0.995 else f"{x:.2f}"


def settle_depth(replay: ReplayResult) -> float | None:
    """Mean over the drafts of a replay of the first depth from which the top token never changes; None without drafts."""
    from probes.lens import settle_depths

    depths = [settle_depths(text.drafts).double() for text in replay.prompts() if text.lanes]
    total = sum(len(d) for d in depths)
    return float(sum(d.sum() for d in depths)) / total if total else None
