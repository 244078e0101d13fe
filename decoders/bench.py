"""The benchmark: the same prompts through every decoder, tokens compared with AR's, raw rows kept.

Every (prompt, repeat) runs all decoders, in an order that turns by one place each time, so that drift of the machine
falls on all alike. A warm-up decode of each is left out, prefill is timed apart, and nothing is averaged before it is
stored: `summary` computes all four definitions of speedup in use from the same rows (docs/algorithms.md, section 4).

A decoder that is not lossless is compared twice: with AR, whose tokens it does not promise, and with the autoregressive decoding
that makes the same approximation (as many shared K/V slots), which is added to the benchmark for it. PlainLoop() beside AR says
whether AR itself is a fair baseline.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.autoregressive import Autoregressive
from decoders.bench_journal import Group, Journal, facts_of
from decoders.decoder import Decoder
from decoders.draft_depths import acceptance_by_depth
from decoders.generation import APPROXIMATE, LOSSLESS, LOSSY, Generation
from decoders.repeats import at_one_pace, together
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from decoders.metronome import Metronome
    from decoders.sampling import Sampling

SPEEDUPS = ("ratio_of_mean_throughputs", "total_tokens_over_total_time", "mean_of_prompt_ratios", "decode_only")
HEADLINE = "mean_of_decode_ratios"  # the third without prefill: what the command line, the plan and the figures quote


@dataclass(frozen=True, eq=False)
class AcceptanceResult(Result):
    """Drafts that reached each place of a run, and those accepted there, per prompt and decoder."""

    kind = "acceptance"
    columns = ("model", "task", "prompt", "decoder", "position", "reached", "accepted")


@dataclass(frozen=True, eq=False)
class AcceptanceByDepthResult(Result):
    """Drafts compared with a target token and those accepted, by place in the run and by the depth they were made at."""

    kind = "acceptance_by_depth"
    columns = ("model", "task", "prompt", "decoder", "position", "depth", "compared", "accepted")


@dataclass(frozen=True, eq=False)
class BenchResult(Result):
    """One row per prompt, repeat and decoder. `.acceptance` and `.by_depth` are further tables; `.summary()` has a row per decoder."""

    acceptance: AcceptanceResult | None = None
    by_depth: AcceptanceByDepthResult | None = None
    kind = "bench"
    columns = ("model", "task", "prompt", "repeat", "order", "decoder", "lossless", "tokens", "prefill_seconds", "decode_seconds",
               "recur_calls", "prelude_calls", "readout_calls", "rows", "proposed", "accepted", "token_mismatches", "repetition_rate")
    # Later columns, which older tables lack. runs: verifications with at least one draft (waves: runs between corrections).
    # beat: seconds of the metronome (decoders/metronome.py) around the decode, if there was one.
    later_columns = ("runs", "fidelity", "sampling", "reference", "reference_mismatches", "beat")

    def save(self, folder):
        """Write FOLDER/bench.parquet and, where there are drafts, acceptance.parquet and acceptance_by_depth.parquet."""
        for further in (self.acceptance, self.by_depth):
            if further is not None and len(further.frame):
                further.save(folder)
        return super().save(folder)

    def summary(self, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
        """One row per decoder: cost per committed token, acceptance, and four speedups over AR with 95 % intervals.

        ratio_of_mean_throughputs: mean over prompts of tokens/s, divided by AR's. total_tokens_over_total_time: all
        tokens by all seconds. mean_of_prompt_ratios: mean over prompts of the ratio to AR on the same prompt. These
        three count prefill; decode_only is the second without it and without the token that prefill commits.
        mean_of_decode_ratios is the third without either: the average that reports quote.
        Intervals: percentile bootstrap over prompts, the same prompts drawn for the decoder and for AR; nan for one.
        token_match and reference_match: share of tokens equal to AR's and to those of `reference`, place by place.
        """
        import pandas as pd

        return pd.DataFrame(_summarise(self.frame, resamples, seed))

    def speedup(self, decoder: str, base: str = "AR", definition: str = HEADLINE, resamples: int = 1000,
                seed: int = 0) -> tuple[float, float, float]:
        """How many times as fast as `base` a decoder is, and its 95 % interval over prompts. Raises SettingError for unknown labels."""
        held = list(dict.fromkeys(self.frame.decoder))
        if missing := [label for label in (decoder, base) if label not in held]:
            raise SettingError(f"this benchmark did not run {', '.join(missing)}; it ran {', '.join(held)}")
        per_prompt = _per_prompt(self.frame)
        own, other = per_prompt.loc[decoder], per_prompt.loc[base]
        return _with_interval(definition, own.loc[other.index], other, _samples(len(other), resamples, seed))


def bench(model, prompts: Iterable[Any], decoders: Sequence[Decoder], task: str = "", max_new_tokens: int = 64, repeats: int = 1,
          seed: int = 0, *, depth: int | None = None, start_state=None, stop: Sequence[str] = (), sampling: Sampling | None = None,
          warmup_tokens: int = 12, model_name: str | None = None, journal: Journal | None = None, only: Container[int] | None = None,
          metronome: Metronome | None = None, progress: Callable[[int, int, str], None] | None = None) -> BenchResult:
    """Run every decoder on every prompt `repeats` times.

    AR is added if it is not among `decoders`, and so is the reference of each that is not lossless. sampling: None (greedy) or a
    Sampling by shared noise, under which all lossless decoders still give the same tokens. token_mismatches counts places where
    the tokens differ from AR's (a difference in length counts too), reference_mismatches those where they differ from the
    reference's; repetition_rate is the share of 4-grams of the output that occurred before in it, since text that repeats itself
    is easy to draft. journal: an open Journal, which keeps every prompt as soon as it is decoded; those it holds already are not decoded
    again. metronome: time it before and after every decode; seconds are then told at its median pace. only: decode these prompts (by
    index; default: all), as one of several processes that share a benchmark does. progress: called with (decodes done, decodes planned,
    label).
    Raises what `generate` raises, SettingError for no prompts, no repeats, two decoders of one label or sampling by rejection, and
    RunFolderError for a journal that was begun otherwise.
    """
    import pandas as pd

    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    decoders = with_references(decoders)
    labels = [d.label for d in decoders]
    if not prompts or repeats < 1:
        raise SettingError(f"a benchmark needs at least one prompt and one repeat, got {len(prompts)} and {repeats}")
    if len(set(labels)) < len(labels):
        raise SettingError(f"two decoders have one label: {', '.join(sorted(x for x, n in Counter(labels).items() if n > 1))}")
    if sampling is not None and sampling.method != "shared_noise":
        raise SettingError(f"a benchmark compares tokens with AR's, and sampling by {sampling.method} gives other ones of the same "
                           "distribution; use method='shared_noise'")
    core = model.core
    name = model_name or core.source or core.family
    options = {"depth": depth, "seed": seed, "start_state": start_state}
    if sampling is not None:  # only where it is asked for: the plain loop is greedy
        options["sampling"] = sampling
    if journal is not None:
        journal.begin(facts_of(core, prompts=prompts, decoders=decoders, model=name, task=task, depth=core.check_depth(depth), seed=seed,
                               start_state=start_state, max_new_tokens=max_new_tokens, repeats=repeats, stop=list(stop),
                               sampling=repr(sampling), warmup_tokens=warmup_tokens, metronome=metronome is not None))
    turns = [turn for turn in range(repeats * len(prompts)) if only is None or turn % len(prompts) in only]
    total, groups = len(turns) * len(decoders), []
    if len(turns) > (0 if journal is None else len(journal.groups)):
        for d in decoders:
            d.generate(core, prompts[0], max_new_tokens=min(warmup_tokens, max_new_tokens), **options)
    first: dict[int, dict[str, list[int]]] = {}
    with _nothing_old_to_collect():
        for number, turn in enumerate(turns):
            repeat, index = divmod(turn, len(prompts))
            group = None if journal is None else journal.groups.get((index, repeat))
            if group is None:
                outcomes: dict[str, tuple[int, Generation, float]] = {}
                for order in range(len(decoders)):
                    d = decoders[(order + turn) % len(decoders)]
                    outcomes[d.label] = order, *_timed(d, core, prompts[index], max_new_tokens, stop, options, metronome)
                    if progress is not None:
                        progress(number * len(decoders) + order + 1, total, d.label)
                group = _group((name, task, index), repeat, decoders, outcomes, first.get(index), _words(sampling))
                if journal is not None:
                    journal.add(group)
            elif progress is not None:
                progress((number + 1) * len(decoders), total, "")
            first.setdefault(index, group.tokens)
            groups.append(group)
    meta = {"max_new_tokens": max_new_tokens, "seed": seed, "repeats": repeats, "depth": core.check_depth(depth), "prompts": len(prompts),
            "sampling": _words(sampling)} | ({} if journal is None else {"sittings": journal.sittings})

    def table(kind: type[Result], rows: str, further: Sequence[str] = ()) -> pd.DataFrame:
        return pd.DataFrame([row for group in groups for row in getattr(group, rows)], columns=[*kind.columns, *further])

    return BenchResult(table(BenchResult, "rows", BenchResult.later_columns), meta,
                       AcceptanceResult(table(AcceptanceResult, "places"), meta),
                       AcceptanceByDepthResult(table(AcceptanceByDepthResult, "depths"), meta))


def _group(which: tuple[str, str, int], repeat: int, decoders: Sequence[Decoder], outcomes: dict[str, tuple[int, Generation, float]],
           expected: dict[str, list[int]] | None, sampling: str) -> Group:
    """The rows of one prompt and repeat. which: model, task and prompt; expected: every decoder's tokens in the first repeat."""
    expected = {label: g.tokens for label, (_, g, _) in outcomes.items()} if expected is None else expected
    group = Group(which[2], repeat)
    for d in decoders:
        order, g, beat = outcomes[d.label]
        reference = reference_of(d).label
        off = [mismatches(g.tokens, expected[other]) for other in ("AR", reference)]
        group.rows.append((*which, repeat, order, d.label, g.lossless, len(g.tokens), g.seconds.prefill, g.seconds.decode, *g.calls, g.rows,
                           g.proposed, g.accepted, off[0], repetition_rate(g.tokens), len(g.accept_lengths), g.fidelity, sampling,
                           reference, off[1], beat))
        if repeat == 0:
            group.tokens[d.label] = g.tokens
            group.places += [(*which, d.label, *place) for place in g.acceptance_by_position() if place[1]]
            two_stand = getattr(d, "second_depth", None) is not None
            group.depths += [(*which, d.label, *place) for place in acceptance_by_depth(g, two_stand)]
    return group


def reference_of(decoder: Decoder) -> Decoder:
    """The autoregressive decoding that makes the same approximation: as many shared K/V slots, the same exit rule; AR without one."""
    settings = {name: value for name in ("slots", "exit") if (value := getattr(decoder, name, None)) is not None}
    return Autoregressive(**settings)


def with_references(decoders: Iterable[Decoder]) -> list[Decoder]:
    """The decoders, with AR and the references of those that are not lossless in front where they are missing."""
    decoders = list(decoders)
    labels = {d.label for d in decoders}
    missing = {r.label: r for r in (Autoregressive(), *map(reference_of, decoders)) if r.label not in labels}
    return [*missing.values(), *decoders]


def _words(sampling: Sampling | None) -> str:
    """'greedy', or 'T=0.7 top_p=0.9'."""
    if sampling is None:
        return "greedy"
    cuts = [f"{name}={value:g}" for name in ("top_k", "top_p", "min_p") if (value := getattr(sampling, name)) is not None]
    return " ".join([f"T={sampling.temperature:g}", *cuts])


def mismatches(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Places where two outputs differ; a missing or surplus token is a difference."""
    return sum(a != b for a, b in zip(tokens, expected)) + abs(len(tokens) - len(expected))


def repetition_rate(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred earlier in the output, 0 to 1; 0 where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@contextmanager
def _nothing_old_to_collect() -> Iterator[None]:
    """What is alive now is left out of garbage collections: one before every decode would walk all imported modules."""
    gc.collect()
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _timed(decoder: Decoder, core, prompt, max_new_tokens: int, stop: Sequence[str], options: dict,
           metronome: Metronome | None) -> tuple[Generation, float]:
    """One decode with the garbage collector held back, whose pauses belong to no decoder, and the beat around it (nan without one)."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        before = float("nan") if metronome is None else metronome()
        got = decoder.generate(core, prompt, max_new_tokens=max_new_tokens, stop=stop, **options)
        return got, before if metronome is None else (before + metronome()) / 2
    finally:
        if enabled:
            gc.enable()


def _per_prompt(frame: pd.DataFrame) -> pd.DataFrame:
    """Numbers by decoder and prompt; repeats of a prompt are one observation (decoders/repeats.py)."""
    timed = at_one_pace(frame)
    return together(timed.assign(seconds=timed.prefill_seconds + timed.decode_seconds), ["decoder", "prompt"])


def _samples(prompts: int, resamples: int, seed: int) -> np.ndarray | None:
    """Drawn prompts [resamples, prompts]; None where there is one prompt, which has no interval."""
    import numpy as np

    return np.random.default_rng(seed).integers(prompts, size=(resamples, prompts)) if prompts > 1 else None


def _with_interval(name: str, own: pd.DataFrame, base: pd.DataFrame, samples: np.ndarray | None) -> tuple[float, float, float]:
    """One definition of speedup over `base` and its 95 % interval."""
    import numpy as np

    middle = float(_speedup(name, own, base, np.arange(len(base))[None])[0])
    low, high = (np.nan, np.nan) if samples is None else np.percentile(_speedup(name, own, base, samples), (2.5, 97.5))
    return middle, float(low), float(high)


def _match(frame: pd.DataFrame, raw: pd.DataFrame, reference: str, mismatches: str) -> float:
    """Share of places at which a decoder's tokens equal the reference's; the longer of two texts says how many places there are."""
    import numpy as np

    keys = ["prompt", "repeat"]
    own, theirs = raw.set_index(keys), frame[frame.decoder == reference].set_index(keys).tokens
    places = np.maximum(own.tokens, theirs.reindex(own.index).fillna(own.tokens))
    return float(1 - own[mismatches].sum() / places.sum())


def _summarise(frame: pd.DataFrame, resamples: int, seed: int) -> list[dict[str, Any]]:
    import numpy as np

    per_prompt = _per_prompt(frame)
    labels = list(dict.fromkeys(frame.decoder))
    ar = per_prompt.loc["AR"]
    samples = _samples(len(ar), resamples, seed)
    out = []
    for label in labels:
        own = per_prompt.loc[label].loc[ar.index]
        raw = frame[frame.decoder == label]
        later = (own.tokens - 1).clip(lower=0).sum() or np.nan  # tokens that decoding, not prefill, committed
        row = {"decoder": label, "lossless": bool(raw.lossless.all()), "fidelity": fidelity(raw),
               "prompts": len(own), "tokens": int(own.tokens.sum()),
               "calls_per_token": own.recur_calls.sum() / later, "seconds_per_token": own.decode_seconds.sum() / later,
               "call_speedup": 1.0, "alpha": raw.accepted.sum() / raw.proposed.sum() if raw.proposed.sum() else np.nan,
               "accepted_per_run": raw.accepted.sum() / raw.runs.sum() if raw.runs.sum() else np.nan,
               "rows_per_call": own.rows.sum() / max(own.recur_calls.sum(), 1),
               "seconds_per_call": own.decode_seconds.sum() / max(own.recur_calls.sum(), 1),
               "token_mismatches": int(raw.token_mismatches.sum()), "repetition_rate": float(own.repetition_rate.mean())}
        row["token_match"] = _match(frame, raw, "AR", "token_mismatches")
        row["reference"] = raw.reference.iloc[0] if "reference" in raw else "AR"
        row["reference_match"] = _match(frame, raw, row["reference"], "reference_mismatches") if "reference" in raw else row["token_match"]
        for name in (*SPEEDUPS, HEADLINE):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = _with_interval(name, own, ar, samples)
        out.append(row)
    base = next(row["calls_per_token"] for row in out if row["decoder"] == "AR")
    for row in out:
        row["call_speedup"] = base / row["calls_per_token"]
    return out


def fidelity(rows: pd.DataFrame) -> str:
    """The fidelity of one decoder's rows, also of tables from before there was a column for it."""
    if "fidelity" in rows:
        found = set(rows["fidelity"])
        return next((f for f in (LOSSY, APPROXIMATE) if f in found), LOSSLESS)
    return LOSSLESS if rows["lossless"].all() else APPROXIMATE


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
