"""The report's small tables and sentences, computed from a run's tables (one model each)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from figures import advice, intervals, predicted, ratios, style
from interventions.effects import NOISE

if TYPE_CHECKING:
    import pandas as pd

Tables = Mapping[str, "pd.DataFrame"]
SPEEDUPS = {
    "ratio_of_mean_throughputs": "ratio of mean throughputs",
    "total_tokens_over_total_time": "total tokens over total time",
    "mean_of_prompt_ratios": "mean of per-prompt ratios",
    "decode_only": "decode only (no prefill)",
}


def speeds(tables: Tables) -> list[dict[str, Any]]:
    """One row per task and decoder, fastest first: measured speed, calls, acceptance, equality."""
    if "bench" not in tables or not ratios.has_pairs(tables["bench"]):
        return []
    bench = style.labelled(tables["bench"])
    pairs = ratios.per_prompt(bench)
    rows = []
    for task in style.order(pairs["task"], style.TASKS):
        part = pairs[pairs["task"] == task]
        means = intervals.table(part, ["decoder"], "time_speedup").sort_values("mean", ascending=False)
        for r in means.itertuples():
            own, raw = part[part["decoder"] == r.decoder], bench[(bench["task"] == task) & (bench["decoder"] == r.decoder)]
            proposed = raw["proposed"].sum() if "proposed" in raw else 0
            rows.append(
                {
                    "task": task,
                    "decoder": r.decoder,
                    "time": f"{r.mean:.2f}x",
                    "interval": "" if r.decoder == "AR" else intervals.words(r.low, r.high, r.n) or "none",
                    "n": str(int(r.n)),
                    "calls": f"{own['call_speedup'].mean():.2f}x",
                    "calls_per_token": f"{own['calls_per_token'].mean():.2f}",
                    "tokens_per_second": f"{(1 / own['seconds_per_token']).mean():.0f}",
                    "accepted": f"{raw['accepted'].sum() / proposed:.1%}" if proposed else "",
                    "repetition": f"{raw['repetition_rate'].mean():.0%}" if "repetition_rate" in raw else "",
                    "equal": ""
                    if r.decoder == "AR"
                    else "yes"
                    if not (wrong := int(raw["token_mismatches"].sum()))
                    else f"no: {wrong} differ",
                }
            )
    return rows


def advice_rows(tables: Tables) -> list[dict[str, str]]:
    """Per task: the one decoder to use, and why it is this one."""
    return [{"task": found.task, "decoder": "plain decoding (AR)" if found.decoder == "AR" else found.decoder, "why": found.why}
            for found in advice.of_tables(tables)]


def speed_sentences(tables: Tables) -> list[str]:
    """Per task: how fast the recommended decoder was, whether its tokens are AR's, and its speed beside the predicted one."""
    out = []
    for found in advice.of_tables(tables):
        if found.decoder == "AR":
            continue
        own = tables["bench"]
        own = own[(own["task"].astype(str) == found.task) & (own["decoder"] == found.decoder)]
        wrong = int(own["token_mismatches"].sum())
        over = "one prompt, so no interval" if found.n == 1 else f"mean over {style.count(found.n, 'prompt')} of the ratio of decode times"
        text = " ".join(filter(None, (f"On {found.task or 'its'} prompts {found.decoder} was {found.mean:.2f}x", found.interval,
                                      f"as fast as plain decoding (AR): {over}")))
        text += f"; {found.doubt}" if found.doubt and found.n > 1 else ""
        text += f". AR makes {found.calls:.2f} times as many block calls. Token for token equal to AR's: "
        text += f"{'yes' if not wrong else f'no, {wrong} differ'} ({style.count(len(own), 'generation')})."
        out.append(text + _predicted(tables, found))
    return out


def _predicted(tables: Tables, found: advice.Advice) -> str:
    """Its speed as predicted and as measured by the prediction's definition, which is not the one of the sentence before."""
    if "plan" not in tables:
        return ""
    both = predicted.both(predicted.remeasured(tables["plan"], tables["bench"]))
    both = both[(both["task"].astype(str) == found.task) & (both["decoder"] == found.decoder)]
    row = both.dropna(subset=["time_speedup_predicted", "time_speedup_measured"])
    if row.empty:
        return ""
    said, got = row["time_speedup_predicted"].iloc[0], row["time_speedup_measured"].iloc[0]
    return (f" The plan had predicted {said:.2f}x, of all of AR's decode seconds over all of the decoder's; measured in that way, it was "
            f"{got:.2f}x ({got / said - 1:+.0%}).")


def settled_sentences(tables: Tables) -> list[str]:
    """What is furthest from its end after the fewest recurrences, and whether it is nearer than what means nothing (its nulls)."""
    if "convergence" not in tables:
        return []
    t = tables["convergence"]
    t = t[(t["metric"] == "cosine") & (t["depth"] == t["depth"].min())]
    t = style.choose(t, "start", None, "convergence", style.OWN_START)[0]
    means = t[t["null"] == "none"].groupby("channel")["value"].mean()
    if means.empty:
        return []
    slowest, first = means.idxmin(), means.idxmax()
    own = t[t["channel"] == slowest]
    beaten: list[str] = []
    not_beaten: list[str] = []
    cells = own.groupby(["task", "prompt", "null"], observed=True)["value"].mean().unstack("null")
    for null in style.order([n for n in cells.columns if n in ("random_weights", "random_map")], style.NULLS):
        gap = (cells["none"] - cells[null]).dropna().rename("gap").reset_index()
        if gap.empty:
            continue
        low = intervals.table(gap, [], "gap")["low"].iloc[0]
        (beaten if low > 0 else not_beaten).append(style.look(style.NULLS, null).label)
    names = {c: style.look(style.CHANNELS, c).label for c in means.index}
    text = (f"After {style.count(t['depth'].min(), 'recurrence')}, {names[slowest]} is furthest from where it ends (cosine "
            f"{means[slowest]:.3f}), "
            f"{names[first]} nearest ({means[first]:.3f})")
    if beaten:
        text += f"; {names[slowest]} is clearly nearer its end than under {' and '.join(beaten)}"
    if not_beaten:
        text += (f"{', but' if beaten else '; it is'} not shown to be nearer than under {' and '.join(not_beaten)}, so that its nearness "
                 "may mean nothing")
    return [text + "."]


def busy_sentences(tables: Tables) -> list[str]:
    said = ratios.busy(tables["bench"], tables.get("plan")) if "bench" in tables else ""
    return [said] if said else []


def equality_sentences(tables: Tables) -> list[str]:
    """'WFD d=1: token for token equal to AR: yes (48 generations, 3072 tokens).' for each decoder."""
    if "bench" not in tables:
        return []
    out = []
    for r in ratios.equality(tables["bench"]).itertuples():
        answer = "yes" if r.mismatches == 0 else "no"
        more = "" if r.mismatches == 0 else f", {style.count(r.mismatches, 'token')} differ"
        kind = "" if r.lossless else f" This decoder is {r.fidelity}: equality is not promised."
        if r.reference not in ("AR", r.decoder):
            own, ar = (1 - wrong / max(r.tokens, 1) for wrong in (r.reference_mismatches, r.mismatches))
            kind += f" Equal to {r.reference}, which makes the same approximation: {own:.1%} of its tokens (to AR: {ar:.1%})."
        out.append(
            f"{r.decoder}: token for token equal to AR: {answer} ({style.count(r.generations, 'generation')}, "
            f"{style.count(r.tokens, 'token')}{more}).{kind}"
        )
    return out


def plan_rows(tables: Tables) -> list[dict[str, str]]:
    """Predicted beside measured, in the plan's order, with the miss."""
    if "plan" not in tables:
        return []
    table, rows, calls, why = predicted.both(tables["plan"]), [], _calls(tables), _misses(tables)
    for task in style.order(table["task"], style.TASKS):
        for r in predicted.ranked(table[table["task"] == task]).itertuples():
            measured, expected, where = r.time_speedup_measured, r.time_speedup_predicted, (str(task), r.decoder)
            miss = f"{measured / expected - 1:+.0%}" if measured == measured and expected == expected and expected else ""
            rows.append(
                {
                    "task": task,
                    "decoder": r.decoder,
                    "predicted": _times(expected),
                    "measured": _times(measured),
                    "interval": "" if r.decoder == "AR" else intervals.words(r.low_measured, r.high_measured, r.n),
                    "miss": miss,
                    "fewer": _times(r.call_speedup_predicted),
                    **{"calls": "", "accepted": "", "call_time": "", "cause": ""},
                    **why.get(where, {}),
                    **calls.get(where, {}),
                }
            )
    return rows


def kept_sentences(tables: Tables) -> list[str]:
    """Whether the block calls that were promised before the benchmark are those that it counted, AR's left out."""
    if not {"replay_prediction", "bench"} <= set(tables):
        return []
    from decoders.foretold import held

    exact = held(tables["replay_prediction"], tables["bench"])
    exact = exact[exact["exact"] & (exact["decoder"] != "AR")]
    if exact.empty:
        return []
    broken = exact[exact["prompts_differ"] > 0]
    kept = "and was right every time" if broken.empty else (
        f"and was wrong about {', '.join(f'{r.decoder} ({r.task})' for r in broken.itertuples())}")
    return [f"Before anything was timed, the plan named the exact number of block calls {style.count(len(exact), 'time')}, once for each "
            f"decoder that it can replay and kind of prompts, {kept}."]


def _calls(tables: Tables) -> dict[tuple[str, str], dict[str, str]]:
    """(task, decoder) -> block calls per token that a replay promised and that were counted: '2.894 = 2.894'.

    Between them stands ≠ where the promise was not kept, and ≈ where the replay only estimates.
    """
    if not {"replay_prediction", "bench"} <= set(tables):
        return {}
    from decoders.foretold import held

    out = {}
    for r in held(tables["replay_prediction"], tables["bench"]).itertuples():
        sign = predicted.ESTIMATED if not r.exact else "\u2260" if r.prompts_differ else predicted.EXACT
        out[str(r.task), r.decoder] = {"calls": f"{r.calls_predicted:.3f} {sign} {r.calls_counted:.3f}"}
    return out


def _misses(tables: Tables) -> dict[tuple[str, str], dict[str, str]]:
    """(task, decoder) -> calls, drafts accepted and time per call, each 'predicted | measured', and what a miss is due to."""
    out = {}
    for r in tables["miss"].itertuples() if "miss" in tables else ():
        out[str(r.task), r.decoder] = {
            "calls": f"{r.calls_predicted:.3f} {predicted.ESTIMATED} {r.calls_counted:.3f}",
            "accepted": f"{r.accepted_predicted:.2f} | {r.accepted_measured:.2f}" if r.accepted_measured == r.accepted_measured else "",
            "call_time": f"{1e6 * r.seconds_per_call_predicted:.0f} | {1e6 * r.seconds_per_call_measured:.0f}",
            "cause": f"{r.cause} (acceptance {r.acceptance:.2f}, kernel {r.kernel:.2f}, host {r.host_factor:.2f})" if r.cause else "",
        }
    return out


def effect_rows(tables: Tables) -> list[dict[str, str]]:
    """The prefix effects at the shallowest draft right behind the prefix, in points of agreement."""
    if "prefix_effects" not in tables:
        return []
    t = tables["prefix_effects"]
    t = t[(t["metric"] == "agreement") & (t["depth"] == t["depth"].min()) & (t["lag"] == t["lag"].min())]
    looks = {"task": style.TASKS, "policy": style.POLICIES, "control": style.CONTROLS}
    t = t.assign(**{f"_{column}": t[column].map(_rank(style.order(t[column], known))) for column, known in looks.items()})
    rows = []
    for r in t.sort_values(["start", "_task", "_policy", "_control"]).itertuples():
        interval = f"[{_points(r.low)}, {_points(r.high)}]{intervals.DAGGER * bool(r.n_prompts < intervals.FEW)}"
        rows.append(
            {
                "task": r.task,
                "start": style.look(style.STARTS, r.start).label,
                "read": f"control: {style.look(style.CONTROLS, r.control).label}"
                if r.control != "none"
                else style.look(style.POLICIES, r.policy).label,
                "effect": _points(r.effect),
                "interval": interval if r.low == r.low else "none",
                "n": str(int(r.n_prompts)),
                "holds": "better" if r.low > NOISE else "worse" if r.high < -NOISE else "no",
                "where": f"draft depth {r.depth}, lag {r.lag}",
            }
        )
    return rows


def definitions(tables: Tables) -> list[dict[str, str]]:
    """The four definitions of speedup in use, side by side, from the same raw rows (decoders.bench computes them)."""
    if "bench" not in tables or not ratios.has_pairs(tables["bench"]):
        return []
    from decoders.bench import BenchResult

    rows = []
    for task in style.order(tables["bench"]["task"], style.TASKS):
        part = tables["bench"][tables["bench"]["task"] == task]
        if not {"runs", *BenchResult.columns} <= set(part.columns):
            return []
        for r in BenchResult(part).summary().to_dict("records"):
            if r["decoder"] != "AR":
                rows.append({"task": task, "decoder": r["decoder"], **{words: f"{r[name]:.2f}x" for name, words in SPEEDUPS.items()}})
    return rows


def approximate(tables: Tables) -> list[str]:
    """What in these tables is an estimate or not exact, in sentences."""
    out = []
    if "bench" in tables:
        told = ratios.fidelities(tables["bench"])
        lossy = style.decoders_in_order(d for d, fidelity in told.items() if fidelity != style.LOSSLESS)
        out.append(
            f"Decoders that are not lossless: {', '.join(d if f'({told[d]})' in d else f'{d} ({told[d]})' for d in lossy)}."
            if lossy
            else "Every decoder timed here is lossless: it commits exactly AR's greedy tokens."
        )
    if "plan" in tables and (tables["plan"]["basis"] == "predicted").any():
        out.append(
            "Predicted speeds are estimates: call times are taken from a short sweep on this machine, and acceptance from the probes' "
            "agreement wherever the replay does not say it exactly."
        )
        out += _predicted_exactly(tables["plan"])
    if "convergence" in tables:
        out.append(
            "Cosines and distances are averaged over layers, heads and positions inside a prompt; "
            "the interval over prompts is taken after that."
        )
    return out


def _predicted_exactly(plan: pd.DataFrame) -> list[str]:
    """Of the decoders that were timed, those whose block calls the plan knew and those for which it only estimated them."""
    table = predicted.both(plan)
    table = table[table["time_speedup_measured"].notna() & table["time_speedup_predicted"].notna() & (table["decoder"] != "AR")]
    known, rest = (", ".join(style.decoders_in_order(part["decoder"])) for part in (table[table["exact"]], table[~table["exact"]]))
    return [f"Block calls predicted exactly, by replay: {known or 'of none'}; estimated: {rest or 'of none'}."] if len(
        table) and "exact_calls" in plan else []


def families(tables: Tables) -> list[str]:
    """Decoder families that the run timed or planned, in the order of the style page."""
    labels = [d for k in ("bench", "plan") if k in tables for d in tables[k]["decoder"].unique()]
    return list(dict.fromkeys(style.family(d) for d in style.decoders_in_order(labels)))


def _rank(names: list[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _times(value: float) -> str:
    return f"{value:.2f}x" if value == value else ""


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"  # + 0.0 turns -0.0 into 0.0
