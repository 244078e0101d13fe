"""Speedups from the raw benchmark rows: paired with AR on the same prompt, prefill left out."""

from __future__ import annotations

from figures import style
from loopscope.errors import SettingError

COLUMNS = ("model", "task", "prompt", "repeat", "decoder", "lossless", "tokens", "decode_seconds", "recur_calls", "token_mismatches")


def has_pairs(bench) -> bool:
    """Whether there is anything to divide: AR's rows, and another decoder's."""
    return bool((bench["decoder"] == "AR").any()) if "decoder" in bench.columns else False


def per_prompt(bench):
    """One row per model, task, prompt and decoder: seconds and calls per token (the median repeat) and their ratios to AR.

    Columns time_speedup and call_speedup; a prompt that AR did not decode has no ratio and is left out. Raises SettingError
    without AR rows.
    """
    style.check(bench, COLUMNS, "bench")
    if not (bench["decoder"] == "AR").any():
        held = ", ".join(style.decoders_in_order(bench["decoder"]))
        raise SettingError(f"a speedup is a ratio to AR, and the bench table has no AR rows; it holds {held}")
    keys = ["model", "task", "prompt"]
    # The first token comes from the prefill, which is not timed here; one token alone leaves nothing to divide by.
    decoded = (bench["tokens"] - 1).clip(lower=1)
    rates = bench.assign(seconds_per_token=bench["decode_seconds"] / decoded, calls_per_token=bench["recur_calls"] / decoded)
    rates = rates[bench["recur_calls"] > 0]
    cells = rates.groupby([*keys, "decoder"], observed=True)[["seconds_per_token", "calls_per_token"]].median().reset_index()
    base = cells[cells["decoder"] == "AR"].set_index(keys)[["seconds_per_token", "calls_per_token"]].add_suffix("_ar")
    joined = cells.join(base, on=keys).dropna(subset=["seconds_per_token_ar"])
    return joined.assign(
        time_speedup=joined["seconds_per_token_ar"] / joined["seconds_per_token"],
        call_speedup=joined["calls_per_token_ar"] / joined["calls_per_token"],
    )


def equality(bench):
    """Per decoder but AR: lossless, generations, tokens, mismatches, compared with AR token for token."""
    part = bench[bench["decoder"] != "AR"]
    return (
        part.groupby(["model", "decoder"], observed=True)
        .agg(lossless=("lossless", "all"), generations=("tokens", "size"), tokens=("tokens", "sum"), mismatches=("token_mismatches", "sum"))
        .reset_index()
    )
