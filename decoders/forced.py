"""Forced acceptance: a decoder's real calls, with its accept decisions replaced by coins of a given bias.

How fast a decoder is at an acceptance of .8, .9 or .95 can be measured on random weights this way: every recurrence, prelude, readout
and argmax runs as ever, but which token comes out is a function of the position alone: the target's t(p), and a draft's either t(p),
with probability alpha, or another one. So drafts are accepted independently of each other, as the cost model has it
(docs/algorithms.md, section 4), the same ones under every decoder and schedule, and all decoders give the same text. It means nothing,
which the label says. Tokens of `model.config.eos` never come up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decoders.calls import Steps
from decoders.decoder import Decoder
from decoders.generation import LOSSY
from decoders.sampling import Greedy
from decoders.session import Session
from loopscope.errors import SettingError
from loopscope.noise import keyed_uniform

if TYPE_CHECKING:
    from decoders.graphs import Captured, Eager
    from decoders.static import Turn
    from loopscope.cache import DepthCache

_STREAM = 16  # of the keyed noise; sampling uses 1 to 6
_AHEAD = 256  # positions beyond the last that a draft may still be made for


class Forced(Decoder):
    """`decoder`, where a draft is right with probability alpha, a coin per position keyed by `seed`.

    Other than that it is the decoder itself: its calls, counts and checks. Raises SettingError for an alpha outside 0 to 1.
    """

    fidelity = LOSSY

    def __init__(self, decoder: Decoder, alpha: float, seed: int = 0) -> None:
        if not isinstance(decoder, Decoder):
            raise SettingError(f"forced acceptance goes around a decoder, such as decoders.Wavefront(1), got {type(decoder).__name__}")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise SettingError(f"alpha is the share of drafts that are right, a number from 0 to 1, got {alpha!r}")
        self.decoder, self.alpha, self.seed = decoder, float(alpha), seed
        self.one_by_one, self.slots, self.runs_behind = decoder.one_by_one, decoder.slots, decoder.runs_behind

    @property
    def label(self) -> str:
        return f"{self.decoder.label} forced alpha={self.alpha:g}"

    def spare(self, depth: int) -> int:
        return self.decoder.spare(depth)

    def _check(self, core, depth: int) -> None:
        self.decoder._check(core, depth)

    def why_not_static(self, session: Session) -> str:
        return self.decoder.why_not_static(session)

    def static_turn(self, session: Session, cache: DepthCache, runner: Eager | Captured) -> Turn:
        return self.decoder.static_turn(session, cache, runner)

    def _open(self, *args: Any, **options: Any) -> Session:
        session = super()._open(*args, **options)
        session.chooser = Coins(self.alpha, self.seed, session)
        session._greedy = False
        return session

    def _decode(self, session: Session) -> Steps:
        yield from self.decoder._decode(session)


class Coins(Greedy):
    """Tokens by position: `right[p]` for the target, `drafted[p]` for drafts, equal where the coin of p says so."""

    def __init__(self, alpha: float, seed: int, session: Session) -> None:
        vocab, eos = session.core.config.vocab_size, session.eos
        allowed = torch.tensor([t for t in range(vocab) if t not in eos])
        if len(allowed) < 2:
            raise SettingError(f"forced acceptance needs two tokens that end no text, and of this vocabulary of {vocab} only "
                               f"{len(allowed)} are left")
        u = keyed_uniform(seed, 0, range(session.prompt_length + session.limit + _AHEAD), 2, _STREAM)
        at = (u[:, 0] * len(allowed)).long()
        wrong = allowed[(at + 1) % len(allowed)]
        self.right = allowed[at].to(session.core.device)
        self.drafted = torch.where(u[:, 1] < alpha, allowed[at], wrong).to(session.core.device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """What a static turn takes its tokens from (decoders/static.py)."""
        return self.right, self.drafted

    def target(self, logits: Tensor, positions: Sequence[int], drafts, keys) -> Tensor:
        return self._pick(self.right, logits, positions)

    def draft(self, logits: Tensor, positions: Sequence[int], keys) -> Tensor:
        return self._pick(self.drafted, logits, positions)

    def guess(self, logits: Tensor, positions: Sequence[int], keys) -> Tensor:
        return self._pick(self.drafted, logits, positions)

    @staticmethod
    def _pick(table: Tensor, logits: Tensor, positions: Sequence[int]) -> Tensor:
        logits.argmax(-1)  # what choosing costs is part of what is timed
        return table[list(positions)]
