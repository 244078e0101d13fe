"""Speedups from the raw benchmark rows: paired with AR on the same prompt, prefill left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from figures import intervals, style
from loopscope.errors import SettingError

BASELINE = "plain loop"
COLUMNS = ("model", "task", "prompt", "repeat", "decoder", "lossless", "tokens", "decode_seconds", "recur_calls", "token_mismatches")


def has_pairs(bench) -> bool:
    """Whether there is anything to divide: AR's rows, and another decoder's."""
    return bool((bench["decoder"] == "AR").any()) if "decoder" in bench.columns else False


def per_prompt(bench):
    """One row per model, task, prompt and decoder: seconds and calls per token and their ratios to AR.

    Repeats are one observation (decoders/repeats.py). Columns time_speedup and call_speedup; a prompt that AR did not decode has no ratio
    and is left out. Raises SettingError without AR rows.
    """
    from decoders.repeats import at_one_pace, together

    style.check(bench, COLUMNS, "bench")
    if not (bench["decoder"] == "AR").any():
        held = ", ".join(style.decoders_in_order(bench["decoder"]))
        raise SettingError(f"a speedup is a ratio to AR, and the bench table has no AR rows; it holds {held}")
    keys = ["model", "task", "prompt"]
    # The first token comes from the prefill, which is not timed here; one token alone leaves nothing to divide by.
    bench = at_one_pace(bench)
    decoded = (bench["tokens"] - 1).clip(lower=1)
    rates = bench.assign(seconds_per_token=bench["decode_seconds"] / decoded, calls_per_token=bench["recur_calls"] / decoded)
    rates = rates[bench["recur_calls"] > 0]
    cells = together(rates, [*keys, "decoder"], ["seconds_per_token", "calls_per_token"]).reset_index()
    cells = cells.assign(fidelity=cells["decoder"].map(fidelities(bench)))
    base = cells[cells["decoder"] == "AR"].set_index(keys)[["seconds_per_token", "calls_per_token"]].add_suffix("_ar")
    joined = cells.join(base, on=keys).dropna(subset=["seconds_per_token_ar"])
    return joined.assign(
        time_speedup=joined["seconds_per_token_ar"] / joined["seconds_per_token"],
        call_speedup=joined["calls_per_token_ar"] / joined["calls_per_token"],
    )


def fidelities(bench) -> dict[str, str]:
    """Decoder -> "lossless", "approximate" or "lossy"; tables from before the column say only whether it is lossless."""
    marked = style.labelled(bench)["decoder"]
    return {d: style.fidelity_of(m) for d, m in zip(bench["decoder"], marked)}


def equality(bench):
    """Per decoder but AR: lossless, fidelity, generations, tokens, mismatches (compared with AR token for token), and the same
    against `reference`, the autoregressive decoding that makes the same approximation (AR itself for a lossless decoder)."""
    told = fidelities(bench)
    part = bench[bench["decoder"] != "AR"]
    for name, absent in (("reference", "AR"), ("reference_mismatches", part["token_mismatches"])):
        if name not in part:
            part = part.assign(**{name: absent})
    found = (
        part.groupby(["model", "decoder"], observed=True)
        .agg(lossless=("lossless", "all"), generations=("tokens", "size"), tokens=("tokens", "sum"), mismatches=("token_mismatches", "sum"),
             reference=("reference", "first"), reference_mismatches=("reference_mismatches", "sum"))
        .reset_index()
    )
    return found.assign(fidelity=found["decoder"].map(told))


@dataclass(frozen=True)
class Fastest:
    """The decoder with the largest mean speedup over n prompts, its interval, and rivals: decoders that it was not clearly faster than
    on the same prompts."""

    decoder: str
    mean: float
    low: float
    high: float
    calls: float
    rivals: tuple[str, ...]
    n: int

    @property
    def interval(self) -> str:
        return intervals.words(self.low, self.high, self.n)


def fastest(pairs) -> Fastest | None:
    """Of per_prompt's rows for one model and task: mean of the per-prompt ratios, intervals over prompts. None without decoders.

    Decoders that are not lossless do other work, and the plain loop is a baseline: neither is a candidate.
    """
    others = candidates(pairs)
    if others.empty:
        return None
    means = intervals.table(others, ["decoder"], "time_speedup").sort_values("mean", ascending=False)
    top = means.iloc[0]
    rivals = tuple(d for d in means["decoder"][1:] if over(others, top["decoder"], d)[1] <= 1)
    calls = others.loc[others["decoder"] == top["decoder"], "call_speedup"].mean()
    return Fastest(top["decoder"], float(top["mean"]), float(top["low"]), float(top["high"]), float(calls), rivals, int(top["n"]))


def over(pairs, one: str, other: str) -> tuple[float, float, float]:
    """Geometric mean over prompts of one decoder's speed over another's on the same prompt, and its interval (NaN for one prompt)."""
    if one == other:
        return 1.0, 1.0, 1.0
    wide = pairs.pivot(index="prompt", columns="decoder", values="time_speedup")[[one, other]].dropna()
    logs = np.log((wide[one] / wide[other]).to_numpy(float))
    if not len(logs):
        return float("nan"), float("nan"), float("nan")
    low, high = intervals.bootstrap(logs[None])
    return float(np.exp(logs.mean())), float(np.exp(low[0])), float(np.exp(high[0]))


def candidates(pairs):
    """The rows of decoders that may be recommended in AR's place."""
    told = pairs["fidelity"] if "fidelity" in pairs else pairs["decoder"].map(style.fidelity_of)
    return pairs[(pairs["decoder"] != "AR") & (pairs["decoder"] != BASELINE) & (told == style.LOSSLESS)]


BUSY = 2.0  # times; call times that differ by more are the machine's doing, not the model's


def busy(bench, plan=None) -> str:
    """A sentence where AR's own seconds per block call say that something else ran on the machine, else "". One model's rows.

    Two signs: they spread over prompts and repeats (90th against 10th percentile), or they are far from what the timing sweep
    before the benchmark measured (the plan's prediction for AR).
    """
    own = bench[(bench["decoder"] == "AR") & (bench["recur_calls"] > 0)]
    for task, part in own.groupby("task", observed=True):
        cost = part["decode_seconds"] / part["recur_calls"]
        low, middle, high = cost.quantile([0.1, 0.5, 0.9])
        told = plan[(plan["decoder"] == "AR") & (plan["basis"] == "predicted") & (plan["task"] == task)] if plan is not None else own[:0]
        swept = float(told["seconds_per_token"].iloc[0] / told["calls_per_token"].iloc[0]) if len(told) else float("nan")
        found = []
        if high > BUSY * low:
            found.append(f"varied {high / low:.1f} times between prompts")
        if middle > BUSY * swept:
            found.append(f"were {middle / swept:.1f} times those of the timing sweep before")
        if found:
            return "This machine was busy: rely on calls, not seconds. " + (
                f"AR's own seconds per block call {' and '.join(found)} ({task or 'all'})."
            )
    return ""
