"""The benchmark: the same prompts through every decoder, tokens compared with AR's, raw rows kept.

Every (prompt, repeat) runs all decoders, in an order that turns by one place each time, so that drift of the machine
falls on all alike. A warm-up decode of each is left out, prefill is timed apart, and nothing is averaged before it is
stored: `summary` computes all four definitions of speedup in use from the same rows (docs/algorithms.md, section 4).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.autoregressive import Autoregressive
from decoders.decoder import Decoder
from decoders.generation import Generation
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SPEEDUPS = ("ratio_of_mean_throughputs", "total_tokens_over_total_time", "mean_of_prompt_ratios", "decode_only")
HEADLINE = "mean_of_decode_ratios"  # the third without prefill: what the command line, the plan and the figures quote


@dataclass(frozen=True, eq=False)
class AcceptanceResult(Result):
    """Drafts that reached each place of a run, and those accepted there, per prompt and decoder."""

    kind = "acceptance"
    columns = ("model", "task", "prompt", "decoder", "position", "reached", "accepted")


@dataclass(frozen=True, eq=False)
class BenchResult(Result):
    """One row per prompt, repeat and decoder. `.acceptance` is a second table; `.summary()` one row per decoder."""

    acceptance: AcceptanceResult | None = None
    kind = "bench"
    columns = ("model", "task", "prompt", "repeat", "order", "decoder", "lossless", "tokens", "prefill_seconds", "decode_seconds",
               "recur_calls", "prelude_calls", "readout_calls", "rows", "proposed", "accepted", "token_mismatches", "repetition_rate")
    # A further column, runs: verifications with at least one draft (waves: runs between corrections).

    def save(self, folder):
        """Write FOLDER/bench.parquet and, if there is one, FOLDER/acceptance.parquet."""
        if self.acceptance is not None:
            self.acceptance.save(folder)
        return super().save(folder)

    def summary(self, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
        """One row per decoder: cost per committed token, acceptance, and four speedups over AR with 95 % intervals.

        ratio_of_mean_throughputs: mean over prompts of tokens/s, divided by AR's. total_tokens_over_total_time: all
        tokens by all seconds. mean_of_prompt_ratios: mean over prompts of the ratio to AR on the same prompt. These
        three count prefill; decode_only is the second without it and without the token that prefill commits.
        mean_of_decode_ratios is the third without either: the average that reports quote.
        Intervals: percentile bootstrap over prompts, the same prompts drawn for the decoder and for AR; nan for one.
        """
        import pandas as pd

        return pd.DataFrame(_summarise(self.frame, resamples, seed))


def bench(model, prompts: Iterable[Any], decoders: Sequence[Decoder], task: str = "", max_new_tokens: int = 64, repeats: int = 1,
          seed: int = 0, *, depth: int | None = None, start_state=None, stop: Sequence[str] = (), warmup_tokens: int = 12,
          model_name: str | None = None, progress: Callable[[int, int, str], None] | None = None) -> BenchResult:
    """Run every decoder on every prompt `repeats` times.

    AR is added if it is not among `decoders`. token_mismatches counts places where the tokens differ from AR's (a
    difference in length counts too); repetition_rate is the share of 4-grams of the output that occurred before in it,
    since text that repeats itself is easy to draft. progress: called with (decodes done, decodes planned, label).
    Raises what `generate` raises, and SettingError for no prompts, no repeats or two decoders of one label.
    """
    import pandas as pd

    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    decoders = list(decoders)
    if not any(d.label == "AR" for d in decoders):
        decoders = [Autoregressive(), *decoders]
    labels = [d.label for d in decoders]
    if not prompts or repeats < 1:
        raise SettingError(f"a benchmark needs at least one prompt and one repeat, got {len(prompts)} and {repeats}")
    if len(set(labels)) < len(labels):
        raise SettingError(f"two decoders have one label: {', '.join(sorted(x for x, n in Counter(labels).items() if n > 1))}")
    core = model.core
    name = model_name or core.source or core.family
    options = {"depth": depth, "seed": seed, "start_state": start_state}
    total, done = len(prompts) * repeats * len(decoders), 0
    for d in decoders:
        d.generate(core, prompts[0], max_new_tokens=min(warmup_tokens, max_new_tokens), **options)
    rows, places, reference, turn = [], [], {}, 0
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            outcomes: dict[str, tuple[int, Generation]] = {}
            for order in range(len(decoders)):
                d = decoders[(order + turn) % len(decoders)]
                outcomes[d.label] = order, _timed(d, core, prompt, max_new_tokens, stop, options)
                done += 1
                if progress is not None:
                    progress(done, total, d.label)
            turn += 1
            expected = reference.setdefault(index, outcomes["AR"][1].tokens)
            for label in labels:
                order, g = outcomes[label]
                rows.append((name, task, index, repeat, order, label, g.lossless, len(g.tokens), g.seconds.prefill, g.seconds.decode,
                             *g.calls, g.rows, g.proposed, g.accepted, mismatches(g.tokens, expected), repetition_rate(g.tokens),
                             len(g.accept_lengths)))
                if repeat == 0:
                    places += [(name, task, index, label, *place) for place in g.acceptance_by_position() if place[1]]
    meta = {"max_new_tokens": max_new_tokens, "seed": seed, "repeats": repeats, "depth": core.check_depth(depth), "prompts": len(prompts)}
    acceptance = AcceptanceResult(pd.DataFrame(places, columns=list(AcceptanceResult.columns)), meta)
    return BenchResult(pd.DataFrame(rows, columns=[*BenchResult.columns, "runs"]), meta, acceptance)


def mismatches(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Places where two outputs differ; a missing or surplus token is a difference."""
    return sum(a != b for a, b in zip(tokens, expected)) + abs(len(tokens) - len(expected))


def repetition_rate(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred earlier in the output, 0 to 1; 0 where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _timed(decoder: Decoder, core, prompt, max_new_tokens: int, stop: Sequence[str], options: dict) -> Generation:
    """One decode with the garbage collector held back: its pauses belong to no decoder."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        return decoder.generate(core, prompt, max_new_tokens=max_new_tokens, stop=stop, **options)
    finally:
        if enabled:
            gc.enable()


def _summarise(frame: pd.DataFrame, resamples: int, seed: int) -> list[dict[str, Any]]:
    import numpy as np

    # Repeats of one prompt are one observation of it: the median, which an interrupted repeat does not move.
    timed = frame.assign(seconds=frame.prefill_seconds + frame.decode_seconds)
    per_prompt = timed.groupby(["decoder", "prompt"]).median(numeric_only=True)
    labels = list(dict.fromkeys(frame.decoder))
    ar = per_prompt.loc["AR"]
    draw = np.random.default_rng(seed)
    samples = draw.integers(len(ar), size=(resamples, len(ar))) if len(ar) > 1 else None
    out = []
    for label in labels:
        own = per_prompt.loc[label].loc[ar.index]
        raw = frame[frame.decoder == label]
        later = (own.tokens - 1).clip(lower=0).sum() or np.nan  # tokens that decoding, not prefill, committed
        row = {"decoder": label, "lossless": bool(raw.lossless.all()), "prompts": len(own), "tokens": int(own.tokens.sum()),
               "calls_per_token": own.recur_calls.sum() / later, "seconds_per_token": own.decode_seconds.sum() / later,
               "call_speedup": 1.0, "alpha": raw.accepted.sum() / raw.proposed.sum() if raw.proposed.sum() else np.nan,
               "accepted_per_run": raw.accepted.sum() / raw.runs.sum() if raw.runs.sum() else np.nan,
               "rows_per_call": own.rows.sum() / max(own.recur_calls.sum(), 1),
               "seconds_per_call": own.decode_seconds.sum() / max(own.recur_calls.sum(), 1),
               "token_mismatches": int(raw.token_mismatches.sum()), "repetition_rate": float(own.repetition_rate.mean())}
        for name in (*SPEEDUPS, HEADLINE):
            every = np.arange(len(ar))[None]
            row[name] = float(_speedup(name, own, ar, every)[0])
            low, high = (np.nan, np.nan) if samples is None else np.percentile(_speedup(name, own, ar, samples), (2.5, 97.5))
            row[f"{name}_low"], row[f"{name}_high"] = float(low), float(high)
        out.append(row)
    base = next(row["calls_per_token"] for row in out if row["decoder"] == "AR")
    for row in out:
        row["call_speedup"] = base / row["calls_per_token"]
    return out


def _speedup(name: str, own: pd.DataFrame, ar: pd.DataFrame, picks: np.ndarray) -> np.ndarray:
    """One definition of speedup for every row of prompt indices in `picks` [samples, prompts]."""
    import numpy as np

    tokens, seconds = own.tokens.to_numpy()[picks], own.seconds.to_numpy()[picks]
    ar_tokens, ar_seconds = ar.tokens.to_numpy()[picks], ar.seconds.to_numpy()[picks]
    if name == "ratio_of_mean_throughputs":
        return (tokens / seconds).mean(1) / (ar_tokens / ar_seconds).mean(1)
    if name == "total_tokens_over_total_time":
        return tokens.sum(1) / seconds.sum(1) / (ar_tokens.sum(1) / ar_seconds.sum(1))
    if name == "mean_of_prompt_ratios":
        return (tokens / seconds / (ar_tokens / ar_seconds)).mean(1)
    decode, ar_decode = own.decode_seconds.to_numpy()[picks], ar.decode_seconds.to_numpy()[picks]
    if name == HEADLINE:
        later, ar_later = np.maximum(tokens - 1, 1), np.maximum(ar_tokens - 1, 1)
        timed = (own.recur_calls.to_numpy() > 0)[picks]  # a text that ended at its first token has no decoding to time
        ratio = later / np.where(timed, decode, np.nan) / (ar_later / np.where(timed, ar_decode, np.nan))
        return np.where(timed, ratio, 0).sum(1) / np.where(timed.any(1), timed.sum(1), np.nan)
    return (tokens - 1).sum(1) / decode.sum(1) / ((ar_tokens - 1).sum(1) / ar_decode.sum(1))
