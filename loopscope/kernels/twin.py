"""The plain reference of mixed-depth attention: what the kernel must compute, row by row, for reading rather than for speed."""

from __future__ import annotations

import torch

from loopscope.errors import SettingError
from loopscope.kernels.tables import RowTables

Tensor = torch.Tensor


def mixed_depth_attention_twin(q: Tensor, keys: Tensor, values: Tensor, tables: RowTables, k_active: Tensor | None = None,
                               v_active: Tensor | None = None, scale: float | None = None, *,
                               accumulate: torch.dtype | None = None) -> Tensor:
    """q [n, heads, d], keys, values [batch, slots, kv_heads, cells, d] -> [n, heads, d] in q's dtype.

    k_active, v_active [A, kv_heads, d]: the current K/V that `tables.ancestors` is about, unless it is about cells.
    scale: of the scores, default d ** -0.5. accumulate: dtype of the arithmetic, default that of q. A row that reads nothing
    gives zeros. Raises SettingError where active columns have no K/V.
    """
    check_active(tables, k_active, v_active)
    scale, dtype = q.shape[-1] ** -0.5 if scale is None else scale, accumulate or q.dtype
    shared = q.shape[1] // keys.shape[2]  # query heads of one key head
    z = torch.zeros_like(q)
    for row in range(tables.count):
        k, v = _reads(row, tables, keys, values, k_active, v_active)  # [kv_heads, L, d]
        if k.shape[1] == 0:
            continue
        k, v = (t.to(dtype).repeat_interleave(shared, dim=0) for t in (k, v))
        scores = (k @ q[row].to(dtype)[:, :, None])[..., 0] * scale  # [heads, L]
        z[row] = (scores.softmax(-1)[:, None] @ v)[:, 0].to(q.dtype)
    return z


def _reads(row: int, tables: RowTables, keys: Tensor, values: Tensor, k_active: Tensor | None, v_active: Tensor | None
           ) -> tuple[Tensor, Tensor]:
    """What one row reads, [kv_heads, L, d] each: its stretch of the cache, then the active columns among its ancestors."""
    b, start, end = int(tables.sequence[row]), int(tables.prefix_start[row]), int(tables.prefix_end[row])
    k = keys[b, int(tables.k_slot[row]), :, start:end]
    v = values[b, int(tables.v_slot[row]), :, start:end]
    seen = tables.ancestors[row].nonzero()[:, 0]
    if not len(seen):
        return k, v
    if tables.cells is not None:
        at = tables.cells[seen].long()
        k_near, v_near = keys[b, int(tables.k_own[row]), :, at], values[b, int(tables.v_own[row]), :, at]
    else:
        assert k_active is not None and v_active is not None
        k_near, v_near = k_active[seen].transpose(0, 1), v_active[seen].transpose(0, 1)
    return torch.cat((k, k_near), 1), torch.cat((v, v_near), 1)


def check_active(tables: RowTables, k_active: Tensor | None, v_active: Tensor | None) -> None:
    """SettingError unless the active columns have K/V: cells of the cache, or current ones, one per column."""
    if tables.cells is not None or not tables.active:
        return
    for name, given in (("k_active", k_active), ("v_active", v_active)):
        if given is None or given.shape[0] != tables.active:
            found = "none" if given is None else f"{given.shape[0]} rows"
            raise SettingError(f"these rows read {tables.active} active rows of the call itself; {name} must hold as many, got {found}")


def write_rows(keys: Tensor, values: Tensor, tables: RowTables, k: Tensor, v: Tensor) -> None:
    """Put the rows' own K/V [n, kv_heads, d] into the cache's buffers, at (sequence, own slot, cell); nowhere without `cell`.

    One indexed copy each: no look at the data, so it can be captured in a graph.
    """
    if tables.cell is None:
        return
    keys.transpose(2, 3)[tables.sequence, tables.k_own, tables.cell] = k
    values.transpose(2, 3)[tables.sequence, tables.v_own, tables.cell] = v
