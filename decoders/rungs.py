"""The rungs of the losslessness ladder (docs/algorithms.md, 2.7), run: one record for every generation.

L0: float64, random models of all families under drawn cases, or a model of one's own; L1: float32; L2: bfloat16, where rounding
depends on the row count and a first difference must be a near tie.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.ladder import KINDS, Case, case, check
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup
from decoders.reference import Reference, follow
from decoders.verify import Verdict, verify_against
from decoders.wavefront import Wavefront
from loopscope.errors import LoopscopeError, SettingError

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

LEVELS = {"L0": torch.float64, "L1": torch.float32, "L2": torch.bfloat16}
Record = dict[str, Any]
_CHUNK = 8  # cases handed to a process at a time


def random_records(numbers: Sequence[int], decoders: Sequence[Decoder | str] = KINDS, workers: int = 1) -> Iterator[list[Record]]:
    """L0 on random models: the records of each case, in order. workers: processes (1: this one, with no other)."""
    if workers == 1:
        yield from (case_records(number, decoders) for number in numbers)
        return
    with get_context("spawn").Pool(workers, _begin_worker) as pool:  # leaving it early ends the processes at once
        yield from pool.imap(partial(case_records, decoders=tuple(decoders)), numbers, chunksize=_CHUNK)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run, and says what was done so far
    torch.set_num_threads(1)


def case_records(number: int, decoders: Sequence[Decoder | str] = KINDS) -> list[Record]:
    """One case: a record for each of its sequences, or one that says what it raised."""
    drawn = case(number, decoders=decoders)
    shared = _facts_of(drawn)
    try:
        verdicts = check(drawn)
    except Exception as error:  # a decoder that breaks down is what this looks for
        return [{**EMPTY, **shared, "error": f"{type(error).__name__}: {error}"}]
    return [{**EMPTY, **shared, "sequence": i, "prompt_length": v.generation.prompt_length, "limit": limit, **_facts_of_verdict(v, "L0")}
            for i, (limit, v) in enumerate(zip(drawn.limits, verdicts))]


def model_records(load: Callable[[torch.dtype], LoopedCore], prompts: Sequence[Any], decoders: Sequence[Decoder], max_new_tokens: int,
                  levels: Sequence[str] = tuple(LEVELS), seed: int = 0, depth: int | None = None) -> Iterator[list[Record]]:
    """L0, L1 and L2 on one model: every decoder on all prompts together, the records of one decoder at a time.

    load: dtype -> the model. A model that a decoder cannot run is a record with the refusal in `error`.
    """
    for level in levels:
        core = load(LEVELS[level])
        references = [follow(core, prompt, max_new_tokens, depth, seed) for prompt in prompts]
        for decoder in decoders:
            yield _held(core, decoder, references, level)


def _held(core: LoopedCore, decoder: Decoder, references: Sequence[Reference], level: str) -> list[Record]:
    first = references[0].session
    shared = {**EMPTY, "level": level, "model": core.source or core.family, "family": core.family, "decoder": kind_of(decoder),
              "schedule": decoder.label, "depth": first.depth, "batch": len(references)}
    try:
        verdicts = verify_against(decoder, core, references)
    except LoopscopeError as error:
        return [{**shared, "error": str(error)}]
    return [{**shared, "sequence": i, "prompt_length": v.generation.prompt_length, "limit": r.session.limit, **_facts_of_verdict(v, level)}
            for i, (r, v) in enumerate(zip(references, verdicts))]


EMPTY: Record = {
    "level": "L0", "model": "", "family": "", "decoder": "", "schedule": "", "case": -1, "depth": 0, "gain": float("nan"),
    "sampling": "greedy", "batch": 1, "sequence": 0, "prompt_length": 0, "limit": 0, "tokens": 0, "mismatch": False, "explained": False,
    "first_difference": -1, "margin": float("nan"), "deviation": float("nan"), "cache_gap": float("nan"), "cache_tolerance": float("nan"),
    "cache_mismatch": False, "recur": 0, "prelude": 0, "readout": 0, "rows": 0, "count_mismatch": False, "counts_exact": False,
    "drafts_checked": False, "draft_mismatch": False,
    "proposed": 0, "accepted": 0, "verdict": "", "error": ""}
COLUMNS = tuple(EMPTY)


def _facts_of(drawn: Case) -> Record:
    sampling = drawn.sampling
    cuts = "" if sampling is None else "".join(f" {name} {value:g}" for name, value in (
        ("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p)) if value is not None)
    return {"model": f"random {drawn.family}", "family": drawn.family, "decoder": kind_of(drawn.decoder), "schedule": drawn.decoder.label,
            "case": drawn.number, "depth": drawn.depth, "gain": drawn.gain, "batch": len(drawn.prompts),
            "sampling": "greedy" if sampling is None else f"shared noise T {sampling.temperature:g}{cuts}"}


def _facts_of_verdict(v: Verdict, level: str) -> Record:
    """L1 and L2 are about tokens: there a K/V gap is rounding of a size that nothing else tells."""
    explained = v.explained if level == "L0" else v.near_tie(2 * v.deviation)
    cache = level == "L0" and not v.cache_equal
    drafts = level == "L0" and v.drafts_match is False
    ok = (v.tokens_equal or explained) and not cache and v.counts_equal and not drafts
    return {"tokens": len(v.generation.tokens), "mismatch": not v.tokens_equal, "explained": explained,
            "first_difference": -1 if v.first_difference is None else v.first_difference,
            "margin": float("nan") if v.margin is None else v.margin, "deviation": v.deviation, "cache_gap": v.cache_gap,
            "cache_tolerance": v.cache_tolerance, "cache_mismatch": cache, **v.counted._asdict(), "count_mismatch": not v.counts_equal,
            "counts_exact": v.predicted is not None and not v.bound,
            "drafts_checked": v.drafts_match is not None, "draft_mismatch": drafts,
            "proposed": v.generation.proposed, "accepted": v.generation.accepted,
            "verdict": "" if ok else str(v)}


def kind_of(decoder: Decoder) -> str:
    """The decoder without its settings, as the table of a certificate names it."""
    name = decoder.label.split()[0]
    if isinstance(decoder, Wavefront) and decoder.redraft is not None:
        return f"{name} re-drafting"
    if isinstance(decoder, DraftThenVerify) and decoder.read != "aligned":
        return f"{name} deep reads"
    return name


def schedules_for(core: LoopedCore, depth: int) -> list[Decoder]:
    """A common setting of every lossless decoder that a model can run at that depth."""
    every: list[Decoder] = [*(Wavefront(d) for d in (1, 2, 4) if d < depth), PromptLookup(8), DraftThenVerify(1, 4),
                            DraftThenVerify(1, 4, "deep_v"), DraftThenVerify(1, 4, "deep_kv"), DASWave(6, 1),
                            DASWave(4, 2, growth=2, stable=1, bonus=False)]
    if depth > 2:
        every += [Wavefront(1, redraft=1), LoopSpec(1, 2)]
    return [decoder for decoder in every if _can_run(decoder, core, depth)]


def _can_run(decoder: Decoder, core: LoopedCore, depth: int) -> bool:
    try:
        decoder._check(core, depth)
    except SettingError:
        return False
    return True
