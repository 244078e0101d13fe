"""Made-up calls: caches full of numbers, rows that read them anyhow, and what the reference says of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from loopscope.kernels import RowTables, mixed_depth_attention_twin


@dataclass(frozen=True)
class Call:
    """The sizes of one call. length: the longest prefix. kind: of active columns, "none", "current" or "cells"."""

    rows: int
    length: int
    d_head: int = 64
    kv_heads: int = 2
    shared: int = 1
    slots: int = 3
    batch: int = 1
    kind: str = "none"
    active: int = 5
    foreign: bool = False
    window: int | None = None
    rows_per_group: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32


def numbers(call: Call, device: str = "cpu") -> SimpleNamespace:
    """Tensors and tables of a call: every row has a sequence, slots and a prefix of its own, some rows nothing at all."""
    draw = torch.Generator().manual_seed(call.seed)

    def whole(high: int, n: int = call.rows) -> list[int]:
        return torch.randint(high, (n,), generator=draw).tolist()

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device, call.dtype)

    ends = [min(call.length, e) for e in whole(call.length + 2)]
    ends[0] = call.length
    starts = [0] * call.rows if call.window is None else [max(0, e - call.window) for e in ends]
    k_slot, k_own = whole(call.slots), whole(call.slots)
    v_slot, v_own = (whole(call.slots), whole(call.slots)) if call.foreign else (k_slot, k_own)
    active = {}
    if call.kind != "none":
        active["ancestors"] = torch.rand(call.rows, call.active, generator=draw) < 0.5
    if call.kind == "cells":
        active["cells"] = whole(call.length, call.active)
    tables = RowTables.make(ends, ends, k_slot, v_slot, sequence=whole(call.batch), prefix_start=starts, k_own=k_own, v_own=v_own,
                            rows_per_group=call.rows_per_group, device=device, **active)
    cache = (call.batch, call.slots, call.kv_heads, call.length, call.d_head)
    current = [values(call.active, call.kv_heads, call.d_head) for _ in range(2)] if call.kind == "current" else [None, None]
    return SimpleNamespace(q=values(call.rows, call.kv_heads * call.shared, call.d_head), keys=values(*cache), values=values(*cache),
                           tables=tables, current=current)


def deviation(call: Call, attend, device: str = "cpu", **options) -> float:
    """The largest difference between `attend` and the reference in float64, relative where that is beyond 1."""
    made = numbers(call, device)
    given = (made.q, made.keys, made.values, made.tables, *made.current)
    z, expected = attend(*given, **options), mixed_depth_attention_twin(*given, accumulate=torch.float64)
    assert z.shape == expected.shape and z.dtype == call.dtype
    off = (z.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    return float(off.max().nan_to_num(float("inf")))


@pytest.fixture(scope="session")
def calls() -> SimpleNamespace:
    """`calls.Call`, `calls.numbers(call)`, `calls.deviation(call, attend)`."""
    return SimpleNamespace(Call=Call, numbers=numbers, deviation=deviation)
