"""The one place that decides how rows attend: built once per call, used by every layer of the call.

Each plan writes the rows' own K/V where they belong and returns views of what they read, then one softmax runs
over [prefix ; active rows]. No plan copies a prefix, except a wave of irregular depths (which gathers) and a
Forest (which probes use).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Optional

import torch
import torch.nn.functional as F

from loopscope.rows import ALIGNED, At, Chain, Forest, ReadPolicy, Rows, Wave

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
        scores = scores + mask
    return pattern(scores.softmax(-1)) @ v


class Plan:
    """How the rows of one call attend. `rotary(table)` picks their rows of a rotary table."""

    def attend(self, cached: Pair | None, q: Tensor, k: Tensor, v: Tensor, pattern: PatternTap = None) -> Tensor:
        """q [batch, n, heads, d], k, v [batch, n, kv_heads, d] -> z [batch, n, heads, d]."""
        raise NotImplementedError

    def rotary(self, table: Tensor) -> Tensor:
        raise NotImplementedError


class CausalPlan(Plan):
    """No cache: the rows are the whole sequence."""

    def __init__(self, count: int) -> None:
        self.count = count

    def rotary(self, table: Tensor) -> Tensor:
        return table[: self.count]

    def attend(self, cached, q, k, v, pattern=None):
        z = softmax_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, pattern)
        return z.transpose(1, 2)


class ChainPlan(Plan):
    """Rows at start..start+n-1, keys read and written in slot `k_slot`, values in `v_slot`.

    Under a foreign read policy the slots are those of (kappa, nu): the rows' own current K/V are written into the
    same buffers just beyond the prefix, so that one view holds [C at the policy's depth ; U current].
    """

    def __init__(self, cache: DepthCache, start: int, count: int, k_slot: int, v_slot: int) -> None:
        cache.check_positions(start + count)
        self.start, self.count, self.end = start, count, start + count
        self.k_slot, self.v_slot = k_slot, v_slot
        self.prefill = start == 0 and count > 1
        self.mask = None if count == 1 or self.prefill else cache.causal(start, count)

    def rotary(self, table):
        return table[self.start:self.end]

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = cached[0].select(1, self.k_slot), cached[1].select(1, self.v_slot)
        keys.narrow(2, self.start, self.count).copy_(k.transpose(1, 2))
        values.narrow(2, self.start, self.count).copy_(v.transpose(1, 2))
        z = softmax_attention(q.transpose(1, 2), keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end),
                              self.mask, self.prefill, pattern)
        return z.transpose(1, 2)


class WavePlan(Plan):
    """Rows at consecutive positions, each in the slot of its own depth; batch 1.

    When the slots step evenly (every wave whose lanes sit d apart) the K/V of all rows are one strided view:
    nothing is copied. Otherwise rows are gathered.
    """

    def __init__(self, cache: DepthCache, rows: Wave) -> None:
        cache.check_positions(rows.start + rows.count)
        self.start, self.count, self.end = rows.start, rows.count, rows.start + rows.count
        slots = [cache.slot(r) for r in rows.depths]
        self.step = slots[1] - slots[0]
        self.first, self.last = slots[0], slots[-1]
        self.even = self.step > 0 and all(b - a == self.step for a, b in zip(slots, slots[1:]))
        self.slots = None if self.even else torch.tensor(slots, device=cache.device)
        self.positions = None if self.even else torch.arange(self.start, self.end, device=cache.device)
        self.mask = cache.causal(self.start, self.count)[:, None, None, :]

    def rotary(self, table):
        return table[self.start:self.end]

    def _diagonal(self, buffer: Tensor) -> Tensor:
        """View [n, kv_heads, d_head] of the cells (slot of row i, position of row i)."""
        _, slot, head, position, _ = buffer.stride()
        return buffer.as_strided((self.count, buffer.shape[2], buffer.shape[4]),
                                 (self.step * slot + position, head, 1),
                                 buffer.storage_offset() + self.first * slot + self.start * position)

    def _place(self, buffer: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n, kv_heads, d_head]; return what they read, [n, kv_heads, L, d_head]."""
        if self.even:
            self._diagonal(buffer).copy_(rows)
            return buffer[0, self.first : self.last + 1 : self.step, :, : self.end]
        buffer[0].transpose(1, 2)[self.slots, self.positions] = rows
        return buffer[0, :, :, : self.end].index_select(0, self.slots)

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = self._place(cached[0], k[0]), self._place(cached[1], v[0])
        z = softmax_attention(q[0].unsqueeze(2), keys, values, self.mask, False, pattern)  # [n, heads, 1, d]
        return z.transpose(0, 2).transpose(1, 2)


class AtPlan(Plan):
    """Rows at any increasing positions of one slot (a readout of a verify row and a draft row)."""

    def __init__(self, cache: DepthCache, rows: At, slot: int) -> None:
        self.end = rows.at[-1] + 1
        cache.check_positions(self.end)
        self.positions, self.slot = rows.at, slot
        self.mask = cache.causal_at(rows.at)

    def rotary(self, table):
        return torch.stack([table[p] for p in self.positions])

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = cached[0].select(1, self.slot), cached[1].select(1, self.slot)
        for i, p in enumerate(self.positions):
            keys[:, :, p], values[:, :, p] = k[:, i], v[:, i]
        z = softmax_attention(q.transpose(1, 2), keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end),
                              self.mask, False, pattern)
        return z.transpose(1, 2)


class ForestPlan(Plan):
    """Rows with their own prefix_end and ancestors; reads the cache, never writes it."""

    def __init__(self, cache: DepthCache, rows: Forest, k_slot: int, v_slot: int) -> None:
        self.rows, self.k_slot, self.v_slot = rows, k_slot, v_slot
        self.end = int(rows.prefix_end.max())
        cache.check_positions(self.end)
        prefix = torch.arange(self.end, device=cache.device)[None, :] < rows.prefix_end.to(cache.device)[:, None]
        allowed = torch.cat((prefix, rows.ancestors.to(cache.device)), dim=1)
        self.mask = torch.zeros(allowed.shape, dtype=cache.dtype, device=cache.device).masked_fill_(~allowed, float("-inf"))

    def rotary(self, table):
        return table[self.rows.at.to(table.device)]

    def attend(self, cached, q, k, v, pattern=None):
        keys = torch.cat((cached[0][:, self.k_slot, :, : self.end], k.transpose(1, 2)), dim=2)
        values = torch.cat((cached[1][:, self.v_slot, :, : self.end], v.transpose(1, 2)), dim=2)
        z = softmax_attention(q.transpose(1, 2), keys, values, self.mask, False, pattern)
        return z.transpose(1, 2)


def core_plan(rows: Rows, cache: DepthCache | None, policy: ReadPolicy = ALIGNED) -> Plan:
    """The plan of one recurrence: each row on its own depth's K/V, or the prefix at the policy's depths."""
    if cache is None:
        return CausalPlan(rows.count)
    if isinstance(rows, Wave):
        if len(set(rows.depths)) == 1:
            rows = Chain(rows.start, rows.count, rows.depths[0])
        elif policy.aligned:
            return WavePlan(cache, rows)
        else:
            raise NotImplementedError("a wave reads each row's own depth; foreign policies run on chains")
    # A row's own depth is bounded only where it is also where it writes: a carried draft state may have run longer.
    k_slot = cache.slot(rows.depth if policy.k is None else policy.k)
    v_slot = cache.slot(rows.depth if policy.v is None else policy.v)
    if isinstance(rows, Forest):
        return ForestPlan(cache, rows, k_slot, v_slot)
    if isinstance(rows, At):
        raise NotImplementedError("recurrences run on chains, waves and forests")
    return ChainPlan(cache, rows.start, rows.count, k_slot, v_slot)


def outer_plan(rows: Rows, cache: DepthCache | None) -> Plan:
    """The plan of prelude and coda layers, which have one slot whatever the rows' depths."""
    if cache is None:
        return CausalPlan(rows.count)
    if isinstance(rows, Forest):
        return ForestPlan(cache, rows, 0, 0)
    if isinstance(rows, At):
        return AtPlan(cache, rows, 0)
    return ChainPlan(cache, rows.start, rows.count, 0, 0)
