"""How rows of one depth attend: a plan is built once per call (loopscope/planning.py) and used by every layer of it.

Each plan writes the rows' own K/V where they belong and returns views of what they read, then one softmax runs over
[prefix ; active rows]. No plan here copies a prefix; those for rows of several depths are in loopscope/attention_mixed.py.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Callable, Optional, cast

import torch
import torch.nn.functional as F

from loopscope.padding import Pads, readable_in_batch, token_positions
from loopscope.rows import At, Chain, Draft

if TYPE_CHECKING:
    from loopscope.cache import DepthCache

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
PatternTap = Optional[Callable[[Tensor], Tensor]]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, pattern: PatternTap) -> Tensor:
    """q [.., heads, n, d], k, v [.., kv_heads, L, d] -> z [.., heads, n, d].

    With `pattern` (a tap on the attention pattern) the softmax is written out, so that the tap can see and edit it.
    """
    grouped = q.shape[-3] != k.shape[-3]
    if pattern is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    if grouped:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return pattern(scores.softmax(-1)) @ v


def readable(queries: Tensor, keys: Tensor, prefix: int = 0) -> Tensor:
    """Which key positions [L] the rows at `queries` [n] read, [n, L] (bool): all up to their own, and from within a
    PrefixLM prefix the whole prefix."""
    queries = queries[:, None]
    return (keys <= queries) | ((queries < prefix) & (keys < prefix)) if prefix else keys <= queries


class Plan:
    """How the rows of one call attend. `rotary(table)` picks their rows of a rotary table."""

    mask: Tensor | None
    causal: bool = False  # no mask, but the rows are the whole sequence
    _windowed: tuple[int, Plan] | None = None
    _home: tuple[Plan, torch.device] | None = None  # of a moved plan: which plan, and where to
    _moved: tuple[Plan, dict[torch.device, Plan]] | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Plan:
        """This plan with its masks and indices on the device of a block that lies elsewhere; made once per device."""
        if self._home is not None:
            return self._home[0].to(device)
        if self._moved is None or self._moved[0] is not self:  # a copy does not own what its original moved
            self._moved = self, {}
        moved = self._moved[1]
        if device not in moved:
            other = moved[device] = copy(self)
            other._home = self, device
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(other, name, value.to(device))
        return moved[device]

    def attend(self, cached: Pair | None, q: Tensor, k: Tensor, v: Tensor, pattern: PatternTap = None) -> Tensor:
        """q [batch, n, heads, d], k, v [batch, n, kv_heads, d] -> z [batch, n, heads, d]."""
        raise NotImplementedError

    def rotary(self, table: Tensor) -> Tensor:
        raise NotImplementedError

    def windowed(self, window: int | None) -> Plan:
        """This plan where a row reads the last `window` positions only, its own included; None: this plan.

        Made once per call, for all layers with that window. K/V are written as before, outside the window too.
        """
        if window is None:
            return self
        if self._home is not None:
            plan, device = self._home
            return plan.windowed(window).to(device)
        if self._windowed is None or self._windowed[0] != window:
            self._windowed = window, self._narrowed(window)
        return self._windowed[1]

    def _narrowed(self, window: int) -> Plan:
        queries, keys, cache = self._places()
        mask = self.mask
        if mask is None:
            mask = cache.additive(readable(queries, keys))
        other = copy(self)
        other.causal = False
        far = queries[:, None] - keys >= window
        other.mask = mask.masked_fill(far.view(mask.shape) if far.numel() == mask.numel() else far, float("-inf"))  # or one per sequence
        return other

    def _places(self) -> tuple[Tensor, Tensor, DepthCache]:
        """Positions of the rows [n] and of the keys they read [L], on the cache's device, and the cache."""
        raise NotImplementedError


class CausalPlan(Plan):
    """No cache: the rows are the whole sequence."""

    def __init__(self, count: int, prefix: int = 0, pads: Pads = ()) -> None:
        self.count, self.prefix, self.pads, self.window = count, prefix, pads, None
        self.mask, self.causal = None, not prefix and not pads

    def rotary(self, table: Tensor) -> Tensor:
        return table[token_positions(Chain(0, self.count, pads=self.pads), table.device)] if self.pads else table[: self.count]

    def _narrowed(self, window):
        other = CausalPlan(self.count, self.prefix, self.pads)
        other.window, other.causal = window, False
        return other

    def attend(self, cached, q, k, v, pattern=None):
        if not self.causal and self.mask is None:
            at = torch.arange(self.count, device=q.device)
            self.mask = readable_in_batch(at, at, self.pads) if self.pads else readable(at, at, self.prefix)
            if self.window is not None:
                self.mask &= at[:, None] - at < self.window
        z = softmax_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.mask, self.causal, pattern)
        return z.transpose(1, 2)


class ChainPlan(Plan):
    """Rows at start..start+n-1, keys read and written in slot `k_slot`, values in `v_slot`.

    Under a foreign read policy the slots are those of (kappa, nu): the rows' own current K/V are written into the
    same buffers just beyond the prefix, so that one view holds [C at the policy's depth ; U current]. Keys before `low`
    lie outside every row's window and are not even looked at, unless a tap wants the whole pattern.
    """

    low = 0

    def __init__(self, cache: DepthCache, rows: Chain, k_slot: int, v_slot: int) -> None:
        self.start, self.count, self.end = rows.start, rows.count, rows.start + rows.count
        cache.check_positions(self.end, rows.pads)
        self.cache, self.k_slot, self.v_slot, self.rows = cache, k_slot, v_slot, rows
        if rows.pads:
            at = torch.arange(self.end, device=cache.device)
            self.mask = cache.additive(readable_in_batch(at[self.start :], at, rows.pads))
            return
        self.causal = self.start == 0 and self.count > 1
        self.mask = None if self.count == 1 or self.causal else cache.causal(self.start, self.count)
        if rows.prefix and self.start == 0:
            at = torch.arange(self.end, device=cache.device)
            self.causal, self.mask = False, cache.additive(readable(at, at, rows.prefix))

    def at_slot(self, slot: int) -> ChainPlan:
        """This plan for the same rows one recurrence on: nothing but the slot differs."""
        self.k_slot = self.v_slot = slot
        self._moved = None
        if self._windowed is not None:
            near = cast(ChainPlan, self._windowed[1])
            near.k_slot, near.v_slot, near._moved = slot, slot, None
        return self

    def rotary(self, table):
        if self.rows.pads:
            return table[token_positions(self.rows, table.device)]
        kept = self.cache.angles  # all recurrences of a token turn by the same angles
        if kept is None or kept[0] is not table or kept[1] != self.start or kept[2] != self.end:
            kept = self.cache.angles = table, self.start, self.end, table[self.start : self.end]
        return kept[3]

    def attend(self, cached, q, k, v, pattern=None):
        slots = cached.slots
        keys, keys_by_row, values, values_by_row = slots[self.k_slot]
        if self.v_slot != self.k_slot:
            _, _, values, values_by_row = slots[self.v_slot]
        keys_by_row.narrow(1, self.start, self.count).copy_(k)
        values_by_row.narrow(1, self.start, self.count).copy_(v)
        low, mask = (self.low, self.near) if self.low and pattern is None else (0, self.mask)
        z = softmax_attention(q.transpose(1, 2), keys.narrow(2, low, self.end - low), values.narrow(2, low, self.end - low),
                              mask, self.causal, pattern)
        return z.transpose(1, 2)

    def _narrowed(self, window):
        if self.end <= window:
            return self
        other = super()._narrowed(window)
        other.low = max(0, self.start + 1 - window)
        other.near = None if self.count == 1 and not self.rows.pads else other.mask[..., other.low :]
        return other

    def _places(self):
        at = torch.arange(self.end, device=self.cache.device)
        return at[self.start :], at, self.cache


class AtPlan(Plan):
    """Rows at any increasing positions, keys in one slot, values in one slot."""

    def __init__(self, cache: DepthCache, rows: At, k_slot: int, v_slot: int) -> None:
        self.end = rows.at[-1] + 1
        cache.check_positions(self.end)
        self.cache, self.positions, self.k_slot, self.v_slot = cache, rows.at, k_slot, v_slot
        self.index = torch.tensor(rows.at, device=cache.device)
        self.mask = cache.causal_at(rows.at)

    def rotary(self, table):
        return table.index_select(0, self.index)

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = cached[0].select(1, self.k_slot), cached[1].select(1, self.v_slot)
        keys.index_copy_(2, self.index, k.transpose(1, 2))
        values.index_copy_(2, self.index, v.transpose(1, 2))
        z = softmax_attention(q.transpose(1, 2), keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end),
                              self.mask, False, pattern)
        return z.transpose(1, 2)

    def _places(self):
        return self.index, torch.arange(self.end, device=self.cache.device), self.cache


class DraftPlan(Plan):
    """A sequential draft on foreign reads: [prefix at (k_slot, v_slot) ; this block's drafts at their own slot]."""

    def __init__(self, cache: DepthCache, rows: Draft, k_slot: int, v_slot: int) -> None:
        cache.check_positions(rows.start + rows.count)
        self.cache, self.prefix, self.start, self.count = cache, rows.prefix, rows.start, rows.count
        self.slot, self.k_slot, self.v_slot = cache.slot(rows.depth), k_slot, v_slot
        self.mask = None if rows.count == 1 else cache.causal(rows.start, rows.count)

    def rotary(self, table):
        return table[self.start : self.start + self.count]

    def attend(self, cached, q, k, v, pattern=None):
        own_keys, own_values = cached[0].select(1, self.slot), cached[1].select(1, self.slot)
        own_keys.narrow(2, self.start, self.count).copy_(k.transpose(1, 2))
        own_values.narrow(2, self.start, self.count).copy_(v.transpose(1, 2))
        keys = (cached[0].select(1, self.k_slot).narrow(2, 0, self.prefix), self._active(own_keys))
        values = (cached[1].select(1, self.v_slot).narrow(2, 0, self.prefix), self._active(own_values))
        # Written out, not fused, so that the two sources need not be copied into one buffer.
        # The query heads of a key head are rows of one product: a product that broadcasts over them would copy the prefix.
        grouped = q.transpose(1, 2).unflatten(1, (k.shape[2], -1))  # [batch, kv_heads, group, n, d]
        shape, rows = grouped.shape[2:4], grouped.flatten(2, 3)
        scores = (torch.cat([rows @ part.transpose(-1, -2) for part in keys], -1) * q.shape[-1] ** -0.5).unflatten(2, shape)
        if self.mask is not None:
            scores = scores + self.mask
        weights = scores.softmax(-1)
        if pattern is not None:
            weights = pattern(weights.flatten(1, 2)).unflatten(1, (k.shape[2], -1))
        split = weights.split([self.prefix, self.start + self.count - self.prefix], -1)
        z = sum(w.flatten(2, 3) @ part for w, part in zip(split, values)).unflatten(2, shape)
        return z.flatten(1, 2).transpose(1, 2)

    def _places(self):
        at = torch.arange(self.start + self.count, device=self.cache.device)
        return at[self.start :], at, self.cache

    def _active(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(2, self.prefix, self.start + self.count - self.prefix)
