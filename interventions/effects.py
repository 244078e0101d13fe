"""Paired effects: what a read policy changes against the aligned read of the same prompts, with bootstrap intervals.

The unit is the prompt, never the token: positions of one prompt are not independent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_GROUP = ["model", "task", "start", "depth", "lag"]
NOISE = 1e-9  # a share or nats; what float32 sums in another order differ by is no effect
BETTER = {"agreement": 1, "kl_nats": -1}  # the sign of an improvement


@dataclass(frozen=True, eq=False)
class EffectsResult(Result):
    """One row per model, task, start, depth, lag, policy, control and metric: the paired mean difference to aligned.

    low, high: bootstrap interval over n_prompts prompts (NaN for a single prompt). holds: it excludes 0 on the good side
    (agreement up, KL down). A further column, aligned: the aligned draft's own mean, what the effect is added to.
    """

    kind = "prefix_effects"
    columns = ("model", "task", "start", "depth", "lag", "policy", "control", "metric", "effect", "low", "high", "n_prompts", "holds")


def paired_effects(frame: pd.DataFrame, *, level: float = 0.95, resamples: int = 2000, seed: int = 0,
                   meta: Mapping[str, Any] | None = None) -> EffectsResult:
    """Paired differences to the aligned policy, from a prefix_channels table (of one or more models, tasks and starts).

    Intervals are BCa, or percentile where BCa is undefined (see bootstrap_mean). Raises SettingError if a group has no
    aligned rows to compare with.
    """
    import pandas as pd

    rows = []
    for key, group in frame.groupby(_GROUP, sort=False, dropna=False):
        aligned = group[(group.policy == "aligned") & (group.control == "none")].set_index("prompt")
        if aligned.empty:
            raise SettingError("effects are differences to the aligned policy, which this table lacks; add 'aligned' to policies")
        for (policy, control), cell in group[group.policy != "aligned"].groupby(["policy", "control"], sort=False):
            cell = cell.set_index("prompt")
            for metric, sign in BETTER.items():
                difference = (cell[metric] - aligned[metric]).dropna().sort_index().to_numpy()
                effect, low, high = (beyond_noise(x) for x in bootstrap_mean(difference, level, resamples, seed))
                holds = bool(low > 0 if sign > 0 else high < 0)
                rows.append((*key, policy, control, metric, effect, low, high, len(difference), holds, float(aligned[metric].mean())))
    result = pd.DataFrame(rows, columns=[*EffectsResult.columns, "aligned"])
    return EffectsResult(result, {**dict(meta or {}), "level": level, "resamples": resamples, "interval": "BCa over prompts"})


def beyond_noise(value: float) -> float:
    """The value, or 0 where it is a rounding error: an interval that ends there does not exclude 0."""
    return 0.0 if abs(value) < NOISE else value


def bootstrap_mean(sample: np.ndarray, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) of a sample [n].

    BCa (scipy.stats.bootstrap); percentile where BCa has no acceleration or bias to correct by. A single observation has
    no interval (NaN); a sample of equal numbers has one of no width.
    """
    import numpy as np
    from scipy import stats

    sample = np.asarray(sample, dtype=float)
    if len(sample) == 0:
        return math.nan, math.nan, math.nan
    mean = float(sample.mean())
    if len(sample) == 1:
        return mean, math.nan, math.nan
    if np.ptp(sample) == 0:
        return mean, mean, mean
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns about exactly the case that falls through to percentile
            interval = stats.bootstrap((sample,), np.mean, confidence_level=level, n_resamples=resamples, method=method,
                                       rng=np.random.default_rng(seed)).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            break
    return mean, float(interval.low), float(interval.high)
