"""What a run's tables say about a published claim: one Measured per comparison, paired over prompts, with a 95 % interval.

Every check takes the tables of one model and task and returns what it measured, or Missing, which says what was not
measured and how it could be. Whether a claim holds is not decided here (decoders.claims).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decoders.bench import fidelity
from decoders.repeats import at_one_pace, together
from interventions.effects import beyond_noise, bootstrap_mean
from loopscope.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

Tables = Mapping[str, "pd.DataFrame"]
NULLS = {"random_map": "random map", "random_weights": "random weights"}
CONTROLS = {"shuffled_v": "shuffled values", "other_prompt_v": "another prompt's values", "noise_v": "noise of the same size"}
_STARTS = ("keyed", "embedding", "zero", "given")  # the model's own start first
_NEARLY = 0.9
_SHARED = "loopscope bench {model} --task {task} --decoder 'WFD d=1' --decoder 'WFD d=1 s=4'"


@dataclass(frozen=True)
class Measured:
    """One comparison. value, low, high: in `unit` ("x", "points" of agreement, "cosine", "tokens", "share"); the claim says that
    value lies above `threshold`. exact: a counterexample decides, not an interval. decoders: the labels compared. part: which
    comparison of a claim that has several."""

    measure: str
    value: float
    low: float
    high: float
    n_prompts: int
    unit: str
    threshold: float
    table: str
    note: str = ""
    exact: bool = False
    decoders: tuple[str, ...] = ()
    start: str = ""
    part: str = ""


@dataclass(frozen=True)
class Missing:
    """Nothing to measure: why, and the command that would (with {model} and {task}); testable: whether any run here could."""

    why: str
    table: str
    command: str = ""
    testable: bool = True


Found = list[Measured] | Missing


# ---- decoders ----------------------------------------------------------------------------------------------------


def lossless(tables: Tables, family: str) -> Found:
    """Share of prompts on which every lossless decoder of a family wrote AR's tokens, with the exact (Clopper-Pearson) interval."""
    from scipy import stats

    bench = _bench(tables)
    own = _of_family(bench, family) if bench is not None else {}
    if not own:
        return _not_run(family)
    rows = bench[bench["decoder"].isin(own)]
    right = rows.groupby("prompt")["token_mismatches"].sum() == 0
    equal, n = int(right.sum()), len(right)
    low, high = stats.binomtest(equal, n).proportion_ci(0.95, "exact")
    tokens, wrong = int(rows["tokens"].sum()), int(rows["token_mismatches"].sum())
    return [Measured("share of prompts written exactly as by AR", equal / n, float(low), float(high), n, "share", 1.0, "bench",
                     f"{wrong} of {tokens} tokens differ, in {len(rows)} generations", True, tuple(own))]


def faster_than_ar(tables: Tables, family: str) -> Found:
    """The fastest lossless decoder of a family over AR: mean of per-prompt ratios of decode seconds per token, the report's headline."""
    rates = _rates(_bench(tables))
    best = _best(tables, family, "seconds_per_token")
    if rates is None or best is None:
        return _not_run(family)
    ratio = (rates.loc["AR"]["seconds_per_token"] / rates.loc[best]["seconds_per_token"]).dropna()
    return [_mean(f"{best}: times as fast as AR", ratio, "x", 1.0, "bench", decoders=("AR", best))]


def against(tables: Tables, family: str, rival: str, column: str) -> Found:
    """The best decoder of a family against the best of a rival family: geometric mean over prompts of rival's cost over ours.

    column: "calls_per_token" or "seconds_per_token". Aligned rivals are preferred to others: they are what WFD was compared with.
    The best of each is chosen by its mean cost on the same prompts.
    """
    mine, other = _best(tables, family, column), _best(tables, rival, column, prefer_aligned=family == "WFD")
    if mine is None or other is None:
        return _not_run(family if mine is None else rival)
    rates = _rates(_bench(tables))
    words = "fewer block calls per token" if column == "calls_per_token" else "as fast"
    ratio = (rates.loc[other][column] / rates.loc[mine][column]).dropna()
    return [_geometric(f"{mine} against {other}: times {words}", ratio, decoders=(mine, other))]


def sharing(tables: Tables) -> Found:
    """Every wave with shared K/V against the same wave without: geometric mean over prompts of the ratio of seconds per token."""
    bench = _bench(tables)
    pairs = [(d, plain) for d in (bench["decoder"].unique() if bench is not None else ()) if (plain := _unshared(d)) is not None]
    rates = _rates(bench)
    out = []
    for shared, plain in pairs:
        if plain in rates.index.get_level_values(0):
            ratio = (rates.loc[plain]["seconds_per_token"] / rates.loc[shared]["seconds_per_token"]).dropna()
            raw = bench[bench["decoder"] == shared]
            same = 1 - raw["token_mismatches"].sum() / raw["tokens"].sum()
            out.append(_geometric(f"{shared} against {plain}: times as fast", ratio, note=f"{same:.0%} of its tokens are AR's",
                                  decoders=(shared, plain), part=shared))
    return out or Missing("no wave was timed with and without shared K/V", "bench", _SHARED)


def sharing_accuracy(tables: Tables) -> Found:
    return Missing("answers are not graded here: the tables compare tokens, not results", "bench", testable=False)


def published_speed(tables: Tables, family: str, where: str) -> Found:
    """Ours beside a published speed that was measured on a model and a machine that are not here."""
    found = faster_than_ar(tables, family)
    why = f"{where} are not here; beside it stands what this model and machine gave"
    return Missing(why, "bench", testable=False) if isinstance(found, Missing) else [_noted(found[0], why)]


# ---- probes and interventions ------------------------------------------------------------------------------------


def settles_first(tables: Tables) -> Found:
    """By how much the slower of Q and K is nearer to its full-depth value than V, at the shallowest depth."""
    found = _gaps(tables)
    if isinstance(found, Missing):
        return found
    gaps, depth, start = found
    return [_mean(f"cosine of the slower of Q and K less that of V, depth {depth}", gaps["none"], "cosine", 0.0, "convergence",
                  start=start)]


def beyond_nulls(tables: Tables) -> Found:
    """The same gap with the token mean removed, and how far it exceeds the gap that random maps and weights leave."""
    found = _gaps(tables)
    if isinstance(found, Missing):
        return found
    gaps, depth, start = found
    out = []
    if "token_mean_removed" in gaps:
        out.append(_mean(f"the same gap once what all positions share is taken out, depth {depth}", gaps["token_mean_removed"], "cosine",
                         0.0, "convergence", start=start, part="token mean removed"))
    out += [_mean(f"the gap less that of the null ({words}), depth {depth}", (gaps["none"] - gaps[null]).dropna(), "cosine", 0.0,
                  "convergence", start=start, part=words) for null, words in NULLS.items() if null in gaps]
    return out or Missing("the convergence table has no nulls", "convergence", "loopscope probe {model} --task {task}")


def mature_v(tables: Tables) -> Found:
    """Change in top-1 agreement of the shallowest draft right behind the prefix when it reads values at full depth."""
    effects = tables.get("prefix_effects")
    if effects is None or not len(effects):
        return Missing("mature values were not tried", "prefix_effects", "loopscope intervene {model} --task {task}")
    cell = _own_start(effects)
    cell = cell[(cell["policy"] == "deep_v") & (cell["control"] == "none") & (cell["metric"] == "agreement")]
    cell = cell[(cell["depth"] == cell["depth"].min())]
    cell = cell[cell["lag"] == cell["lag"].min()]
    if cell.empty:
        return Missing("mature values were not tried", "prefix_effects", "loopscope intervene {model} --task {task}")
    r = cell.iloc[0]
    return [Measured(f"agreement gained by deep V, draft depth {r.depth}, lag {r.lag}", 100 * float(r.effect), 100 * float(r.low),
                     100 * float(r.high), int(r.n_prompts), "points", 0.0, "prefix_effects", start=str(r.start))]


def right_values(tables: Tables) -> Found:
    """Agreement with deep V less agreement with the wrong values that did best, same prompts; of interest only where deep V gains."""
    channels, gain = _policies(tables), mature_v(tables)
    controls = [c for c in CONTROLS if channels is not None and ("deep_v", c) in channels[0]]
    if isinstance(gain, Missing) or not controls:
        return Missing("wrong values were not tried", "prefix_channels", "loopscope intervene {model} --task {task}")
    if not gain[0].low > 0:
        return Missing("deep V shows no gain here that the right values could explain", "prefix_channels", testable=False)
    per, depth, lag, start = channels
    best = max(controls, key=lambda c: per[("deep_v", c)].mean())
    difference = 100 * (per[("deep_v", "none")] - per[("deep_v", best)]).dropna()
    return [_mean(f"agreement with deep V less with {CONTROLS[best]}, draft depth {depth}, lag {lag}", difference, "points", 0.0,
                  "prefix_channels", "the wrong values that did best", start=start)]


def strongest_channel(tables: Tables) -> Found:
    """Agreement with deep V less agreement with deep K, same prompts."""
    channels = _policies(tables)
    if channels is None or ("deep_k", "none") not in channels[0] or ("deep_v", "none") not in channels[0]:
        return Missing("deep K and deep V were not both tried", "prefix_channels", "loopscope intervene {model} --task {task}")
    per, depth, lag, start = channels
    difference = 100 * (per[("deep_v", "none")] - per[("deep_k", "none")]).dropna()
    return [_mean(f"agreement with deep V less with deep K, draft depth {depth}, lag {lag}", difference, "points", 0.0, "prefix_channels",
                  start=start)]


def interaction(tables: Tables) -> Found:
    """The three-way interaction of carry, deep K and deep V on tokens committed per verification."""
    from decoders.factorial import effects

    frame = tables.get("factorial")
    if frame is None or not len(frame):
        return Missing("the factorial was not run", "factorial", "loopscope factorial {model} --task {task}")
    if not frame["carry"].astype(bool).any():
        return Missing("this model does not inject its embedding at every recurrence, so nothing can be carried", "factorial",
                       testable=False)
    try:
        terms = effects(frame)
    except SettingError as error:  # a table of an interrupted run
        return Missing(str(error), "factorial", "loopscope factorial {model} --task {task}")
    row = terms[(terms["measure"] == "committed_per_verification") & (terms["term"] == "carry x deep_k x deep_v")].iloc[0]
    full = _nearly_full(frame)
    note = f"{full} of 8 cells are nearly full blocks, which leaves no room to show more" if full else ""
    return [Measured("carry x deep K x deep V: tokens committed per verification", float(row.effect), float(row.low), float(row.high),
                     int(row.n_prompts), "tokens", 0.0, "factorial", note)]


# ---- tables ------------------------------------------------------------------------------------------------------


def _bench(tables: Tables) -> pd.DataFrame | None:
    bench = tables.get("bench")
    return bench if bench is not None and len(bench) and (bench["decoder"] == "AR").any() else None


def _rates(bench: pd.DataFrame | None) -> pd.DataFrame | None:
    """Calls and seconds per token by decoder and prompt (decoders/repeats.py); texts that ended at their first token are left out."""
    if bench is None:
        return None
    bench = at_one_pace(bench[bench["recur_calls"] > 0])
    later = (bench["tokens"] - 1).clip(lower=1)
    rates = bench.assign(seconds_per_token=bench["decode_seconds"] / later, calls_per_token=bench["recur_calls"] / later)
    return together(rates, ["decoder", "prompt"], ["seconds_per_token", "calls_per_token"])


def _of_family(bench: pd.DataFrame, family: str) -> list[str]:
    """Lossless decoders whose label begins with the family's name."""
    return [d for d, rows in bench.groupby("decoder", sort=False, observed=True)
            if str(d).split()[0] == family and fidelity(rows) == "lossless"]


def _best(tables: Tables, family: str, column: str, prefer_aligned: bool = False) -> str | None:
    bench = _bench(tables)
    labels = _of_family(bench, family) if bench is not None else []
    if prefer_aligned:
        labels = [d for d in labels if "deep" not in d] or labels
    rates = _rates(bench)
    cost = {d: rates.loc[d][column].mean() for d in labels if d in rates.index.get_level_values(0)}
    return min(cost, key=cost.get) if cost else None


def _unshared(label: str) -> str | None:
    """'WFD d=1' of 'WFD d=1 s=4 (approximate)', None for a label without slots."""
    words = [w for w in str(label).split() if not w.startswith("(")]
    kept = [w for w in words if not w.startswith("s=")]
    return " ".join(kept) if words[0] == "WFD" and len(kept) < len(words) else None


def _not_run(family: str) -> Missing:
    usual = {"WFD": "wfd", "DtV": "dtv", "DAS-Wave": "das-wave"}.get(family, family)
    return Missing(f"no lossless {family} was timed beside AR", "bench",
                   f"loopscope bench {{model}} --task {{task}} --decoder {usual}" + (" --decoder dtv" if usual == "wfd" else ""))


def _gaps(tables: Tables):
    """({null: gap per prompt}, depth, start), or Missing. The gap: min(Q, K) - V of the prompt's mean cosines over layers."""
    table = tables.get("convergence")
    nothing = Missing("how channels settle was not probed", "convergence", "loopscope probe {model} --task {task}")
    if table is None or not len(table):
        return nothing
    table = _own_start(table[table["metric"] == "cosine"])
    depth = table["depth"].min()
    cells = table[table["depth"] == depth].groupby(["null", "prompt", "channel"], observed=True)["value"].mean().unstack("channel")
    if not {"q", "k", "v"} <= set(cells) or "none" not in cells.index.get_level_values(0):
        return nothing
    gap = (cells[["q", "k"]].min(axis=1) - cells["v"]).dropna()
    return {null: gap.loc[null] for null in gap.index.get_level_values(0).unique()}, int(depth), str(table["start"].iloc[0])


def _policies(tables: Tables):
    """({(policy, control): agreement per prompt}, depth, lag, start) of the shallowest draft right behind the prefix, or None."""
    table = tables.get("prefix_channels")
    if table is None or not len(table):
        return None
    table = _own_start(table)
    depth = table["depth"].min()
    table = table[table["depth"] == depth]
    lag = table["lag"].min()
    groups = table[table["lag"] == lag].groupby(["policy", "control"], observed=True)
    return {key: part.set_index("prompt")["agreement"] for key, part in groups}, int(depth), int(lag), str(table["start"].iloc[0])


def _own_start(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the model's own start state."""
    held = set(table["start"].astype(str))
    start = next((s for s in _STARTS if s in held), next(iter(sorted(held)), ""))
    return table[table["start"].astype(str) == start]


def _nearly_full(frame: pd.DataFrame) -> int:
    """Cells that accept at least 90 % of the longest block that their label allows."""
    from decoders.named import decoder

    found = 0
    for label, rows in frame.groupby("decoder", observed=True):
        try:
            d = decoder(str(label))
        except SettingError:  # a label of another version: no note then
            return 0
        longest = min(d.capacity, d.initial_width + d.growth * (d.rounds - 1))
        found += bool(rows["accepted"].sum() >= _NEARLY * longest * rows["verifications"].sum())
    return found


# ---- intervals ---------------------------------------------------------------------------------------------------


def _mean(measure, sample, unit, threshold, table, note="", decoders=(), start="", part="") -> Measured:
    value, low, high = (beyond_noise(x) for x in bootstrap_mean(sample.sort_index().to_numpy(float)))
    return Measured(measure, value, low, high, len(sample), unit, threshold, table, note, False, tuple(decoders), start, part)


def _geometric(measure, ratio, note="", decoders=(), part="") -> Measured:
    """Ratios average geometrically, so that the answer does not depend on which of two decoders is divided by the other."""
    import numpy as np

    log = bootstrap_mean(np.log(ratio.sort_index().to_numpy(float)))
    value, low, high = (math.exp(beyond_noise(x)) if x == x else x for x in log)
    return Measured(measure, value, low, high, len(ratio), "x", 1.0, "bench", note, False, tuple(decoders), "", part)


def _noted(found: Measured, why: str) -> Measured:
    return replace(found, note=why)
