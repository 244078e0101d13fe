"""How a token is chosen from logits: greedily, with shared noise, or by rejection (docs/algorithms.md, 2.6).

Shared noise adds the same Gumbel noise, keyed by (seed, position), to draft and target logits: every lossless decoder then
gives the tokens of autoregressive decoding at any temperature, which turns a statistical claim into an equality.
Rejection (Leviathan, Kalman and Matias, arXiv 2211.17192) accepts a draft x ~ q with probability min(1, p(x) / q(x)) and draws
from the normalised (p - q)+ otherwise: the tokens have the target's distribution, but are other ones under another decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.errors import SettingError
from loopscope.noise import keyed_uniform

METHODS = ("shared_noise", "rejection")
# Streams of the keyed noise; 0 is the start state's.
_SHARED, _DRAFT, _TARGET, _SECOND, _ACCEPT = 1, 2, 3, 4, 5  # _ACCEPT + i tests the i-th proposal


@dataclass(frozen=True)
class Sampling:
    """temperature, then top_k, top_p and min_p, in that order, each on what the one before left.

    top_k: keep the k most likely tokens. top_p: keep the fewest most likely tokens whose probabilities sum to at least p.
    min_p: keep tokens at least min_p times as likely as the most likely one. method: "shared_noise" or "rejection".
    Raises SettingError for values outside their range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    method: str = "shared_noise"

    def __post_init__(self) -> None:
        def number(name: str, low: float, high: float, least: bool) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (low <= value if least else low < value) \
                    or not value <= high:
                raise SettingError(f"{name} must be a number {'from' if least else 'above'} {low:g} to {high:g}, got {value!r}")

        number("temperature", 1e-6, 1e6, least=True)  # below it only the argmax is left
        if self.top_k is not None and (isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1):
            raise SettingError(f"top_k must be a whole number of at least 1, got {self.top_k!r}")
        if self.top_p is not None:
            number("top_p", 0, 1, least=False)
        if self.min_p is not None:
            number("min_p", 0, 1, least=True)
        if self.method not in METHODS:
            raise SettingError(f"sampling method {self.method!r} is unknown; use one of {', '.join(METHODS)}")

    def scores(self, logits: Tensor) -> Tensor:
        """logits [n, vocab] -> log-probabilities (float64, not normalised) with what is cut at -inf."""
        scores = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            # Ties with the k-th are cut by index, lowest kept, so that exactly k stay.
            keep = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
            scores = torch.full_like(scores, float("-inf")).scatter(-1, keep, scores.gather(-1, keep))
        if self.top_p is not None and self.top_p < 1:
            ordered, index = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            scores = scores.masked_fill((before >= self.top_p).scatter(-1, index, before >= self.top_p), float("-inf"))
        if self.min_p:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), float("-inf"))
        return scores


class Greedy:
    """argmax, the lowest index on ties. The interface of all choosers.

    Every method takes logits [n, vocab] and returns token ids [n] (int64). positions: where the chosen tokens will stand.
    keys: one per row, what a draft is known by until it is judged.
    """

    def draft(self, logits: Tensor, positions: Sequence[int], keys: Sequence[Hashable]) -> Tensor:
        """Drafts; what they were drawn from is remembered under `keys`."""
        return logits.argmax(-1)

    def second(self, logits: Tensor, positions: Sequence[int], keys: Sequence[Hashable]) -> Tensor:
        """Second proposals beside the drafts remembered under the same keys (LoopSpec, arXiv 2609.17184)."""
        return self.draft(logits, positions, keys)

    def guess(self, logits: Tensor, positions: Sequence[int], keys: Sequence[Hashable]) -> Tensor:
        """Drafts that are judged as certain ones (q a point mass), however they came about."""
        return logits.argmax(-1)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget all drafts but these: the others were rolled back unseen."""

    def target(self, logits: Tensor, positions: Sequence[int], drafts: Sequence[Sequence[int]], keys: Sequence[Hashable]) -> Tensor:
        """The target's tokens. drafts: the proposals for each row's token, in order. A token equal to one accepts it."""
        return logits.argmax(-1)


class SharedNoise(Greedy):
    """argmax of scores + Gumbel noise that is a pure function of (seed, position)."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling, self.seed = sampling, seed

    def draft(self, logits, positions, keys):
        return (self.sampling.scores(logits) + gumbel(self.seed, positions, logits, _SHARED)).argmax(-1)

    def guess(self, logits, positions, keys):
        return self.draft(logits, positions, keys)

    def target(self, logits, positions, drafts, keys):
        return self.draft(logits, positions, keys)


class Rejection(Greedy):
    """Exact in distribution: u q(x) < p(x) accepts x, otherwise (p - q)+ takes its place; second proposals after the first."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling, self.seed = sampling, seed
        self._laws: dict[Hashable, list[Tensor]] = {}  # what each draft in flight was drawn from, [vocab]

    def draft(self, logits, positions, keys):
        scores = self.sampling.scores(logits)
        for key, q in zip(keys, scores.softmax(-1)):
            self._laws[key] = [q]
        return (scores + gumbel(self.seed, positions, logits, _DRAFT)).argmax(-1)

    def second(self, logits, positions, keys):
        first = torch.stack([self._laws[key][0] for key in keys])
        law = _residual(self.sampling.scores(logits).softmax(-1), first)
        for key, q in zip(keys, law):
            self._laws[key][1:] = [q]
        return (law.log() + gumbel(self.seed, positions, logits, _SECOND)).argmax(-1)

    def guess(self, logits, positions, keys):
        for key in keys:
            self._laws.pop(key, None)
        return logits.argmax(-1)

    def target(self, logits, positions, drafts, keys):
        left = self.sampling.scores(logits).softmax(-1)  # what is still to be drawn from, [n, vocab]
        n, vocab = left.shape
        tokens = torch.full((n,), -1, device=left.device)
        for rank in range(max(map(len, drafts), default=0)):
            proposed = [d[rank] if len(d) > rank else -1 for d in drafts]
            x = torch.tensor(proposed, device=left.device)
            q = torch.stack([self._law(key, rank, token, left) for key, token in zip(keys, proposed)])
            at = x.clamp(min=0)[:, None]
            u = keyed_uniform(self.seed, 0, positions, 1, _ACCEPT + rank, left.device)
            open_ = (tokens < 0) & (x >= 0)
            accept = open_ & (u * q.gather(-1, at) < left.gather(-1, at))[:, 0]
            tokens = torch.where(accept, x, tokens)
            left = torch.where(open_[:, None], _residual(left, q), left)
        for key in keys:
            self._laws.pop(key, None)
        drawn = (left.log() + gumbel(self.seed, positions, logits, _TARGET)).argmax(-1)
        return torch.where(tokens >= 0, tokens, drawn)

    def keep(self, keys):
        self._laws = {key: laws for key, laws in self._laws.items() if key in keys}

    def _law(self, key: Hashable, rank: int, token: int, like: Tensor) -> Tensor:
        """What a proposal was drawn from; a point mass where nothing is remembered."""
        laws = self._laws.get(key, ())
        if len(laws) > rank:
            return laws[rank]
        point = torch.zeros_like(like[0])
        if token >= 0:
            point[token] = 1
        return point


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised, [n, vocab]; p where nothing is left but rounding."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(rest.dtype).tiny), p)


def gumbel(seed: int, positions: Sequence[int], like: Tensor, stream: int) -> Tensor:
    """Standard Gumbel noise [n, vocab] (float64) for tokens at `positions`."""
    return -(-keyed_uniform(seed, 0, positions, like.shape[-1], stream, like.device).log()).log()


def chooser(sampling: Sampling | None, seed: int) -> Greedy:
    """The chooser of one sequence; None: greedy. Raises SettingError for anything but a Sampling."""
    if sampling is None:
        return Greedy()
    if not isinstance(sampling, Sampling):
        raise SettingError(f"sampling must be None (greedy) or a decoders.Sampling, got {type(sampling).__name__}")
    return (SharedNoise if sampling.method == "shared_noise" else Rejection)(sampling, seed)
