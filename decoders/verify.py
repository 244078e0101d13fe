"""L0 of the losslessness ladder: one generation held to autoregressive decoding (docs/algorithms.md, 2.7).

Tokens must be equal, the materialised K/V equal after every commit within a tolerance that the model itself sets, and the counted block
calls equal to what the accept sequence alone predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoders.autoregressive import Autoregressive
from decoders.counting import Counts, autoregressive_counts, das_wave_counts, draft_then_verify_counts, wavefront_counts
from decoders.das_wave import DASWave
from decoders.draft_then_verify import DraftThenVerify
from decoders.decoder import Decoder
from decoders.generation import Generation
from decoders.session import Session
from decoders.wavefront import Wavefront
from loopscope.cache import DepthCache

_FLOOR = 1e-12  # K/V tolerance of a model whose results do not depend on the batch shape at all
_FACTOR = 100.0
_CEILING = 1e-3  # beyond this a difference is no longer rounding, however chaotic the model


@dataclass(frozen=True)
class Verdict:
    """How one generation compares with autoregressive decoding. `counted` and `predicted`: recur, prelude, readout, rows.

    `predicted` is None where no exact prediction exists: behind an EOS (which shortens blocks by what was guessed).
    With `bound` it is an upper bound (frozen rows save rows, and calls once all are frozen).
    """

    generation: Generation
    tokens_equal: bool
    cache_gap: float
    cache_tolerance: float
    counted: Counts
    predicted: Counts | None
    bound: bool = False

    @property
    def cache_equal(self) -> bool:
        return self.cache_gap <= self.cache_tolerance

    @property
    def counts_equal(self) -> bool:
        if self.predicted is None:
            return True
        if self.bound:
            return all(a <= b for a, b in zip(self.counted, self.predicted))
        return self.counted == self.predicted

    @property
    def ok(self) -> bool:
        return self.tokens_equal and self.cache_equal and self.counts_equal

    def __str__(self) -> str:
        return (f"{self.generation.decoder}: tokens {'equal' if self.tokens_equal else 'DIFFER'}; K/V gap {self.cache_gap:.1e} "
                f"(tolerance {self.cache_tolerance:.1e}); calls {tuple(self.counted)}, "
                f"predicted {self.predicted and tuple(self.predicted)}")


@torch.inference_mode()
def verify_generation(decoder: Decoder, model, prompt, max_new_tokens: int, depth: int | None = None, seed: int = 0,
                      stop=(), start_state=None, prefix: int = 0) -> Verdict:
    """Decode with `decoder` and with AR, and compare tokens, materialised K/V and call counts."""
    options = (model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix)
    ar, session = Autoregressive()._open(*options), decoder._open(*options)
    Autoregressive()._run(ar)
    gaps = _watch_commits(session.cache, ar.cache)
    decoder._run(session)
    got = session.result(decoder)
    same_length = session.cache.length == ar.cache.length == len(session.tokens) - 1
    predicted, bound = predicted_counts(decoder, got, session)
    return Verdict(got, session.tokens == ar.tokens, max(gaps) if same_length else float("inf"), cache_tolerance(ar),
                   Counts(*got.calls, got.rows), predicted, bound)


def _watch_commits(cache: DepthCache, reference: DepthCache) -> list[float]:
    """From now on, every commit to `cache` appends the largest difference of its prefix to the reference's to the list."""
    gaps: list[float] = []
    commit = cache.commit

    def checked(length: int) -> None:
        commit(length)
        theirs = reference.materialised()
        if length > reference.length:
            gaps.append(float("inf"))
        else:
            gaps.append(max(float((k - theirs[name][..., :length, :]).abs().max()) for name, k in cache.materialised().items()))

    cache.commit = checked  # type: ignore[method-assign]
    return gaps


def cache_tolerance(reference: Session) -> float:
    """100 times what the same tokens' K/V differ by when they are prefilled in one pass instead of one by one."""
    one_pass = reference.core.make_cache(reference.cache.capacity, reference.depth)
    tokens = torch.tensor([reference.tokens[:-1]], device=reference.core.device)
    reference.core(tokens, depth=reference.depth, seed=reference.seed, start_state=reference.start_state, cache=one_pass,
                   prefix=reference.prefix)
    theirs = reference.cache.materialised()
    return min(_CEILING, max(_FLOOR, _FACTOR * max(float((k - theirs[name]).abs().max()) for name, k in one_pass.materialised().items())))


def predicted_counts(decoder: Decoder, generation: Generation, session: Session) -> tuple[Counts | None, bool]:
    """(calls predicted from the accept sequence, whether that is only an upper bound)."""
    n, depth = len(generation.tokens), generation.depth
    ended = any(e.token in session.eos for e in generation.trace if e.event in ("draft", "commit"))
    if n < session.limit or ended:  # blocks were cut by what was guessed, not by what was accepted
        return None, False
    judged = {e.position: e.event == "accept" for e in generation.trace if e.event in ("accept", "reject")}
    accepts = [judged.get(generation.prompt_length + i + 1, False) for i in range(n)]
    if isinstance(decoder, Wavefront):
        return wavefront_counts(accepts, n, depth, decoder.draft_depth), False
    if isinstance(decoder, DraftThenVerify):
        return draft_then_verify_counts(accepts, n, depth, decoder.draft_depth, decoder.block, decoder.read == "aligned"), False
    if isinstance(decoder, DASWave):
        most = das_wave_counts(generation.accept_lengths, n, depth, decoder.rounds, decoder.updates, decoder.capacity,
                               decoder.initial_width)
        return most, decoder.carry is None and not session.core.config.injects
    return autoregressive_counts(n, depth), False
