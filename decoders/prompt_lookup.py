"""Prompt lookup: drafts copied from earlier in the text, checked at full depth. A baseline that needs no looped model."""

from __future__ import annotations

from collections.abc import Sequence

from decoders.autoregressive import step, verify_block
from decoders.calls import Steps
from decoders.decoder import Decoder, at_least
from decoders.session import Session


class PromptLookup(Decoder):
    """Look for the latest earlier place where the last `ngram` tokens (or fewer) occurred, and propose the `block` tokens after it.

    Source: prompt lookup decoding (Saxena, 2023), as in transformers' prompt_lookup_num_tokens. The block is verified from fresh
    target states like any other; where nothing is found one token is decoded plainly.
    """

    def __init__(self, block: int = 8, ngram: int = 3) -> None:
        self.block, self.ngram = at_least("block", block), at_least("ngram", ngram)

    @property
    def label(self) -> str:
        return f"PLD K={self.block} n={self.ngram}"

    def _check(self, core, depth):
        pass

    def _decode(self, session: Session) -> Steps:
        while not session.finished:
            drafts = lookup(session.tokens, self.ngram, min(self.block, session.remaining - 1))
            ends = [i for i, token in enumerate(drafts) if token in session.eos]
            drafts = drafts[: ends[0] + 1] if ends else drafts
            for i, token in enumerate(drafts):
                session.event(len(session.tokens) + i, 0, "draft", token)
            yield from (verify_block(session, drafts) if drafts else step(session))


def lookup(tokens: Sequence[int], ngram: int, most: int) -> list[int]:
    """Up to `most` tokens that followed the latest earlier occurrence of the longest suffix of at most `ngram` tokens."""
    for n in range(min(ngram, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-n:])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == suffix:
                return list(tokens[start + n : start + n + most])
    return []
