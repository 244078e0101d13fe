"""Row tables: which keys and values each row of a call reads, as small integer tensors on the device.

A plan (loopscope/attention.py) knows this as views and masks; a kernel, or a captured graph, needs it as data that can be
rewritten in place while shapes stay. The rule is docs/algorithms.md, section 1: one softmax over [C ; U], where C is a
stretch of the cache at (k_slot, v_slot) and U the active rows among a row's ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

import torch

from loopscope.errors import SettingError
from loopscope.rows import ALIGNED, At, Chain, Draft, Forest, ReadPolicy, Rows, Tree, Wave

if TYPE_CHECKING:
    from loopscope.cache import DepthCache

Tensor = torch.Tensor
MOST_ROWS_PER_GROUP = 16  # of one head: what a tensor core's smallest tile holds


@dataclass(frozen=True, eq=False)
class RowTables:
    """What the rows of one call read, all int32 on one device; n rows, A active columns. Static shapes: rewrite with `copy_`.

    sequence [n]: batch index in the cache. position [n]: the row's own, for rotary embedding and windows.
    prefix_start, prefix_end [n]: the row reads the cells prefix_start <= c < prefix_end of its sequence, keys in slot k_slot
    and values in slot v_slot [n]. A row that reads nothing (0, 0, no ancestors) costs nothing and gives zeros: that is how a
    bucket is filled up.
    ancestors [n, A] (bool): the active columns that the row reads besides. Column a is row a of `k_active`, `v_active` that the
    call is given, or, where `cells` [A] is set, cell cells[a] of the row's sequence, in the row's own slots k_own, v_own [n].
    cell [n]: where the row's own K/V are written, at (k_own, v_own), before anything is read; None: nowhere.
    groups [G, B]: the same rows, each exactly once, by the K/V they share (-1: none): all rows of a line have equal sequence,
    k_slot, v_slot, k_own and v_own, and what they read is loaded once.

    A row in flight whose K/V lie in the cache at its own position (chains, waves: also DAS-Wave's, which writes into the
    slots that the policy reads) needs no active column: it is written first and prefix_end is its position + 1.
    """

    sequence: Tensor
    position: Tensor
    prefix_start: Tensor
    prefix_end: Tensor
    k_slot: Tensor
    v_slot: Tensor
    k_own: Tensor
    v_own: Tensor
    ancestors: Tensor
    groups: Tensor
    cell: Tensor | None = None
    cells: Tensor | None = None

    @property
    def count(self) -> int:
        return self.position.shape[0]

    @property
    def active(self) -> int:
        """How many active columns there are."""
        return self.ancestors.shape[1]

    @classmethod
    def make(cls, position: Sequence[int], prefix_end: Sequence[int], k_slot: Sequence[int], v_slot: Sequence[int] | None = None, *,
             sequence: Sequence[int] | None = None, prefix_start: Sequence[int] | None = None, k_own: Sequence[int] | None = None,
             v_own: Sequence[int] | None = None, ancestors: Tensor | None = None, cell: Sequence[int] | None = None,
             cells: Sequence[int] | None = None, rows_per_group: int | None = None, device: torch.device | str = "cpu") -> RowTables:
        """Tables from numbers that the host knows; nothing is read back from the device.

        Defaults: sequence 0, prefix_start 0, v_slot = k_slot, k_own = k_slot, v_own = v_slot, no active columns, nothing
        written. rows_per_group: B of `groups`; None: as many as share their K/V, up to MOST_ROWS_PER_GROUP. Raises
        SettingError for columns of different lengths.
        """
        n = len(position)
        v_slot = k_slot if v_slot is None else v_slot
        columns: dict[str, Sequence[int]] = {
            "sequence": [0] * n if sequence is None else sequence, "position": position,
            "prefix_start": [0] * n if prefix_start is None else prefix_start, "prefix_end": prefix_end, "k_slot": k_slot, "v_slot": v_slot,
            "k_own": k_slot if k_own is None else k_own, "v_own": v_slot if v_own is None else v_own}
        if cell is not None:
            columns["cell"] = cell
        for name, column in columns.items():
            if len(column) != n:
                raise SettingError(f"row tables hold one entry per row: {n} positions were given and {len(column)} entries of {name}")
        tables = {name: torch.tensor(column, dtype=torch.int32) for name, column in columns.items()}
        ancestors = torch.zeros(n, 0, dtype=torch.bool) if ancestors is None else ancestors.to(torch.bool)
        if ancestors.ndim != 2 or ancestors.shape[0] != n or (cells is not None and len(cells) != ancestors.shape[1]):
            raise SettingError(f"ancestors is [rows, active columns], here [{n}, {'any' if cells is None else len(cells)}], got "
                               f"{list(ancestors.shape)}")
        shared = [tables[name] for name in ("sequence", "k_slot", "v_slot", "k_own", "v_own")]
        largest = int(torch.stack(shared).unique(dim=1, return_counts=True)[1].max()) if n else 1
        groups = group_rows(*shared, rows=rows_per_group or min(MOST_ROWS_PER_GROUP, 1 << (largest - 1).bit_length()))
        tables["groups"] = groups[: int((groups[:, 0] >= 0).sum())]
        if cells is not None:
            tables["cells"] = torch.tensor(cells, dtype=torch.int32)
        return cls(**tables, ancestors=ancestors).to(device)

    def to(self, device: torch.device | str) -> RowTables:
        """These tables on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return RowTables(**{name: t if t is None else t.to(device) for name, t in moved.items()})

    def copy_(self, other: RowTables) -> RowTables:
        """Take over the numbers of tables of the same shapes, in place: what a captured graph reads anew at its next replay."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine is not None:
                mine.copy_(theirs)
        return self


def group_rows(sequence: Tensor, k_slot: Tensor, v_slot: Tensor, k_own: Tensor, v_own: Tensor, rows: int) -> Tensor:
    """Lines of up to `rows` rows that share all five numbers: [n] each -> [n, rows] (int32), -1 where a line has no further row.

    Computed on the device from static shapes, without a look at the data: a captured graph can group anew at each replay. Lines
    come first, empty ones after them; where the host knows how many there are, cut them off, or each costs an idle program.
    """
    n, device = sequence.shape[0], sequence.device
    order = torch.arange(n, device=device)
    for column in (v_own, k_own, v_slot, k_slot, sequence):  # least significant first: each sort is stable
        order = order[column[order].argsort(stable=True)]
    new = torch.zeros(n, dtype=torch.bool, device=device)
    for column in (sequence, k_slot, v_slot, k_own, v_own):
        of = column[order]
        new[1:] |= of[1:] != of[:-1]
    new[:1] = True
    at = torch.arange(n, device=device)
    rank = at - torch.where(new, at, 0).cummax(0).values  # place within the run of equal rows
    line = (rank % rows == 0).cumsum(0) - 1
    groups = torch.full((n, rows), -1, dtype=torch.int32, device=device)
    groups[line, rank % rows] = order.to(torch.int32)
    return groups


def tables_of(rows: Rows, cache: DepthCache, policy: ReadPolicy = ALIGNED, *, outer: bool = False, window: int | None = None,
              rows_per_group: int | None = None) -> RowTables:
    """The tables of one call's rows; a batch of B sequences has B * n of them, sequence after sequence.

    outer: of prelude and coda layers, which have one slot. window: a row reads the last `window` positions only, its own
    included. The settings are those that `core_plan` and `outer_plan` accept; Merged rows have a cache each, so ask part by
    part (SettingError).
    """
    build = _BUILDERS.get(type(rows))
    if build is None:
        raise SettingError(f"row tables are of one cache, and {type(rows).__name__} rows have several; make them part by part")
    drawn = build(rows, cache, policy, outer)
    batch, n, position = cache.batch, rows.count, drawn["position"]
    columns = {name: column * batch for name, column in drawn.items() if name not in ("starts", "ancestors", "cells", "active_at")}
    starts = drawn.get("starts") or [0] * (batch * n)
    if window is not None:
        starts = [max(low, p - window + 1) for low, p in zip(starts, position * batch)]
    ancestors, cells = drawn.get("ancestors"), drawn.get("cells")
    if ancestors is not None:
        if window is not None:
            ancestors = ancestors & (torch.tensor(position)[:, None] - torch.tensor(drawn["active_at"]) < window)
        # Cells are read in each row's own sequence; rows of the call itself stand behind one another.
        ancestors = ancestors.repeat(batch, 1) if cells is not None else torch.block_diag(*[ancestors.int()] * batch).bool()
    return RowTables.make(**columns, sequence=[b for b in range(batch) for _ in range(n)], prefix_start=starts, ancestors=ancestors,
                          cells=cells, rows_per_group=rows_per_group, device=cache.device)


# ---- one builder for each kind of rows: columns of one sequence ---------------------------------------------------------


def _read_slots(cache: DepthCache, policy: ReadPolicy, depths: Sequence[int], outer: bool) -> tuple[list[int], ...]:
    if outer:
        return [0] * len(depths), [0] * len(depths)
    # The row's own depth is looked up only where it is read: a carried draft state may have run deeper than the cache.
    return tuple([cache.slot(r if read is None else read) for r in depths] for read in (policy.k, policy.v))


def _chain(rows: Chain | At, cache: DepthCache, policy: ReadPolicy, outer: bool) -> dict:
    at, prefix = rows.positions, getattr(rows, "prefix", 0)
    k_slot, v_slot = _read_slots(cache, policy, rows.depths, outer)
    ends = [prefix if p < prefix else p + 1 for p in at]
    out = {"position": at, "prefix_end": ends, "k_slot": k_slot, "v_slot": v_slot, "cell": at}
    if pads := getattr(rows, "pads", ()):
        out["starts"] = [min(first, p) for first in pads for p in at]  # a pad reads itself alone
    return out


def _wave(rows: Wave, cache: DepthCache, policy: ReadPolicy, outer: bool) -> dict:
    slots = [0] * rows.count if outer else [cache.slot(r) for r in rows.depths]
    return {"position": rows.positions, "prefix_end": [p + 1 for p in rows.positions], "k_slot": slots, "v_slot": slots,
            "cell": rows.positions}


def _draft(rows: Draft, cache: DepthCache, policy: ReadPolicy, outer: bool) -> dict:
    if outer:
        return _chain(Chain(rows.start, rows.count), cache, ALIGNED, outer)
    k_slot, v_slot = _read_slots(cache, policy, rows.depths, outer)
    own, flight = [cache.slot(rows.depth)] * rows.count, list(range(rows.prefix, rows.start + rows.count))
    seen = torch.tensor(flight) <= torch.tensor(rows.positions)[:, None]
    return {"position": rows.positions, "prefix_end": [rows.prefix] * rows.count, "k_slot": k_slot, "v_slot": v_slot, "k_own": own,
            "v_own": own, "cell": rows.positions, "ancestors": seen, "cells": flight, "active_at": flight}


def _forest(rows: Forest, cache: DepthCache, policy: ReadPolicy, outer: bool) -> dict:
    k_slot, v_slot = _read_slots(cache, policy, rows.depths, outer)
    return {"position": rows.positions, "prefix_end": rows.prefix_end.tolist(), "k_slot": k_slot, "v_slot": v_slot,
            "ancestors": rows.ancestors.cpu().bool(), "active_at": rows.positions}


def _tree(rows: Tree, cache: DepthCache, policy: ReadPolicy, outer: bool) -> dict:
    slots = [0] * rows.count if outer else [cache.slot(r) for r in rows.depths]
    flight = sorted({c for own in rows.ancestors for c in own})
    column = {c: i for i, c in enumerate(flight)}
    seen = torch.zeros(rows.count, len(flight), dtype=torch.bool)
    for i, own in enumerate(rows.ancestors):
        seen[i, [column[c] for c in own]] = True
    return {"position": rows.positions, "prefix_end": [rows.prefix] * rows.count, "k_slot": slots, "v_slot": slots,
            "cell": list(rows.cells), "ancestors": seen, "cells": flight, "active_at": flight}


_BUILDERS = cast(dict, {Chain: _chain, At: _chain, Wave: _wave, Draft: _draft, Forest: _forest, Tree: _tree})
