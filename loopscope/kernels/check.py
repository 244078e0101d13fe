"""The kernel beside its twin on a device, over drawn shapes: what `loopscope gpu-check` records."""

from __future__ import annotations

from typing import Any

import torch

from loopscope.kernels.mixed_depth import mixed_depth_attention
from loopscope.kernels.tables import RowTables
from loopscope.kernels.twin import mixed_depth_attention_twin

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# heads, key-value heads, head size, rows, cells, slots, active columns. The first is small enough for the interpreter.
_SHAPES = ((2, 1, 64, 3, 40, 3, 2), (4, 4, 96, 1, 200, 4, 0), (8, 2, 128, 17, 500, 4, 0), (4, 4, 256, 8, 300, 2, 8),
           (4, 2, 64, 33, 257, 3, 33), (55, 55, 96, 31, 2048, 32, 0), (16, 16, 128, 4, 8192, 4, 0), (55, 55, 96, 17, 1024, 32, 16))


def kernel_checks(device: torch.device | str, seed: int = 0, toy: bool = False) -> list[dict[str, Any]]:
    """One record per shape and dtype: the largest difference between kernel and twin, and whether it is within TOLERANCES.

    The twin computes in float64 from the same rounded inputs. toy: the first shape only. On a CPU Triton's interpreter runs the kernel.
    """
    records = []
    for shape in _SHAPES[:1] if toy else _SHAPES:
        for dtype, tolerance in TOLERANCES.items():
            call = _drawn(*shape, dtype, torch.device(device), seed)
            got = mixed_depth_attention(*call).double()
            expected = mixed_depth_attention_twin(*(x.double() if isinstance(x, torch.Tensor) else x for x in call))
            gap = float((got - expected).abs().max())
            names = ("heads", "kv_heads", "d_head", "rows", "cells", "slots", "active")
            records.append({**dict(zip(names, shape)), "dtype": str(dtype).removeprefix("torch."), "gap": gap, "tolerance": tolerance,
                            "ok": gap <= tolerance})
    return records


def _drawn(heads: int, kv_heads: int, d: int, n: int, cells: int, slots: int, active: int, dtype: torch.dtype, device: torch.device,
           seed: int) -> tuple:
    """q, keys, values, tables, k_active, v_active: two sequences, prefixes of all lengths, K and V from different slots."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device=device, dtype=dtype)

    def whole(high: int, low: int = 0) -> list[int]:
        return torch.randint(low, high, (n,), generator=draw).tolist()

    ends = whole(cells + 1, 1)
    ancestors = torch.rand(n, active, generator=draw) < 0.5
    tables = RowTables.make([e - 1 for e in ends], ends, whole(slots), whole(slots), sequence=whole(2), ancestors=ancestors, device=device)
    keys, values = normal(2, slots, kv_heads, cells, d), normal(2, slots, kv_heads, cells, d)
    current = (normal(active, kv_heads, d), normal(active, kv_heads, d)) if active else (None, None)
    return normal(n, heads, d), keys, values, tables, *current
