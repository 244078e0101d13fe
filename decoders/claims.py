"""What the papers claim, held against a run's tables: one row per claim, model, task and comparison.

    result = claims(tables)                 # {table name: frame}, as a run folder holds them
    result.frame[["sentence", "model", "task", "value", "low", "high", "verdict"]]

A verdict is read off a 95 % interval over prompts and never off a mean: "holds" if it lies above the threshold, "does not hold" if
below, "undecided" if it contains it. Equality of tokens alone is decided by counterexample. Claims are put in our own words, as
statements about one decoder or model; a claim that holds on a small model says nothing of the papers' own.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from decoders import claim_checks as checks
from decoders.claim_checks import Found, Measured, Missing
from loopscope.records import Result

if TYPE_CHECKING:
    import pandas as pd

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
NO_INTERVAL, UNMEASURED, UNTESTABLE = "no interval", "not measured in this run", "cannot be tested here"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NO_INTERVAL, UNMEASURED, UNTESTABLE)
FEW = 6  # prompts; below, an interval is too narrow to trust
WFD, DAS = "WFD, arXiv 2609.23033", "DAS, arXiv 2609.34538"
COMMANDS = {  # table -> how to measure it again, where the caller knows no better
    "bench": "loopscope bench {model} --task {task} {decoders}",
    "convergence": "loopscope probe {model} --task {task} --start {start}",
    "prefix_effects": "loopscope intervene {model} --task {task} --start {start}",
    "prefix_channels": "loopscope intervene {model} --task {task} --start {start}",
    "factorial": "loopscope factorial {model} --task {task}",
}


@dataclass(frozen=True)
class Claim:
    """One claim of an abstract in our words, where it stands, and what measures it. testable: whether a small model on this
    machine can speak to it at all; if not, what is measured stands beside it without a verdict."""

    name: str
    sentence: str
    source: str
    check: Callable[[Mapping[str, Any]], Found]
    testable: bool = True


CLAIMS = (
    Claim("wfd_lossless", "Wavefront decoding writes exactly the tokens of plain decoding", WFD, partial(checks.lossless, family="WFD")),
    Claim("wfd_faster", "Wavefront decoding is faster than plain decoding", WFD, partial(checks.faster_than_ar, family="WFD")),
    Claim("wfd_calls", "A wave needs fewer block calls than draft-then-verify", WFD,
          partial(checks.against, family="WFD", rival="DtV", column="calls_per_token")),
    Claim("wfd_time", "A wave is faster than draft-then-verify", WFD,
          partial(checks.against, family="WFD", rival="DtV", column="seconds_per_token")),
    Claim("wfd_ouro", "On Ouro-2.6B a wave is 2.42 times as fast as plain decoding (Spec-Bench, one A6000)", WFD,
          partial(checks.published_speed, family="WFD", where="Ouro-2.6B and that GPU"), testable=False),
    Claim("wfd_huginn", "On Huginn-3.5B a wave is 3.54 times as fast as plain decoding (Spec-Bench, one A6000)", WFD,
          partial(checks.published_speed, family="WFD", where="Huginn-3.5B and that GPU"), testable=False),
    Claim("wfd_sharing", "K/V shared between recurrences make a wave faster still", WFD, checks.sharing),
    Claim("wfd_sharing_accuracy", "Sharing costs next to no accuracy", WFD, checks.sharing_accuracy),
    Claim("qk_before_v", "Queries and keys mature before values", DAS, checks.settles_first),
    Claim("qk_before_v_nulls", "They do so by more than nulls do", "our control", checks.beyond_nulls),
    Claim("mature_v", "Shallow drafts guess better from the prefix's full-depth values", DAS, checks.mature_v),
    Claim("right_values", "It is the right values that help, not any values of that size", "our control", checks.right_values),
    Claim("strongest_channel", "Of the single channels, values help most", DAS, checks.strongest_channel),
    Claim("interaction", "Carried states, deep keys and deep values gain together what they do not gain apart", DAS, checks.interaction),
    Claim("das_lossless", "DAS-Wave writes exactly the tokens of plain decoding", DAS, partial(checks.lossless, family="DAS-Wave")),
    Claim("das_faster", "DAS-Wave is faster than plain decoding", DAS, partial(checks.faster_than_ar, family="DAS-Wave")),
    Claim("das_time", "DAS-Wave is faster than drafting one token after the other", DAS,
          partial(checks.against, family="DAS-Wave", rival="DtV", column="seconds_per_token")),
    Claim("das_speed", "DAS-Wave is 4 to 7 times as fast as plain decoding on Huginn-3.5B and three Raven models (one L20X)", DAS,
          partial(checks.published_speed, family="DAS-Wave", where="those models and that GPU"), testable=False),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ClaimsResult(Result):
    """One row per claim, model, task and comparison. value, low, high: in `unit`, compared with `threshold` (NaN where nothing was
    measured); part: which comparison of a claim that has several; table and command: what the numbers come from and how to get them
    again; note: what else a reader must know."""

    kind = "claims"
    columns = ("claim", "sentence", "source", "model", "task", "part", "measure", "value", "low", "high", "unit", "threshold", "n_prompts",
               "verdict", "note", "table", "command")


def claims(tables: Mapping[str, pd.DataFrame], commands: Mapping[str, str] | None = None, sources: Mapping[str, str] | None = None,
           which: tuple[Claim, ...] = CLAIMS) -> ClaimsResult:
    """Hold every claim against every model and task in a run's tables.

    commands: table -> command line with {model}, {task}, {start}, {decoders} (a run's manifest has them); sources: model -> how the
    command line calls it.
    """
    import pandas as pd

    commands = COMMANDS | {k: c for k, c in (commands or {}).items() if k in COMMANDS and "{model}" in c}
    rows = []
    for claim in which:
        for model, task in _studied(tables):
            own = {k: t[(t["model"] == model) & (t["task"] == task)] for k, t in tables.items() if {"model", "task"} <= set(t.columns)}
            name, where = (sources or {}).get(model, model), {"model": model, "task": task}
            for found in _listed(claim.check(own)):
                rows.append({"claim": claim.name, "sentence": claim.sentence, "source": claim.source, **where,
                             **_row(claim, found, commands, name, task)})
    return ClaimsResult(pd.DataFrame(rows, columns=list(ClaimsResult.columns)), {"level": 0.95, "interval": "over prompts"})


def judge(found: Measured) -> str:
    """The verdict on one comparison, by its interval alone (equality of tokens: by its counterexamples)."""
    if found.exact:
        return HOLDS if found.value >= found.threshold else FAILS
    if math.isnan(found.low) or math.isnan(found.high):
        return NO_INTERVAL
    return HOLDS if found.low > found.threshold else FAILS if found.high < found.threshold else UNDECIDED


def _studied(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """(model, task) in the order in which the tables name them."""
    pairs: dict[tuple[str, str], None] = {}
    for table in tables.values():
        if {"model", "task"} <= set(table.columns):
            pairs |= dict.fromkeys(table[["model", "task"]].drop_duplicates().itertuples(index=False, name=None))
    models = list(dict.fromkeys(m for m, _ in pairs))
    return sorted(pairs, key=lambda pair: models.index(pair[0]))


def _listed(found: Found) -> list[Measured] | list[Missing]:
    return [found] if isinstance(found, Missing) else found


def _row(claim: Claim, found: Measured | Missing, commands: Mapping[str, str], model: str, task: str) -> dict[str, Any]:
    nan = float("nan")
    if isinstance(found, Missing):
        verdict = UNMEASURED if found.testable else UNTESTABLE
        return {"part": "", "measure": "", "value": nan, "low": nan, "high": nan, "unit": "", "threshold": nan, "n_prompts": 0,
                "verdict": verdict, "note": found.why, "table": found.table,
                "command": _filled(found.command, model, task) if found.testable else ""}
    few = f"{found.n_prompts} prompts: too few for an interval to be trusted" if 1 < found.n_prompts < FEW and not found.exact else ""
    alone = "one prompt gives no interval" if math.isnan(found.low) else ""
    return {"part": found.part, "measure": found.measure, "value": found.value, "low": found.low, "high": found.high, "unit": found.unit,
            "threshold": found.threshold, "n_prompts": found.n_prompts, "verdict": judge(found) if claim.testable else UNTESTABLE,
            "note": "; ".join(filter(None, (found.note, few, alone))), "table": found.table,
            "command": _filled(commands[found.table], model, task, found.decoders, found.start)}


def _filled(command: str, model: str, task: str, decoders: tuple[str, ...] = (), start: str = "") -> str:
    named = " ".join(f"--decoder {shlex.quote(d)}" for d in decoders if d != "AR")
    return command.format(model=shlex.quote(str(model)), task=shlex.quote(str(task)), start="zero" if start == "zero" else "keyed",
                          decoders=named).strip()
