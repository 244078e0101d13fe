"""The first drafts of a generation again, from the definitions alone: a lossless decoder can still draft badly, and only this tells.

Verification hides a draft that read the prefix at a wrong depth or forgot what it should have carried: the tokens stay right and
acceptance falls. Here every draft is made on rows kept outside the cache, from fresh states, with no decoder code: sequential drafts
on a foreign read policy (DAS, arXiv 2609.34538, section 3) and refined blocks (docs/algorithms.md, 2.5). Drafts with aligned reads
are the target's own early readings, which one teacher-forced pass gives (decoders/expected.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.generation import Generation
from decoders.reference import Reference
from decoders.sampling import Greedy
from loopscope.rows import Forest, ReadPolicy

_ROUNDING = 1e-9  # logits that differ by more than this are chaotic


@dataclass(frozen=True)
class Redrafted:
    """tokens: the first block's drafts. margins: of each, how far the best logit was from the next (sampled: not measured, infinite
    unless the model is chaotic).
    """

    tokens: list[int]
    margins: list[float]


def drafts_match(decoder: Decoder, generation: Generation, reference: Reference, limit: int, eos=()) -> bool | None:
    """Whether the first block was drafted as its definition says; None where this module has no definition or nothing was drafted.

    A draft that differs by a near tie, and all behind it, count as equal.
    """
    made = []
    for event in generation.trace:
        if event.event in ("accept", "reject"):
            break
        if event.event == "draft":
            made.append(event.token)
    if not made:
        return None
    again = redraft(decoder, reference, limit, eos)
    if again is None:
        return None
    for i, token in enumerate(made):
        if i >= len(again.tokens) or token != again.tokens[i]:
            return i < len(again.tokens) and again.margins[i] < max(100 * reference.deviation, _ROUNDING)
    return len(made) == len(again.tokens)


def redraft(decoder: Decoder, reference: Reference, limit: int, eos=()) -> Redrafted | None:
    """The drafts behind the prefill's token, of at most `limit` new tokens."""
    session = reference.session
    if isinstance(decoder, DraftThenVerify) and decoder.read != "aligned":
        block = _Block(reference, ReadPolicy.named(decoder.read, session.depth))
        return block.sequential(decoder.draft_depth, min(decoder.block, limit - 2), eos)
    if isinstance(decoder, DASWave):
        carries = session.core.config.injects if decoder.carry is None else decoder.carry
        restarts = decoder.carry is None and not carries
        if restarts and decoder.rounds * decoder.updates > session.depth:
            return None  # states would freeze at full depth, and what a frozen row shows is the decoder's own choice
        return _Block(reference, ReadPolicy.named(decoder.read, session.depth)).refined(decoder, limit - 2, carries, restarts)
    return None


class _Block:
    """Rows behind the prompt: they read it at the policy's depths, and each other's current K/V."""

    def __init__(self, reference: Reference, policy: ReadPolicy) -> None:
        self.session, self.policy, self.deviation = reference.session, policy, reference.deviation
        self.core, self.cache, self.anchor = self.session.core, self.session.cache, self.session.prompt_length
        self.first = self.session.new_tokens[0]

    def rows(self, n: int, depths: int | list[int] = 1) -> Forest:
        at = torch.arange(self.anchor, self.anchor + n)
        return Forest(at, torch.full((n,), self.anchor), torch.ones(n, n, dtype=torch.bool).tril(),
                      depths if isinstance(depths, int) else tuple(min(r, self.session.depth) for r in depths))

    def open(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """x and start states of rows with these tokens."""
        rows = self.rows(len(tokens))
        x = self.core.embed(torch.tensor([tokens]), rows, self.cache)
        return x, self.core.start(x, rows, seed=self.session.seed, start_state=self.session.start_state)

    def chosen(self, state: Tensor) -> tuple[list[int], list[float]]:
        """The token behind every row, and its margin."""
        n = state.shape[1]
        logits = self.core.read(state, self.rows(n), self.cache)[0]
        best = logits.topk(2).values
        if type(self.session.chooser) is Greedy:
            return logits.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist()
        at = list(range(self.anchor + 1, self.anchor + 1 + n))
        chosen = self.session.chooser.target(logits, at, [()] * n, at).tolist()  # under shared noise drafts choose as the target does
        return chosen, [0.0 if self.deviation > _ROUNDING else float("inf")] * n

    def sequential(self, depth: int, size: int, eos) -> Redrafted:
        tokens: list[int] = [self.first]
        margins: list[float] = []
        for _ in range(size):  # every draft anew from the anchor on, as one chain of rows that all run to depth d
            x, state = self.open(tokens)
            for r in range(1, depth + 1):
                state = self.core.recur(state, x, self.rows(len(tokens), r), self.cache, self.policy)
            said, near = self.chosen(state)
            tokens, margins = [*tokens, said[-1]], [*margins, near[-1]]
            if said[-1] in eos:
                break
        return Redrafted(tokens[1:], margins)

    def refined(self, decoder: DASWave, most: int, carries: bool, restarts: bool) -> Redrafted:
        most = min(decoder.capacity, most)
        guesses, state, counts, embedded, quiet = [self.first], None, [], [], 0
        margins: list[float] = []
        for j in range(decoder.rounds):
            width = min(most, decoder.initial_width + decoder.growth * j)
            before = guesses
            tokens = (guesses + [self.first] * width)[:width]
            x, fresh = self.open(tokens)
            if state is None or not (carries or restarts):
                state, counts = fresh, [0] * width
            else:
                kept = [i < len(counts) and (carries or tokens[i] == embedded[i]) for i in range(width)]
                state = torch.stack([state[:, i] if kept[i] else fresh[:, i] for i in range(width)], 1)
                counts = [counts[i] if kept[i] else 0 for i in range(width)]
            embedded = tokens
            for _ in range(decoder.updates):
                counts = [r + 1 for r in counts]
                state = self.core.recur(state, x, self.rows(width, counts), self.cache, self.policy)
            said, margins = self.chosen(state)
            guesses = [self.first, *said]
            if decoder.stable is not None:
                quiet = quiet + 1 if j and guesses[: len(before)] == before[: width + 1] else 0
                if quiet >= decoder.stable:
                    break
        return Redrafted(guesses[1:], margins)
