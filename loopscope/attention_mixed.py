"""How rows of several depths, branches or sequences attend in one call.

A wave whose lanes step evenly reads its K/V in place; irregular waves, branches and probes' rows gather what they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopscope.attention import PatternTap, Plan, Tensor, softmax_attention
from loopscope.errors import SettingError
from loopscope.rows import Forest, Tree, Wave

if TYPE_CHECKING:
    from loopscope.cache import DepthCache


class WavePlan(Plan):
    """Rows at consecutive positions, each in the slot of its own depth; batch 1.

    When the slots step evenly (every wave whose lanes sit d apart) the K/V of all rows are one strided view:
    nothing is copied. Otherwise rows are gathered.
    """

    def __init__(self, cache: DepthCache, rows: Wave) -> None:
        cache.check_positions(rows.start + rows.count)
        self.cache, self.start, self.count, self.end = cache, rows.start, rows.count, rows.start + rows.count
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
        z = softmax_attention(q[0].unsqueeze(2), keys, values, self.mask, False, _across_rows(pattern))  # [n, heads, 1, d]
        return z.transpose(0, 2).transpose(1, 2)

    def _places(self):
        at = torch.arange(self.end, device=self.cache.device)
        return at[self.start :], at, self.cache


class ForestPlan(Plan):
    """Rows with their own prefix_end and ancestors; reads the cache, never writes it. Slots: one, or one per row."""

    def __init__(self, cache: DepthCache, rows: Forest, k_slots: list[int], v_slots: list[int]) -> None:
        self.cache, self.at = cache, rows.at.to(cache.device)
        self.end = int(rows.prefix_end.max()) if rows.reach is None else rows.reach
        cache.check_positions(self.end)
        prefix = torch.arange(self.end, device=cache.device)[None, :] < rows.prefix_end.to(cache.device)[:, None]
        allowed = torch.cat((prefix, rows.ancestors.to(cache.device)), dim=1)
        self.mask = cache.additive(allowed)
        self.shared = len(set(k_slots)) == 1 and len(set(v_slots)) == 1
        self.slots = (k_slots[0], v_slots[0]) if self.shared else (k_slots, v_slots)

    def rotary(self, table):
        return table[self.at]

    def attend(self, cached, q, k, v, pattern=None):
        if self.shared:
            keys, values = (torch.cat((buffer[:, slot, :, : self.end], own.transpose(1, 2)), dim=2)
                            for buffer, slot, own in zip(cached, self.slots, (k, v)))
            return softmax_attention(q.transpose(1, 2), keys, values, self.mask, False, pattern).transpose(1, 2)
        n = q.shape[1]
        keys, values = (torch.cat((buffer[0, slots, :, : self.end], own[0].transpose(0, 1).expand(n, -1, -1, -1)), dim=2)
                        for buffer, slots, own in zip(cached, self.slots, (k, v)))
        z = softmax_attention(q[0].unsqueeze(2), keys, values, self.mask[:, None, None], False, _across_rows(pattern))
        return z.transpose(0, 2).transpose(1, 2)

    def _places(self):
        return self.at, torch.cat((torch.arange(self.end, device=self.at.device), self.at)), self.cache


class TreePlan(Plan):
    """Rows of branches, each in a cell of its own: the verified prefix and its ancestors' cells, at its own depth. Batch 1.

    slots: the slot of each row. All rows are written before any is read. A tree is irregular, so its rows are gathered.
    """

    def __init__(self, cache: DepthCache, rows: Tree, slots: list[int]) -> None:
        self.cache, device = cache, cache.device
        if max(rows.cells) >= cache.cells:
            raise SettingError(f"a branch needs cell {max(rows.cells)}, and this cache has {cache.cells}; make it with more spare cells")
        self.at = torch.tensor(rows.at, device=device)
        self.slots, self.cells = torch.tensor(slots, device=device), torch.tensor(rows.cells, device=device)
        # Beyond the prefix only cells in flight matter; each is a column of the mask.
        flight = sorted({c for own in rows.ancestors for c in own})
        column = {c: i for i, c in enumerate(flight)}
        self.prefix, self.flight = rows.prefix, torch.tensor(flight, device=device)
        allowed = torch.zeros(rows.count, rows.prefix + len(flight), dtype=torch.bool)
        allowed[:, : rows.prefix] = True
        for i, own in enumerate(rows.ancestors):
            allowed[i, [rows.prefix + column[c] for c in own]] = True
        self.mask = cache.additive(allowed.to(device))[:, None, None]

    def rotary(self, table):
        return table.index_select(0, self.at)

    def _place(self, buffer: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n, kv_heads, d_head]; return what they read, [n, kv_heads, prefix + in flight, d_head]."""
        buffer[0].transpose(1, 2)[self.slots, self.cells] = rows
        near = buffer[0].index_select(2, self.flight)
        return torch.cat((buffer[0, :, :, : self.prefix].index_select(0, self.slots), near.index_select(0, self.slots)), 2)

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = self._place(cached[0], k[0]), self._place(cached[1], v[0])
        z = softmax_attention(q[0].unsqueeze(2), keys, values, self.mask, False, _across_rows(pattern))
        return z.transpose(0, 2).transpose(1, 2)

    def _narrowed(self, window):
        raise SettingError("branches of drafts cannot run on a model with sliding windows; use a decoder with one branch")


class MergedPlan(Plan):
    """Rows of several sequences: everything but attention runs on all rows at once, attention on each sequence's own cache."""

    def __init__(self, plans: list[Plan], counts: list[int]) -> None:
        self.plans, self.counts = plans, counts
        self.mask = None

    def rotary(self, table):
        return torch.cat([plan.rotary(table) for plan in self.plans])

    def to(self, device, non_blocking=False):
        return MergedPlan([plan.to(device) for plan in self.plans], self.counts)

    def windowed(self, window):
        return self if window is None else MergedPlan([plan.windowed(window) for plan in self.plans], self.counts)

    def attend(self, cached, q, k, v, pattern=None):
        """cached: the K/V pair of each sequence (loopscope.merged.CacheGroup)."""
        parts, at = [], 0
        split = zip(self.plans, cached, q.split(self.counts, 1), k.split(self.counts, 1), v.split(self.counts, 1))
        for plan, own, q_, k_, v_ in split:
            parts.append(plan.attend(own, q_, k_, v_, pattern and pattern.part(at, q_.shape[1])))
            at += q_.shape[1]
        return torch.cat(parts, 1)


def _across_rows(pattern: PatternTap) -> PatternTap:
    """A tap sees [1, heads, n, L]; plans that attend row by row hold [n, heads, 1, L]."""
    return pattern and (lambda p: pattern(p.transpose(0, 2)).transpose(0, 2))
