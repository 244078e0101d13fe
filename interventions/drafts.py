"""Shallow drafts along the full-depth target's own trajectory, many in one pass.

A draft chain at anchor p is what a decoder would run behind a verified prefix: rows p, p+1, .. whose prefix is the
target's cache below p (prelude and coda at full depth, core at the policy's depths) and who read each other's current
K/V. All of it is `core.recur` on Forest rows with a ReadPolicy: the very call decoders make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopscope.errors import SettingError
from loopscope.rows import Chain, Forest, ReadPolicy
from probes.distance import kl_nats, log_probabilities
from probes.inputs import check_finite

if TYPE_CHECKING:
    from loopscope.cache import DepthCache
    from loopscope.models.looped import LoopedCore

# Rows read each other through a dense mask, so the cost of a call grows with the square of its rows.
_ROWS_PER_CALL = 256


@dataclass(frozen=True, eq=False)
class Target:
    """One prompt run at full depth: what drafts start from and are judged by.

    x [1, n, d_model]: embedding after the prelude; start [1, n, d_model]: start states; log_p [n, vocab]: the target's
    next-token log-probabilities; cache: K/V of every position at every depth.
    """

    x: Tensor
    start: Tensor
    log_p: Tensor
    cache: DepthCache
    depth: int

    @property
    def length(self) -> int:
        return self.log_p.shape[0]


def target_pass(core: LoopedCore, ids: Tensor, depth: int, start_state: str | Tensor | None = None, seed: int = 0) -> Target:
    """The full-depth pass over ids [n], teacher-forced."""
    cache = core.make_cache(len(ids), depth)
    rows = Chain(0, len(ids))
    x = core.embed(core.as_tokens(ids), rows, cache)
    state = start = core.start(x, rows, seed=seed, start_state=start_state)
    for r in range(1, depth + 1):
        state = core.recur(state, x, Chain(0, len(ids), r), cache)
    logits = core.read(state, Chain(0, len(ids), depth), cache)[0]
    check_finite(logits, "a full-depth pass")
    cache.commit(len(ids))
    return Target(x, start, log_probabilities(logits), cache, depth)


def greedy_continuation(core: LoopedCore, ids: Tensor, new_tokens: int, depth: int, start_state: str | Tensor | None = None,
                        seed: int = 0) -> Tensor:
    """ids [n] followed by at most `new_tokens` greedy tokens of the full-depth model, up to its end-of-text token."""
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
        raise SettingError(f"new_tokens must be a whole number of at least 0, got {new_tokens!r}")
    if new_tokens == 0:
        return ids
    cache = core.make_cache(len(ids) + new_tokens, depth)
    tokens, latest = [ids], ids
    for _ in range(new_tokens):
        latest = core(latest, depth, start_state=start_state, seed=seed, cache=cache)[0, -1:].argmax(-1)
        tokens.append(latest)
        if int(latest) in core.config.eos:
            break
    return torch.cat(tokens)


def anchors_of(length: int, chain: int, limit: int, first: int = 1) -> list[int]:
    """At most `limit` evenly spread anchors p >= first with a whole chain behind; one, further left, if none fits."""
    if limit < 1:
        raise SettingError(f"max_positions must be at least 1, got {limit}")
    last = length - chain
    first = min(first, last)
    count = min(limit, last - first + 1)
    return sorted({int(p) for p in torch.linspace(first, last, count, dtype=torch.float64).round()})


def chains(anchors: Sequence[int], length: int) -> Forest:
    """One chain of `length` rows per anchor: row i of anchor p is position p + i, reads the cache below p and rows 0..i."""
    first = torch.tensor(anchors)
    at = (first[:, None] + torch.arange(length)).reshape(-1)
    own = torch.ones(length, length, dtype=torch.bool).tril()
    return Forest(at, first.repeat_interleave(length), torch.block_diag(*[own] * len(anchors)).bool())


def draft_logits(core: LoopedCore, target: Target, rows: Forest, depths: Sequence[int],
                 policy: ReadPolicy) -> Iterator[tuple[int, Tensor]]:
    """(depth, logits [rows, vocab]) for each of the increasing `depths`: a deeper draft continues the shallower one."""
    at = rows.at.to(target.x.device)
    x, state = target.x[:, at], target.start[:, at]
    for r in range(1, max(depths) + 1):
        state = core.recur(state, x, rows.at_depth(r), target.cache, policy)
        if r in depths:
            yield r, core.read(state, rows.at_depth(r), target.cache)[0]


def compare(core: LoopedCore, target: Target, anchors: Sequence[int], depths: Sequence[int], lags: Sequence[int],
            policy: ReadPolicy) -> dict[tuple[int, int], tuple[float, float]]:
    """(depth, lag) -> (top-1 agreement, KL(target || draft) in nats), means over anchors.

    The draft of lag g is row g - 1 of its anchor's chain: the g-th position after the last verified one.
    """
    longest = max(lags)
    picks = torch.tensor([g - 1 for g in lags], device=target.log_p.device)
    agreed = torch.zeros(len(depths), len(lags), dtype=torch.float64)
    divergence = torch.zeros_like(agreed)
    step = max(1, _ROWS_PER_CALL // longest)
    for begin in range(0, len(anchors), step):
        rows = chains(anchors[begin : begin + step], longest)
        at = rows.at.to(picks.device).view(-1, longest)[:, picks]  # [anchors, lags]
        log_full = target.log_p[at]
        for i, (_, logits) in enumerate(draft_logits(core, target, rows, depths, policy)):
            log_draft = log_probabilities(logits.unflatten(0, (-1, longest))[:, picks])
            agreed[i] += (log_draft.argmax(-1) == log_full.argmax(-1)).double().sum(0).cpu()
            divergence[i] += kl_nats(log_full, log_draft).double().sum(0).cpu()
    agreed, divergence = agreed / len(anchors), divergence / len(anchors)
    return {(d, g): (float(agreed[i, j]), float(divergence[i, j])) for i, d in enumerate(depths) for j, g in enumerate(lags)}


def with_deep_values(target: Target, values: Sequence[Tensor]) -> Target:
    """The same target with other full-depth core values, one [kv_heads, n, d_head] per layer, in a copy of its cache."""
    cache = target.cache.clone()
    for layer, replacement in enumerate(values):
        cache.values(layer, target.depth)[0].copy_(replacement)
    return replace(target, cache=cache)


def deep_values(target: Target) -> list[Tensor]:
    """The core values at full depth, one [kv_heads, n, d_head] per layer (copies)."""
    return [target.cache.values(layer, target.depth)[0].clone() for layer in range(len(target.cache.core))]
