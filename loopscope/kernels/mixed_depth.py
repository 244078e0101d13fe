"""Mixed-depth attention by Triton: rows of any depths, slots, prefixes and branches in one launch, K/V read in place.

Nothing here looks at a tensor's numbers, so a call can be captured in a CUDA graph once it has been compiled by a first run;
grids come from shapes and from `bound`. On CUDA tensors the kernel is compiled; on CPU tensors Triton's interpreter runs
the same source, slowly, for tests. triton is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any, TypeVar

import torch

from loopscope.errors import SettingError
from loopscope.kernels.tables import RowTables
from loopscope.kernels.twin import check_active

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
_SHORTEST_SPAN, _MOST_SPLITS = 128, 32
_FUSED = {"enable_fp_fusion": True}  # multiply and add in one rounding: said, since Triton's default is about to change


@dataclass(frozen=True, eq=False)
class Workspace:
    """Partial softmaxes of the splits, fp32: maxima and sums [n, heads, splits], weighted values [n, heads, splits, d].

    Made once and passed to every call of the same shape, all layers included: they run one after another.
    """

    top: Tensor
    total: Tensor
    z: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, d_head: int, bound: int, active: bool = False, span: int | None = None,
             device: torch.device | str = "cuda") -> Workspace:
        """For `rows` rows that read at most the first `bound` cells, and active columns or none."""
        splits = _splits(bound, span or span_of(bound)) + active
        new = (torch.empty(rows, heads, splits, *last, dtype=torch.float32, device=device) for last in ((), (), (d_head,)))
        return cls(*new)


def span_of(bound: int) -> int:
    """Cells per split. It depends on `bound` alone, never on the rows, so that a row is summed in the same order whatever
    is computed beside it: 128 (a 2k context of 16 heads fills a GPU's processors at one row), more beyond 4k."""
    return max(_SHORTEST_SPAN, -(-bound // (_MOST_SPLITS * _SHORTEST_SPAN)) * _SHORTEST_SPAN)


def _splits(bound: int, span: int) -> int:
    return max(1, -(-bound // span))


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _where_it_lies(call: _Call) -> _Call:
    """Launch on the device of the first tensor: Triton launches on the current one, and blocks may lie on others."""
    @wraps(call)
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return call(first, *args, **kwargs)
        return call(first, *args, **kwargs)

    return run  # type: ignore[return-value]


@_where_it_lies
def mixed_depth_attention(q: Tensor, keys: Tensor, values: Tensor, tables: RowTables, k_active: Tensor | None = None,
                          v_active: Tensor | None = None, scale: float | None = None, *, bound: int | None = None,
                          span: int | None = None, out: Tensor | None = None, workspace: Workspace | None = None) -> Tensor:
    """q [n, heads, d], keys, values [batch, slots, kv_heads, cells, d] -> z [n, heads, d]: as `mixed_depth_attention_twin`.

    k_active, v_active [A, kv_heads, d]: current K/V of the active columns, unless these are cells. scale: default d ** -0.5.
    bound: no row's prefix_end exceeds it (default: all cells); a tighter one spares idle programs. span: cells per split, a
    multiple of 64 (default: span_of(bound)). out, workspace: written instead of new tensors. Softmax and sums are
    fp32; where rows are grouped, bf16 and fp16 weights are rounded to the values' dtype, as in flash attention. Raises SettingError
    for other dtypes, heads wider than 256, and shapes that do not fit.
    """
    n, heads, d = q.shape
    _, _, kv_heads, cells, _ = keys.shape
    _check(q, keys, values, tables, k_active, v_active, out)
    z = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if not n:
        return z
    bound = cells if bound is None else min(bound, cells)
    span = span or span_of(bound)
    splits, active = _splits(bound, span), tables.active
    total = splits + (active > 0)
    workspace = workspace or Workspace.make(n if total > 1 else 0, heads, d, bound, active > 0, span, q.device)
    if total > 1 and (workspace.top.shape[2] != total or workspace.top.shape[0] < n or workspace.z.shape[3] != d):
        raise SettingError(f"the workspace is for {list(workspace.z.shape)} rows, heads, splits and channels; these rows need "
                           f"{[n, heads, total, d]}: make it with Workspace.make and the same bound, span and kind of active columns")
    kernels = _kernels(q.device.type)
    shared, per_line = heads // kv_heads, tables.groups.shape[1]
    attend, fixed = kernels.attend_split_alone, _constants(d, q.dtype) | {"TOTAL": total, "SPAN": span}
    if shared * per_line > 1:
        attend, fixed = kernels.attend_split, fixed | _grouped_constants(shared, per_line, d, q.dtype)
        fixed["WIDEN"] = q.device.type == "cpu" and q.dtype == torch.bfloat16
    scale = d ** -0.5 if scale is None else scale
    lines = tables.groups.shape[0]
    seen = tables.ancestors.view(torch.uint8)

    def launch(k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, first: int, grid: int, **flags: Any) -> None:
        attend[(lines, kv_heads, grid)](
            q, k, v, z, workspace.top, workspace.total, workspace.z, tables.sequence, tables.prefix_start, tables.prefix_end,
            k_slots, v_slots, seen, tables.cells if tables.cells is not None else tables.groups, tables.groups, scale, active, heads, first,
            *q.stride()[:2], *k.stride()[:4], *v.stride()[:4], *z.stride()[:2], DIRECT=total == 1, **flags, **fixed)

    launch(keys, values, tables.k_slot, tables.v_slot, 0, splits, ACTIVE=False, HAS_CELLS=False)
    if active:
        if tables.cells is not None:
            launch(keys, values, tables.k_own, tables.v_own, splits, 1, ACTIVE=True, HAS_CELLS=True)
        else:
            near = (_as_cache(t) for t in (k_active, v_active))  # type: ignore[arg-type]
            launch(*near, tables.k_own, tables.v_own, splits, 1, ACTIVE=True, HAS_CELLS=False)
    if total > 1:
        kernels.merge_splits[(n, heads)](
            z, workspace.top, workspace.total, workspace.z, tables.prefix_start, tables.prefix_end, heads, splits, *z.stride()[:2],
            TOTAL=total, SPAN=span, D=d, BLOCK_D=fixed["BLOCK_D"], BLOCK_SPLITS=_power(total), num_warps=4, **_FUSED)
    return z


@_where_it_lies
def place_rows(keys: Tensor, values: Tensor, tables: RowTables, k: Tensor, v: Tensor) -> None:
    """`write_rows` as one launch: the rows' own K/V [n, kv_heads, d] into the cache, before anything is read."""
    if tables.cell is None or not tables.count:
        return
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    _kernels(keys.device.type).place_rows[(tables.count, keys.shape[2])](
        keys, values, k, v, tables.sequence, tables.k_own, tables.v_own, tables.cell, *keys.stride()[:4], *values.stride()[:4],
        *k.stride()[:2], *v.stride()[:2], D=keys.shape[-1], BLOCK_D=_power(keys.shape[-1]), num_warps=1, **_FUSED)


# ---- helpers ------------------------------------------------------------------------------------------------------------


def _as_cache(active: Tensor) -> Tensor:
    """[A, kv_heads, d] as a cache [batch, slots, kv_heads, cells, d] in which every sequence and slot is the same."""
    active = active if active.stride(-1) == 1 else active.contiguous()
    return active.transpose(0, 1)[None, None].as_strided((1, 1, *active.shape[1::-1], active.shape[2]),
                                                         (0, 0, active.stride(1), active.stride(0), 1))


def _constants(d: int, dtype: torch.dtype) -> dict[str, Any]:
    wide = max(16, _power(d))
    return {"D": d, "BLOCK_D": wide, "BLOCK": 32 if wide * dtype.itemsize >= 512 else 64, "num_warps": 4, "num_stages": 2,
            **_FUSED}


def _grouped_constants(shared: int, rows: int, d: int, dtype: torch.dtype) -> dict[str, Any]:
    """Lanes are padded to the 16 that tensor cores need."""
    lanes = max(16, _power(shared * rows))
    return {"PRECISE": dtype == torch.float32, "SHARED": shared, "ROWS": rows, "LANES": lanes,
            "num_warps": 8 if lanes * _power(d) >= 8192 else 4}


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _check(q: Tensor, keys: Tensor, values: Tensor, tables: RowTables, k_active: Tensor | None, v_active: Tensor | None,
           out: Tensor | None) -> None:
    if q.dtype not in DTYPES or keys.dtype != q.dtype or values.dtype != q.dtype:
        raise SettingError(f"the mixed-depth kernel runs in float32, bfloat16 or float16, one for queries, keys and values; got {q.dtype}, "
                           f"{keys.dtype} and {values.dtype}; the torch path runs in any (LOOPSCOPE_KERNEL=torch)")
    d = q.shape[-1]
    if d > LARGEST_HEAD or keys.shape[-1] != d or values.shape != keys.shape or q.shape[1] % keys.shape[2]:
        raise SettingError(f"queries [n, heads, d] with d up to {LARGEST_HEAD} need keys and values [batch, slots, kv_heads, cells, d], "
                           f"heads a multiple of kv_heads; got {list(q.shape)}, {list(keys.shape)} and {list(values.shape)}")
    if tables.count != q.shape[0]:
        raise SettingError(f"{q.shape[0]} query rows were given, and row tables of {tables.count}")
    if any(t.stride(-1) != 1 for t in (q, keys, values)) or (out is not None and (out.stride(-1) != 1 or out.shape != q.shape)):
        raise SettingError("the channels of queries, keys, values and out must lie next to each other in memory, and out have the queries' "
                           "shape; pass contiguous tensors")
    check_active(tables, k_active, v_active)
    for near in (k_active, v_active):
        if near is not None and (near.dtype != q.dtype or near.shape[1:] != (keys.shape[2], d)):
            raise SettingError(f"active K/V must be [active, kv_heads, d] = [{tables.active}, {keys.shape[2]}, {d}] in {q.dtype}, got "
                               f"{list(near.shape)} in {near.dtype}")


class _Kernels:
    """The functions of a source module, compiled at their first call or interpreted."""

    def __init__(self, interpret: bool, source: ModuleType | None = None) -> None:
        try:
            import triton
            if source is None:
                from loopscope.kernels import source
        except ImportError as error:
            raise SettingError(f"the mixed-depth kernel needs triton, which cannot be imported here ({error}); install triton, or use the "
                               "torch path (LOOPSCOPE_KERNEL=torch)") from None
        if interpret:  # whether or not TRITON_INTERPRET was set when triton was first imported, by whomever
            from triton.runtime.interpreter import InterpretedFunction as wrap
        else:
            wrap = triton.JITFunction
        counts = ["active", "first_split"]
        still = {"attend_split": counts, "attend_split_alone": counts, "merge_splits": ["splits"], "place_rows": []}
        for name, unspecialised in still.items():
            setattr(self, name, wrap(getattr(source, name), do_not_specialize=unspecialised))


@lru_cache
def _kernels(device: str) -> Any:
    return _Kernels(interpret=device == "cpu")
