"""The autoregressive run that others are held to, and what it says about itself: its rounding, its near ties, its early readings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoders.autoregressive import Autoregressive
from decoders.sampling import Greedy, SharedNoise, gumbel
from decoders.sampling import _SHARED as SHARED_STREAM
from decoders.session import Session
from loopscope.errors import SettingError
from loopscope.rows import Chain

_FLOOR = 1e-12  # K/V tolerance of a model whose results do not depend on the batch shape at all
_FACTOR = 100.0
CEILING = 1e-3  # beyond this a difference is no longer rounding, however chaotic the model


@dataclass(frozen=True, eq=False)
class Reference:
    """session: the finished run. count: how many of its new tokens stand. logits [n, vocab]: those each was chosen from.

    tolerance, deviation: how far K/V (times 100) and logits are from those of one pass over the same tokens: what a call's
    row count does to them. readings [T, n]: the token each depth would have chosen in that pass, where the readout attends
    to nothing; None elsewhere.
    """

    session: Session
    count: int
    logits: Tensor
    tolerance: float
    deviation: float
    readings: Tensor | None

    @property
    def tokens(self) -> list[int]:
        """The prompt and the new tokens that stand."""
        return self.session.tokens[: self.session.prompt_length + self.count]

    @property
    def new_tokens(self) -> list[int]:
        return self.session.new_tokens[: self.count]

    def ended(self, eos: Collection[int] = (), stop: str = "") -> Reference:
        """The same run, cut behind the first token that is an end or completes the stop string: what stopping must come to."""
        new, text = self.new_tokens, self.session.core.to_text if stop else None
        for n in range(1, len(new) + 1):
            if new[n - 1] in eos or (text is not None and stop in text(new[:n])):
                return replace(self, count=n)
        return self

    def margin(self, index: int, token: int) -> float:
        """By how many logits the run preferred its own new token number `index` to `token`.

        Under shared noise the noise is part of the choice; what top-k, top-p or min-p cut is infinitely far.
        """
        scores, session = self.logits[index].double(), self.session
        if isinstance(session.chooser, SharedNoise):
            sampling = session.chooser.sampling
            kept = sampling.scores(scores[None])[0]
            noise = gumbel(session.seed, [session.prompt_length + index], kept[None], SHARED_STREAM)[0]
            scores = (kept + noise) * sampling.temperature
        return float(scores[session.new_tokens[index]] - scores[token])


def follow(model, prompt, max_new_tokens: int, depth: int | None = None, seed: int = 0, stop=(), start_state=None, prefix: int = 0,
           sampling=None) -> Reference:
    """Decode autoregressively, one sequence alone. Raises what `generate` raises, and SettingError for rejection sampling."""
    decoder = Autoregressive()
    session = decoder._open(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix, sampling)
    if sampling is not None and sampling.method != "shared_noise":
        raise SettingError("rejection sampling gives other tokens under every decoder; only their distribution can be compared "
                           "(decoders/distribution.py)")
    seen: list[Tensor] = []
    choose = session.choose

    def recorded(logits: Tensor, read) -> Tensor:
        seen.append(logits[-1])
        return choose(logits, read)

    session.choose = recorded  # type: ignore[method-assign]
    decoder._run(session)
    del session.choose  # type: ignore[attr-defined]
    return _beside_one_pass(session, torch.stack(seen))


def _beside_one_pass(session: Session, logits: Tensor) -> Reference:
    core, inputs = session.core, session.tokens[:-1]
    cache = core.make_cache(session.cache.capacity, session.depth)
    tokens = torch.tensor([inputs], device=core.device)
    rows = Chain(0, len(inputs), prefix=session.prefix)
    x = core.embed(tokens, rows, cache)
    state = core.start(x, rows, seed=session.seed, start_state=session.start_state)
    new = slice(session.prompt_length - 1, None)
    readings = []
    for r in range(1, session.depth + 1):
        rows = Chain(0, len(inputs), r, session.prefix)
        state = core.recur(state, x, rows, cache)
        if not core.config.n_coda and r < session.depth:
            readings.append(_choose(session, core.read(state, rows)[0][new]))
    whole = core.read(state, rows, cache)[0][new]
    cache.commit(len(inputs))
    theirs = session.cache.materialised()
    gap = max(float((k - theirs[name]).abs().max()) for name, k in cache.materialised().items())
    return Reference(session, len(logits), logits, min(CEILING, max(_FLOOR, _FACTOR * gap)),
                     float((whole.double() - logits.double()).abs().max()),
                     torch.stack([*readings, _choose(session, whole)]) if not core.config.n_coda else None)


def _choose(session: Session, logits: Tensor) -> Tensor:
    """What the session's sampling takes from the logits of its new tokens."""
    at = list(range(session.prompt_length, session.prompt_length + len(logits)))
    chooser = session.chooser
    return logits.argmax(-1) if type(chooser) is Greedy else chooser.draft(logits, at, at)
