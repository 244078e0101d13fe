"""L0 of the losslessness ladder: generations held to autoregressive decoding (docs/algorithms.md, 2.7).

Tokens must be equal, the materialised K/V equal after every commit within a tolerance that the model itself sets, and the counted block
calls equal to those predicted from what was drafted and committed. Where a readout attends to nothing, one teacher-forced pass also
fixes every draft of a wave beforehand, and what was drafted is held to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoders.calls import advance_together
from decoders.decoder import Decoder
from decoders.drafts_again import drafts_match
from decoders.expected import forced_calls, predicted_counts, traced_calls
from decoders.counting import Counts
from decoders.generation import Generation
from decoders.loopspec import LoopSpec
from decoders.reference import CEILING, Reference, follow
from decoders.session import Session
from loopscope.cache import DepthCache


@dataclass(frozen=True)
class Verdict:
    """How one generation compares with autoregressive decoding. `counted` and `predicted`: recur, prelude, readout, rows.

    `predicted` None: nothing is predicted (the tokens differ). With `bound` it is an upper bound (frozen rows save rows, and calls
    once all are frozen). forced: recur calls by another way: the teacher-forced pass alone, where that is exact. margin: by how many
    logits autoregressive decoding preferred its own token where the two part; deviation: the largest difference of
    its logits to those of one pass over the same tokens. drafts_match: whether the first block was drafted as its definition says
    (decoders/drafts_again.py); None where nothing is known.
    """

    generation: Generation
    tokens_equal: bool
    cache_gap: float
    cache_tolerance: float
    counted: Counts
    predicted: Counts | None
    bound: bool = False
    forced: int | None = None
    margin: float | None = None
    deviation: float = 0.0
    first_difference: int | None = None
    drafts_match: bool | None = None

    @property
    def explained(self) -> bool:
        """The tokens differ, and where they part the choice was nearer than rounding: a near tie.

        An exact tie is none here: it is decided by index, in every decoder alike.
        """
        return self.near_tie(min(self.deviation, CEILING)) and self.margin != 0

    def near_tie(self, within: float) -> bool:
        """Whether the tokens differ, and autoregressive decoding preferred its own by less than so many logits."""
        return not self.tokens_equal and self.margin is not None and 0 <= self.margin < within

    @property
    def cache_equal(self) -> bool:
        return self.cache_gap <= self.cache_tolerance

    @property
    def counts_equal(self) -> bool:
        if self.forced is not None and self.forced != self.counted.recur:
            return False
        if self.predicted is None:
            return True
        if self.bound:
            return all(a <= b for a, b in zip(self.counted, self.predicted))
        return self.counted == self.predicted

    @property
    def ok(self) -> bool:
        return (self.tokens_equal or self.explained) and self.cache_equal and self.counts_equal and self.drafts_match is not False

    def __str__(self) -> str:
        tokens = "equal" if self.tokens_equal else (f"DIFFER at new token {self.first_difference} (margin {self.margin:.1e}, deviation "
                                                    f"{self.deviation:.1e}{', a near tie' if self.explained else ''})")
        return (f"{self.generation.decoder}: tokens {tokens}; K/V gap {self.cache_gap:.1e} (tolerance {self.cache_tolerance:.1e}); "
                f"calls {tuple(self.counted)}, predicted {'at most ' if self.bound else ''}{self.predicted and tuple(self.predicted)}"
                + ("; DRAFTS are not the definition's" if self.drafts_match is False else "")
                + (f", {self.forced} recur another way" if self.forced is not None else ""))


def verify_generation(decoder: Decoder, model, prompt, max_new_tokens: int, depth: int | None = None, seed: int = 0,
                      stop=(), start_state=None, prefix: int = 0, sampling=None) -> Verdict:
    """Decode with `decoder` and with AR, and compare tokens, materialised K/V and call counts."""
    return verify_batch(decoder, model, [prompt], [max_new_tokens], depth, [seed], stop, start_state, prefix, sampling)[0]


@torch.inference_mode()
def verify_batch(decoder: Decoder, model, prompts: Sequence, max_new_tokens: Sequence[int], depth: int | None = None,
                 seeds: Sequence[int] = (0,), stop=(), start_state=None, prefix: int = 0, sampling=None) -> list[Verdict]:
    """Decode the prompts together, and hold each to its own autoregressive run alone. One prompt: as `generate` runs it."""
    references = [follow(model, prompt, limit, depth, seed, stop, start_state, prefix, sampling)
                  for prompt, limit, seed in zip(prompts, max_new_tokens, seeds, strict=True)]
    return verify_against(decoder, model, references, stop, start_state, prefix, sampling)


@torch.inference_mode()
def verify_against(decoder: Decoder, model, references: Sequence[Reference], stop=(), start_state=None, prefix: int = 0,
                   sampling=None) -> list[Verdict]:
    """As verify_batch, with the autoregressive runs at hand."""
    sessions = [decoder._open(model, r.session.prompt.tolist(), r.session.limit, r.session.depth, r.session.seed, stop, start_state, prefix,
                              sampling, index=i) for i, r in enumerate(references)]
    watched = [_watch_commits(session, reference) for session, reference in zip(sessions, references)]
    if len(sessions) == 1:
        decoder._run(sessions[0])
    else:
        advance_together(sessions, [decoder._steps(session) for session in sessions])
    return [_verdict(decoder, session, reference, gaps) for session, reference, gaps in zip(sessions, references, watched)]


def _verdict(decoder: Decoder, session: Session, reference: Reference, gaps: list[float]) -> Verdict:
    got, theirs = session.result(decoder), reference.tokens
    equal = session.tokens == theirs
    first = margin = forced = predicted = None
    bound = False
    if equal:
        if not session.cache.length == len(session.tokens) - 1:
            gaps.append(float("inf"))
        predicted, bound = predicted_counts(decoder, got, session)
        forced = forced_calls(decoder, session, reference)
        if forced is None and isinstance(decoder, LoopSpec):
            forced = traced_calls(decoder, got)
    else:
        first = next(i for i, (a, b) in enumerate(zip([*session.tokens, -1], [*theirs, -1])) if a != b)
        first -= session.prompt_length
        margin = reference.margin(first, got.tokens[first]) if first < min(len(got.tokens), reference.count) else float("inf")
    return Verdict(got, equal, max(gaps, default=0.0), reference.tolerance, Counts(*got.calls, got.rows), predicted, bound, forced, margin,
                   reference.deviation, first, drafts_match(decoder, got, reference, session.limit, session.eos))


def _watch_commits(session: Session, reference: Reference) -> list[float]:
    """From now on, every commit to the session's cache appends how far its prefix is from the reference's, to the list.

    The K/V of a position depend on the tokens up to it, so nothing is compared behind the first token that differs.
    """
    gaps: list[float] = []
    cache: DepthCache = session.cache
    commit, theirs, tokens = cache.commit, reference.session.cache.materialised(), reference.tokens

    def checked(length: int) -> None:
        commit(length)
        now = cache.length  # what counts as materialised from here on
        same = next((i for i, (a, b) in enumerate(zip(session.tokens, tokens)) if a != b), None)
        if now > len(session.tokens) or (same is None and now >= len(tokens)):
            gaps.append(float("inf"))  # no such position has been committed, or its token was never an input
            return
        end = now if same is None else min(now, same)
        if end:
            gaps.append(max(float((k[..., :end, :] - theirs[name][..., :end, :]).abs().max()) for name, k in cache.materialised().items()))

    cache.commit = checked  # type: ignore[method-assign]
    return gaps
