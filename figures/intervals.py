"""Means with 95 % bootstrap intervals over prompts (never over tokens): scipy.stats.bootstrap, BCa, seeded.

One prompt is one observation: whatever a prompt holds (layers, repeats, positions) is averaged inside it first. One prompt
alone has no interval (NaN); prompts that all agree have an interval of zero width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2000
CONFIDENCE = 0.95
DAGGER = "\u2020"  # behind an interval over fewer than FEW prompts
FEW = 5  # prompts; resampling fewer says little about how prompts differ, and an interval over them is marked as such


def bootstrap(samples: np.ndarray, statistic: Callable | None = None, resamples: int = RESAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each [cells], for samples [cells, prompts] or, with a statistic of two, ([cells, prompts], [cells, prompts]).

    BCa, or percentile where BCa is undefined (every prompt agrees). NaN where there is a single prompt.
    """
    from scipy import stats

    data = samples if isinstance(samples, tuple) else (np.asarray(samples, dtype=float),)
    cells, prompts = data[0].shape
    if prompts < 2:
        return np.full(cells, np.nan), np.full(cells, np.nan)
    low = high = np.full(cells, np.nan)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore")  # scipy warns of exactly the cells that fall through to percentile
            found = stats.bootstrap(
                data,
                statistic or _mean,
                axis=-1,
                vectorized=True,
                paired=len(data) > 1,
                method=method,
                n_resamples=resamples,
                confidence_level=CONFIDENCE,
                rng=np.random.default_rng(0),
                batch=max(1, 2_000_000 // (cells * prompts)),
            ).confidence_interval
        missing = ~(np.isfinite(low) & np.isfinite(high))
        low, high = np.where(missing, found.low, low), np.where(missing, found.high, high)
        if np.isfinite(low).all() and np.isfinite(high).all():
            break
    return low, high


def table(frame: pd.DataFrame, by: Sequence[str], value: str, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Columns `by`, mean, low, high, n: the mean of `value` over prompts and its interval, for every combination of `by`.

    resamples=0 leaves the intervals out (NaN)."""
    import pandas as pd

    by = list(by)
    prompts = _prompt_means(frame, by, [value])
    rows = []
    for cell, part in _cells(prompts, by):
        rows.append((cell, part[value].to_numpy(float)))
    out = pd.DataFrame([cell for cell, _ in rows], columns=by)
    low, high = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for n in {len(v) for _, v in rows} if resamples else ():  # cells with equally many prompts are resampled in one call
        which = [i for i, (_, v) in enumerate(rows) if len(v) == n]
        low[which], high[which] = bootstrap(np.stack([rows[i][1] for i in which]), resamples=resamples)
    return out.assign(mean=[v.mean() for _, v in rows], low=low, high=high, n=[len(v) for _, v in rows])


def ratio_table(frame: pd.DataFrame, by: Sequence[str], above: str, below: str) -> pd.DataFrame:
    """As `table`, for sum(above) / sum(below) over prompts: the pooled rate, its interval still over prompts."""
    import pandas as pd

    by = list(by)
    prompts = _prompt_means(frame, by, [above, below], how="sum")
    rows = []
    for cell, part in _cells(prompts, by):
        a, b = part[above].to_numpy(float), part[below].to_numpy(float)
        low, high = ratio_bounds(a[None], b[None])
        total = b.sum()
        rows.append((*cell, a.sum() / total if total else np.nan, low[0], high[0], len(a), total))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "n", "total"])


def ratio_bounds(above: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each [cells], of sum(above) / sum(below) over prompts, for arrays [cells, prompts] of equal shape."""
    return bootstrap((above, below), _ratio)


def paired(frame: pd.DataFrame, keys: Sequence[str], value: str, baseline: pd.Series) -> pd.DataFrame:
    """`frame` with column `difference` = value - the baseline row's value at the same `keys` (the design is paired: same
    positions, same prompts). `baseline` is a boolean mask over the rows."""
    keys = list(keys)
    base = frame[baseline].groupby(keys, observed=True)[value].mean().rename("_base")
    joined = frame.join(base, on=keys)
    return joined.assign(difference=joined[value] - joined["_base"]).drop(columns="_base").dropna(subset=["difference"])


def words(low: float, high: float, n: float, shown: str = "{:.2f}") -> str:
    """'[2.41, 3.24]', with a dagger where fewer than FEW prompts stand behind it; '' where there is no interval."""
    return "" if low != low else f"[{shown.format(low)}, {shown.format(high)}]" + DAGGER * bool(n < FEW)


def _prompt_means(frame, by: list[str], values: list[str], how: str = "mean"):
    unit = [c for c in ("task", "prompt") if c in frame.columns and c not in by]  # a prompt's number is only unique inside its task
    groups = frame.dropna(subset=values).groupby(by + unit, observed=True, sort=True)[values]
    return (groups.mean() if how == "mean" else groups.sum()).reset_index()


def _cells(prompts, by: list[str]):
    if not by:
        return [((), prompts)] if len(prompts) else []
    return [(cell if isinstance(cell, tuple) else (cell,), part) for cell, part in prompts.groupby(by, observed=True, sort=True)]


def _mean(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(x, axis=axis)


def _ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    below = np.sum(b, axis=axis)
    return np.where(below > 0, np.sum(a, axis=axis) / np.where(below > 0, below, 1), np.nan)
