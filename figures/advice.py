"""Which decoder to use: what the plan picked before any decoder was timed, unless the benchmark clearly says otherwise.

A page that names the plan's pick here and the fastest mean there leaves its reader with two recommendations. There is one: the pick
stands as long as no decoder was clearly faster on the same prompts (the 95 % interval of the paired ratio excludes 1, over enough
prompts); otherwise the fastest one is it, and plain decoding where nothing beats that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from figures import intervals, ratios, style

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Advice:
    """One task's recommendation and what it rests on.

    mean, low, high: of the recommended decoder's per-prompt speedups over AR, over n prompts; calls: AR's block calls over its own.
    picked: the plan's pick, "" where there was none or it was not timed. top: the decoder with the largest mean. ratio, ratio_low,
    ratio_high: geometric mean over prompts of top's speed over the pick's. timed: how many decoders were candidates beside AR.
    """

    task: str
    decoder: str
    mean: float
    low: float
    high: float
    n: int
    calls: float
    picked: str
    top: ratios.Fastest
    ratio: float
    ratio_low: float
    ratio_high: float
    timed: int

    @property
    def interval(self) -> str:
        return "" if self.decoder == "AR" else intervals.words(self.low, self.high, self.n)

    @property
    def doubt(self) -> str:
        """What the interval leaves open, "" where nothing."""
        if self.decoder == "AR":
            return ""
        if self.low != self.low:
            return "one prompt gives no interval"
        return "no gain shown" if self.low <= 1 else ""

    @property
    def why(self) -> str:
        """Why it is this one: what follows 'use X'."""
        others = f"the {self.timed} decoders timed beside AR" if self.timed != 1 else "the one decoder timed beside AR"
        rivals = f", not distinguishable from {' or '.join(self.top.rivals)}" if self.top.rivals else ""
        between = intervals.words(self.ratio_low, self.ratio_high, self.n)
        ratio = f"{self.ratio:.2f}{' ' * bool(between)}{between} times as fast on the same prompts"
        if self.decoder == "AR" and self.picked != "AR":
            return f"none of {others} was faster; the best, {self.top.decoder}, reached {self.top.mean:.2f}x {self.top.interval}".rstrip()
        if not self.picked:
            return f"the largest mean of {others}{rivals}"
        if self.decoder != self.picked:
            return f"the plan had picked {self.picked}; {self.decoder} was {ratio}"
        if self.picked == self.top.decoder:
            return f"picked by the plan before any decoder was timed, and the largest mean of {others}{rivals}"
        if self.n < intervals.FEW:
            few = f"{style.count(self.n, 'prompt')} {'are' if self.n > 1 else 'is'} too few to overrule it"
            return f"picked by the plan before any decoder was timed; {self.top.decoder} was {ratio}, but {few}"
        return f"picked by the plan before any decoder was timed; of {others} none was clearly faster ({self.top.decoder} was {ratio})"

    @property
    def short(self) -> str:
        """The recommendation and what it rests on, in a line."""
        where, top = f" on {self.task}" if self.task else "", self.top
        if self.decoder == "AR":
            return f"Use plain decoding{where}: {top.decoder} reached {top.mean:.2f}x {top.interval}".rstrip()
        rests = "the plan's pick" if self.picked == self.decoder else f"the plan picked {self.picked}" if self.picked else ""
        if top.decoder != self.decoder:
            rests += ", none clearly faster" if self.n >= intervals.FEW else ", too few prompts to overrule it"
        speed = " ".join(filter(None, (f"{self.mean:.2f}x", self.interval, "AR's speed")))
        return f"Use {self.decoder}{where}: {'; '.join(filter(None, (speed, rests, self.doubt)))}"


def picks(plan: pd.DataFrame | None) -> dict[str, str]:
    """task -> the plan's pick. In tables that do not mark it: the fastest prediction that was timed, of those with exact calls if any."""
    out: dict[str, str] = {}
    if plan is None or not len(plan):
        return out
    timed = set(map(tuple, plan.loc[plan["basis"] == "measured", ["task", "decoder"]].astype(str).to_numpy()))
    for task, part in plan[plan["basis"] == "predicted"].groupby(plan["task"].astype(str), sort=False):
        marked = part[part["picked"].eq(True)] if "picked" in part else part[:0]
        if marked.empty:
            part = part[[(task, str(d)) in timed for d in part["decoder"]]]
            exact = part[part["exact_calls"].eq(True) & (part["decoder"] != "AR")] if "exact_calls" in part else part[:0]
            marked = exact if len(exact) else part
            marked = marked.sort_values("time_speedup", ascending=False, kind="stable")
        if len(marked):
            out[task] = str(marked["decoder"].iloc[0])
    return out


def marked(plan: pd.DataFrame, findings: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The plan with a column picked, true in the rows of what the findings of topic "decoder" name; as it is where they name nothing."""
    told = [f for f in findings if f.get("topic") == "decoder" and f.get("decoder")]
    named = {(str(f.get("model")), str(f.get("task") or ""), str(f["decoder"])) for f in told}
    if not named:
        return plan
    rows = zip(plan["model"].astype(str), plan["task"].astype(str), plan["decoder"].astype(str))
    return plan.assign(picked=[row in named for row in rows])


def advise(pairs: pd.DataFrame, pick: str = "") -> Advice | None:
    """pairs: ratios.per_prompt's rows of one model and task; pick: the plan's. None where no decoder could be recommended."""
    top = ratios.fastest(pairs)
    if top is None:
        return None
    open_to = ratios.candidates(pairs)
    picked = pick if pick == "AR" or pick in set(open_to["decoder"]) else ""
    ratio = ratios.over(pairs, top.decoder, picked) if picked else (1.0, 1.0, 1.0)
    chosen = picked if picked and not (ratio[1] > 1 and top.n >= intervals.FEW) else top.decoder
    means = intervals.table(pairs, ["decoder"], "time_speedup").set_index("decoder")
    if means.loc[chosen, "high"] < 1 and top.n >= intervals.FEW:
        chosen = "AR"
    own = means.loc[chosen]
    calls = float(pairs.loc[pairs["decoder"] == chosen, "call_speedup"].mean())
    mean, low, high = (float(own[name]) for name in ("mean", "low", "high"))
    return Advice(str(pairs["task"].iloc[0]), chosen, mean, low, high, int(own["n"]), calls, picked, top, *ratio,
                  open_to["decoder"].nunique())


def of_tables(tables: Mapping[str, pd.DataFrame]) -> list[Advice]:
    """The advice of every task of one model's tables."""
    if "bench" not in tables or not ratios.has_pairs(tables["bench"]):
        return []
    pairs, picked = ratios.per_prompt(tables["bench"]), picks(tables.get("plan"))
    found = [advise(pairs[pairs["task"] == task], picked.get(task, "")) for task in style.order(pairs["task"], style.TASKS)]
    return [advice for advice in found if advice is not None]
