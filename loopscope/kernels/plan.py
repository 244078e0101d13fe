"""A plan that attends by row tables instead of views and masks, and the setting that asks for it.

LOOPSCOPE_KERNEL, or `use_kernel` for a stretch of code:
    torch       the plans of loopscope/attention.py (the default)
    triton      the Triton kernel on CUDA in float32, bfloat16 and float16; elsewhere as torch
    twin        the plain reference, on any device and dtype: for tests
    interpret   the Triton kernel by its interpreter, on CPU: for tests, very slow
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING

import torch

from loopscope.attention import Plan
from loopscope.errors import SettingError, closest
from loopscope.kernels.mixed_depth import DTYPES, Workspace, mixed_depth_attention, place_rows, span_of
from loopscope.kernels.static_tables import static_tables
from loopscope.kernels.tables import tables_of
from loopscope.kernels.twin import mixed_depth_attention_twin, write_rows
from loopscope.rows import Chain, Forest, ReadPolicy, Rows
from loopscope.static_rows import Static

if TYPE_CHECKING:
    from loopscope.cache import DepthCache

KERNELS = ("torch", "triton", "twin", "interpret")
VARIABLE = "LOOPSCOPE_KERNEL"
LONG_CHAIN = 64  # rows: from here on a chain is bound by arithmetic, which torch's own fused attention does best
_asked: ContextVar[str] = ContextVar("loopscope_kernel", default=os.environ.get(VARIABLE) or "torch")  # looked up at every call


def chosen_kernel() -> str:
    """One of KERNELS: of the innermost `use_kernel`, or of the environment at the start. Raises SettingError for another name."""
    name = _asked.get()
    if name not in KERNELS:
        raise SettingError(f"{VARIABLE}={name} is no way to attend; use one of {', '.join(KERNELS)}"
                           + (f" (closest: {near})" if (near := closest(name, KERNELS, 1)) else ""))
    return name


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Attend by one of KERNELS inside the `with`. Raises SettingError for another name."""
    before = _asked.set(name)
    try:
        chosen_kernel()
        yield
    finally:
        _asked.reset(before)


def tabled(rows: Rows | Static, cache: DepthCache, policy: ReadPolicy, outer: bool, plain: Plan) -> Plan:
    """The plan of a call by the chosen kernel; `plain`, that of the torch path, where it is to attend after all."""
    kernel = chosen_kernel()
    if kernel == "torch":
        return plain
    if kernel == "triton":
        if cache.device.type != "cuda" or cache.dtype not in DTYPES or (isinstance(rows, Chain) and rows.count > LONG_CHAIN):
            return plain
    return TabledPlan(rows, cache, policy, outer, kernel, plain)


class TabledPlan(Plan):
    """The rows of one call by their tables. A tap on the attention pattern is shown the plain plan's: a kernel has no pattern."""

    def __init__(self, rows: Rows | Static, cache: DepthCache, policy: ReadPolicy, outer: bool, kernel: str, plain: Plan,
                 window: int | None = None) -> None:
        self.rows, self.cache, self.policy, self.outer, self.kernel, self.plain = rows, cache, policy, outer, kernel, plain
        self.mask = None
        build = static_tables if isinstance(rows, Static) else tables_of
        self.tables = build(rows, cache, policy, outer=outer, window=window)  # type: ignore[arg-type]
        self.bound = cache.capacity if isinstance(rows, Forest) else max(rows.positions) + 1  # no row's prefix ends behind it
        self.span = span_of(cache.capacity)  # equal splits in every call on this cache, whatever its rows
        self.workspace: Workspace | None = None

    def rotary(self, table):
        return self.plain.rotary(table)

    def to(self, device, non_blocking=False):
        if self.tables.position.device == device:
            return self
        other = copy(self)
        other.tables, other.plain, other.workspace = self.tables.to(device), self.plain.to(device), None
        return other

    def _narrowed(self, window):
        return TabledPlan(self.rows, self.cache, self.policy, self.outer, self.kernel, self.plain.windowed(window), window)

    def attend(self, cached, q, k, v, pattern=None):
        if pattern is not None:
            return self.plain.attend(cached, q, k, v, pattern)
        keys, values = cached
        z = self._attend(keys, values, *(t.flatten(0, 1) for t in (q, k, v)))
        return z.unflatten(0, q.shape[:2])

    def _attend(self, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tables = self.tables
        if self.kernel == "twin":
            write_rows(keys, values, tables, k, v)
            return mixed_depth_attention_twin(q, keys, values, tables, k, v)
        if self.workspace is None:  # of all layers of the call
            self.workspace = Workspace.make(*q.shape, self.bound, tables.active > 0, self.span, q.device)
        place_rows(keys, values, tables, k, v)
        return mixed_depth_attention(q, keys, values, tables, k, v, bound=self.bound, span=self.span, workspace=self.workspace)
