"""Why a decoder was faster or slower than planned: acceptance, kernel or host.

Speed over AR is calls per token times seconds per call, and a call's seconds are the block's own (kernel) and what decoding does
between blocks (host). Each is predicted apart, each is measured apart, and their factors multiply to the whole miss:

    measured speedup / predicted speedup = acceptance x kernel x host          (above 1: better than predicted)

acceptance: calls per token predicted over counted. kernel and host: seconds per call predicted over measured, relative to AR's, whose
own calls say how fast the machine was while it was measured. How much of a measured call is kernel is timed in one decode of its own,
since timers inside a decode that is being compared would slow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.decoder import Decoder
from decoders.host import watched
from loopscope.records import Result

if TYPE_CHECKING:
    import pandas as pd

    from decoders.bench import BenchResult
    from loopscope.models.looped import LoopedCore

_HIT = 0.05  # a speedup this near its prediction is no miss


@dataclass(frozen=True, eq=False)
class Misses(Result):
    """One row per planned and timed decoder; speedups are of all decode seconds over all tokens, so that the factors multiply to them.

    exact_calls: the calls were predicted exactly. accepted: drafts per verification. host_seconds: of a call's, those
    that are not the block's.
    cause: the factor that explains most of a miss of more than 5 %, empty for a hit.
    """

    kind = "miss"
    columns = ("model", "task", "decoder", "exact_calls", "calls_predicted", "calls_counted", "accepted_predicted", "accepted_measured",
               "seconds_per_call_predicted", "seconds_per_call_measured", "host_seconds_predicted", "host_seconds_measured",
               "speedup_predicted", "speedup_measured", "acceptance", "kernel", "host_factor", "cause")


def misses(plan: pd.DataFrame, result: BenchResult, inside: Mapping[str, float]) -> Misses:
    """plan: the predicted rows of a plan. result: the benchmark of the same model and task. inside: as kernel_shares gives it."""
    import pandas as pd

    said = plan[plan.basis == "predicted"].drop_duplicates("decoder").set_index("decoder")
    summary = result.summary(resamples=1).set_index("decoder")
    model, task = result.frame.model.iloc[0], result.frame.task.iloc[0]
    ar, ar_said = summary.loc["AR"], said.loc["AR"]
    pace = ar_said.seconds_per_call / ar.seconds_per_call  # how much faster the machine was than when it was timed for the plan
    rows = []
    for label in (x for x in said.index if x in summary.index):
        p, m = said.loc[label], summary.loc[label]
        host_said = float(p.get("host_per_call", 0.0))
        host = m.seconds_per_call * (1 - inside[label])
        acceptance = p.calls_per_token / m.calls_per_token
        kernel_only = host_said + (m.seconds_per_call - host) * pace  # had only the block's own time differed
        kernel, between = p.seconds_per_call / kernel_only, kernel_only / (m.seconds_per_call * pace)
        expected = ar_said.seconds_per_token / p.seconds_per_token
        factors = {"acceptance": acceptance, "kernel": kernel, "host": between}
        rows.append((model, task, label, bool(p.get("exact_calls", False)), p.calls_per_token, m.calls_per_token, p.accepted_per_run,
                     m.accepted_per_run, p.seconds_per_call, m.seconds_per_call, host_said, host, expected,
                     ar.seconds_per_token / m.seconds_per_token, *factors.values(), cause(factors)))
    return Misses(pd.DataFrame(rows, columns=list(Misses.columns)), dict(result.meta))


def cause(factors: Mapping[str, float]) -> str:
    """The factor that did most of a miss; empty where they multiply to a hit."""
    whole = math.log(math.prod(factors.values()))
    if abs(whole) <= math.log1p(_HIT):
        return ""
    return max(factors, key=lambda name: math.log(factors[name]) * math.copysign(1, whole))


def kernel_shares(core: LoopedCore, decoders: Iterable[Decoder], prompt: Any, max_new_tokens: int, seed: int = 0) -> dict[str, float]:
    """Share of a decode's seconds that passes inside recurrences, preludes and readouts, by decoder; of one decode each."""
    shares = {}
    for decoder in decoders:
        with watched(core) as spent:
            decode = decoder.generate(core, prompt, max_new_tokens, seed=seed).seconds.decode
        shares[decoder.label] = min(1.0, _after_prefill(spent, decode) / decode) if decode else 1.0
    return shares


def _after_prefill(spent: list[tuple[float, float]], decode: float) -> float:
    """Of (end, seconds) of all calls, the seconds of those that ended in the last `decode` seconds: prefill comes first."""
    last = spent[-1][0] if spent else 0.0
    return sum(seconds for end, seconds in spent if end >= last - decode)


def sentence(table: pd.DataFrame) -> str:
    """Which planned speeds were missed, and by what."""
    timed = table[table.decoder != "AR"]
    if timed.empty:
        return ""
    off = timed.speedup_measured / timed.speedup_predicted - 1
    near = int((off.abs() <= 0.15).sum())
    said = f"Of {len(timed)} decoders timed beside AR, {near} came within 15 % of their predicted speed."
    missed = timed[timed.cause != ""]
    if len(missed):
        worst = missed.loc[off[missed.index].abs().idxmax()]
        why = {"acceptance": f"acceptance: {worst.calls_counted:.2f} block calls per token were counted where {worst.calls_predicted:.2f} "
                             "were predicted",
               "kernel": "kernel: its block calls took another time than the sweep's",
               "host": "host: what passes between its block calls took another time than was measured beforehand"}[worst.cause]
        miss = worst.speedup_measured / worst.speedup_predicted - 1
        said += f" The largest miss is {worst.decoder}'s ({miss:+.0%}), mostly {why}."
    return said
