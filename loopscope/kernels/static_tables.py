"""Row tables of static rows (loopscope/static_rows.py): made on the device from tensors alone, so that a graph makes them anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopscope.kernels.tables import MOST_ROWS_PER_GROUP, RowTables
from loopscope.rows import ALIGNED, ReadPolicy

if TYPE_CHECKING:
    from loopscope.cache import DepthCache
    from loopscope.static_rows import Static


def static_tables(rows: Static, cache: DepthCache, policy: ReadPolicy = ALIGNED, *, outer: bool = False,
                  window: int | None = None) -> RowTables:
    """The tables of a static call; `rows.at` and `rows.cell` are read on the device, slots are numbers of the phase.

    Made once for all layers, and what does not depend on the depth once for all recurrences of a phase. A row of each slot
    where the slots differ, and lines of up to MOST_ROWS_PER_GROUP where all rows share one.
    """
    k_slots, v_slots = _slots(rows, cache, policy, outer)

    def make() -> RowTables:
        n, device = rows.count, cache.device
        place = rows.known(("places", window), lambda: _places(rows, window, device))
        k_slot, v_slot = (_stepping(slots, device) for slots in (k_slots, v_slots))
        together = len(set(k_slots)) == len(set(v_slots)) == 1
        groups = rows.known(("groups", together, n), lambda: _lines(n, MOST_ROWS_PER_GROUP if together else 1, device))
        return RowTables(**place, k_slot=k_slot, v_slot=v_slot, k_own=k_slot, v_own=v_slot, groups=groups)

    return rows.known(("tables", k_slots, v_slots, window), make)


def _slots(rows: Static, cache: DepthCache, policy: ReadPolicy, outer: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if outer:
        return (0,) * rows.count, (0,) * rows.count
    k, v = (tuple(cache.slot(r if read is None else read) for r in rows.depths_) for read in (policy.k, policy.v))
    return k, v


def _places(rows: Static, window: int | None, device: torch.device) -> dict[str, torch.Tensor]:
    at = rows.at.to(torch.int32)
    none = torch.zeros_like(at)
    start = none if window is None else (at - (window - 1)).clamp(min=0)
    return {"sequence": none, "position": at, "prefix_start": start, "prefix_end": at + 1, "cell": rows.cell.to(torch.int32),
            "ancestors": torch.zeros(rows.count, 0, dtype=torch.bool, device=device)}


def _stepping(slots: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Slots of consecutive rows, equal or one step apart, without a copy from the host (which no graph may hold)."""
    step = slots[1] - slots[0] if len(slots) > 1 else 0
    return torch.arange(len(slots), dtype=torch.int32, device=device) * step + slots[0]


def _lines(n: int, most: int, device: torch.device) -> torch.Tensor:
    """Rows 0..n-1 in lines of equal length, -1 behind the last."""
    most = min(most, 1 << (n - 1).bit_length())
    lines = -(-n // most)
    row = torch.arange(lines * most, dtype=torch.int32, device=device)
    return row.masked_fill(row >= n, -1).view(lines, most)
