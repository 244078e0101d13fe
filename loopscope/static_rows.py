"""Rows whose places are data: a call on them can be captured once and replayed at any position.

    rows = Static(at, cell, reach, (1, 1, 1))           at, cell [3] on the device
    state = core.recur(state, x, rows, cache)

A plan of ordinary rows (loopscope/attention.py) holds positions as Python numbers: views and masks are cut to them, which is the
cheapest way to attend, and would be frozen into a CUDA graph. Here only what belongs to a decoder's phase is a number: how many rows
there are, at which depths, and a bound on how far any of them reads. Where they stand is read from the tensors at every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from loopscope.attention import Plan, Tensor, softmax_attention
from loopscope.errors import SettingError
from loopscope.rows import ALIGNED, ReadPolicy

if TYPE_CHECKING:
    from loopscope.cache import DepthCache


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """Rows at positions that lie on the device; batch 1.

    at [n] (int64): the position of each row; it reads the cells 0..at of its slot. cell [n] (int64): where its K/V are written:
    `at`, or a scratch cell for a spare row, which fills up a bucket: what it computes is finite and read by nobody. reach: no row
    reads beyond the first `reach` cells. depths_: of each row; all equal, or evenly falling. shared: what the calls of one phase
    have in common (mask, rotary angles), made by the first that asks.
    """

    at: Tensor
    cell: Tensor
    reach: int
    depths_: tuple[int, ...]
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, at: Tensor, valid: Tensor, scratch: int, reach: int, depths: tuple[int, ...]) -> Static:
        """Rows at `at` where `valid` [n] (bool), and spare ones elsewhere."""
        return cls(at.masked_fill(~valid, 0), at.masked_fill(~valid, scratch), reach, depths)

    @property
    def count(self) -> int:
        return len(self.depths_)

    @property
    def positions(self) -> list[int]:
        """Only how far they may stand is known to the host: the last position within reach."""
        return [self.reach - 1]

    @property
    def depths(self) -> list[int]:
        return list(self.depths_)

    def at_depths(self, depths: tuple[int, ...]) -> Static:
        """The same rows at other depths."""
        return Static(self.at, self.cell, self.reach, depths, self.shared)

    def part(self, picked: list[int], reach: int | None = None) -> Static:
        """Some of the rows, by a slice where they step evenly."""
        step = picked[1] - picked[0] if len(picked) > 1 else 1
        even = slice(picked[0], picked[-1] + 1, step)
        assert list(range(*even.indices(self.count))) == picked
        return Static(self.at[even], self.cell[even], reach or self.reach, tuple(self.depths_[i] for i in picked))

    def known(self, what: Any, make: Callable[[], Any]) -> Any:
        if what not in self.shared:
            self.shared[what] = make()
        return self.shared[what]


class StaticPlan(Plan):
    """Rows read from tensors; their slots are numbers, equal or evenly stepping, so that K/V are read in place."""

    causal = False

    def __init__(self, cache: DepthCache, rows: Static, k_slots: list[int], v_slots: list[int], window: int | None = None) -> None:
        self.cache, self.rows, self.window = cache, rows, window
        self.k_slots, self.v_slots = _stepping(k_slots), _stepping(v_slots)
        self.one_slot = self.k_slots.stop == self.k_slots.start + 1 and self.v_slots.stop == self.v_slots.start + 1
        self.mask = rows.known(("mask", window), self._make_mask)

    def _make_mask(self) -> Tensor:
        cells, at = torch.arange(self.rows.reach, device=self.cache.device), self.rows.at[:, None]
        allowed = cells <= at
        if self.window is not None:
            allowed &= at - cells < self.window
        return torch.zeros(allowed.shape, dtype=self.cache.dtype, device=self.cache.device).masked_fill(~allowed, float("-inf"))

    def rotary(self, table):
        return self.rows.known(("angles", id(table)), lambda: table.index_select(0, self.rows.at))

    def _narrowed(self, window):
        other = copy(self)
        other.window = window
        other.mask = self.rows.known(("mask", window), other._make_mask)
        return other

    def attend(self, cached, q, k, v, pattern=None):
        rows = self.rows
        if self.one_slot:
            keys, values = cached[0].select(1, self.k_slots.start), cached[1].select(1, self.v_slots.start)
            keys.index_copy_(2, rows.cell, k.transpose(1, 2))
            values.index_copy_(2, rows.cell, v.transpose(1, 2))
            keys, values = keys.narrow(2, 0, rows.reach), values.narrow(2, 0, rows.reach)
            return softmax_attention(q.transpose(1, 2), keys, values, self.mask, False, pattern).transpose(1, 2)
        keys, values = (self._place(buffer[0, slots], own[0]) for buffer, slots, own in
                        zip(cached, (self.k_slots, self.v_slots), (k, v)))
        z = softmax_attention(q[0].unsqueeze(2), keys, values, self.mask[:, None, None], False, pattern)
        return z.transpose(0, 2).transpose(1, 2)

    def _place(self, buffer: Tensor, own: Tensor) -> Tensor:
        """Row i into its cell of buffer[i]; buffer [n, kv_heads, cells, d_head], own [n, kv_heads, d_head]. What the rows read."""
        which = self.rows.known("which", lambda: torch.arange(self.rows.count, device=own.device))
        buffer.transpose(1, 2)[which, self.rows.cell] = own
        return buffer[:, :, : self.rows.reach]

    def to(self, device, non_blocking=False):
        if device == self.cache.device:
            return self
        raise SettingError("a static decode runs on one device, and this model's blocks lie on several; decode it without static=True")


def _stepping(slots: list[int]) -> slice:
    """Slots of consecutive rows as a slice: one slot for all, or one step from each to the next. Raises SettingError for others."""
    step = slots[1] - slots[0] if len(slots) > 1 else 0
    if step == 0 and len(set(slots)) == 1:
        return slice(slots[0], slots[0] + 1)
    if step < 1 or any(b - a != step for a, b in zip(slots, slots[1:])):
        raise SettingError(f"static rows lie in one slot or in evenly rising ones, not in {slots}; run them as a Wave or a Tree")
    return slice(slots[0], slots[-1] + 1, step)


def static_core_plan(rows: Static, cache: DepthCache, policy: ReadPolicy = ALIGNED) -> StaticPlan:
    """The plan of one recurrence of static rows."""
    _check(rows, cache)
    k_slots, v_slots = ([cache.slot(r if read is None else read) for r in rows.depths_] for read in (policy.k, policy.v))
    return StaticPlan(cache, rows, k_slots, v_slots)


def static_outer_plan(rows: Static, cache: DepthCache) -> StaticPlan:
    """The plan of prelude and coda layers."""
    _check(rows, cache)
    return StaticPlan(cache, rows, [0] * rows.count, [0] * rows.count)


def _check(rows: Static, cache: DepthCache) -> None:
    cache.check_positions(rows.reach)
    if cache.batch != 1 or not cache.cells > cache.capacity:
        raise SettingError("static rows need a cache of one sequence with a spare cell to write to where a row is not used, as "
                           f"make_cache(..., spare=1) gives; this one holds {cache.batch} sequence(s) and has "
                           f"{cache.cells - cache.capacity} cells to spare")
