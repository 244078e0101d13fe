"""DepthCache: the keys and values of every position at every recurrence depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from loopscope.errors import ContextError, DepthError, SettingError
from loopscope.memory import SQUARE_MASK_LIMIT, check_room

if TYPE_CHECKING:
    from loopscope.attention import ChainPlan
    from loopscope.models.config import LoopedConfig


class LayerCache(tuple):
    """The K and V buffers of one layer, and views of every slot, made once: a decode loop asks for the same ones at each token."""

    def __init__(self, pair) -> None:
        self._slots: list | None = None

    @property
    def slots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per slot K and V, each as [batch, kv_heads, positions, d_head] and as [batch, positions, kv_heads, d_head]."""
        if self._slots is None:
            views = [[(b[:, s], b[:, s].transpose(1, 2)) for s in range(b.shape[1])] for b in self]
            self._slots = [(k[0], k[1], v[0], v[1]) for k, v in zip(*views)]
        return self._slots


class DepthCache:
    """Preallocated K/V, one K and one V tensor per layer, shape [batch, slots, kv_heads, capacity, d_head].

    Prelude and coda layers have one slot, core layers one per depth, or s (`slots`; default: `config.kv_slots`) that the
    depths share by their class r mod s: the last write wins, so an earlier recurrence reads the past as the deepest one of
    its class that wrote there left it (Huginn's `compress-s`, in layers; docs/algorithms.md, 2.3). `length` is the
    materialised prefix C: the positions whose K/V exist at all depths and were written by verified rows only. Rows in
    flight use the same buffers just beyond it, so committing advances `length` and copies nothing, and rejecting is not
    advancing it.

    placement: devices of blocks by name (loopscope/models/placement.py), whose K/V lie there too; others on `device`.
    spare: further cells behind the last position, for branches that stand at a position already taken (rows.Tree).

    Depth r lies in slot (slots - r) mod slots. Descending order makes a wave (deepest row first, positions ascending) a
    regular stride through memory, which attention can read in place.

    Where a recurrence has inner cycles, `core` holds the layers of the stack that closes it first, then those of cycle 1,
    cycle 2, ...: layer l of cycle i is `core[i * n_core + l]`.
    """

    def __init__(self, config: LoopedConfig, capacity: int, depth: int, batch: int = 1, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", slots: int | None = None, spare: int = 0,
                 placement: Mapping[str, torch.device] | None = None) -> None:
        if depth < 1:
            raise DepthError(f"a cache needs a depth of at least 1, got {depth}")
        if capacity > config.context:
            raise ContextError(
                f"{capacity} positions were asked for, but this model's context is {config.context}; "
                "shorten the prompt or lower max_new_tokens")
        self.capacity, self.cells, self.depth, self.batch = capacity, capacity + spare, depth, batch
        if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= depth):
            raise SettingError(f"slots must be a whole number from 1 (all depths share one) to the cache's depth of {depth} (a slot for "
                               f"each), got {slots!r}; None is the model's own default")
        self.slots = slots or config.kv_slots or depth
        if not placement:
            check_room(config, capacity + spare, batch=batch, slots=self.slots, depth=depth, dtype=dtype, device=device)
        self.dtype, self.device = dtype, torch.device(device)
        self.length = 0
        self.pads: tuple[int, ...] = ()  # per sequence: how many first columns hold no token (loopscope/padding.py)

        def pair(slots: int, block: str) -> tuple[torch.Tensor, torch.Tensor]:
            shape, where = (batch, slots, config.n_kv_heads, self.cells, config.d_head), (placement or {}).get(block, self.device)
            return LayerCache((torch.zeros(shape, dtype=dtype, device=where), torch.zeros(shape, dtype=dtype, device=where)))

        stacks = ["blocks"] + ["low"] * config.inner_cycles
        self.prelude = [pair(1, f"prelude.{i}") for i in range(config.n_prelude)]
        self.core = [pair(self.slots, f"{stack}.{i}") for stack in stacks for i in range(config.n_core)]
        self.coda = [pair(1, f"coda.{i}") for i in range(config.n_coda)]
        self._square: torch.Tensor | None = None
        self.chain: ChainPlan | None = None  # of the last chain of rows (loopscope/planning.py)
        self.angles: tuple | None = None  # rotary table, start, end and the rows of the last chain (loopscope/attention.py)

    def slot(self, depth: int) -> int:
        """The core slot of depth r. Raises DepthError outside 1..depth."""
        if not 1 <= depth <= self.depth:
            raise DepthError(f"depth {depth} is outside the cache, which holds depths 1 to {self.depth}; "
                             "make the cache deeper or run fewer recurrences")
        return (self.slots - depth) % self.slots

    def check_positions(self, end: int, pads: tuple[int, ...] = ()) -> None:
        """Raises ContextError beyond the capacity, SettingError for rows that do not know of this cache's pads."""
        if pads != self.pads:
            raise SettingError(f"this cache holds a batch padded by {list(self.pads)} columns, and these rows take it for one padded by "
                               f"{list(pads)}; run padded batches through forward(tokens, attention_mask=...)")
        if end > self.capacity:
            raise ContextError(f"position {end - 1} is beyond the cache, which holds {self.capacity} positions")

    def commit(self, length: int) -> None:
        """The first `length` positions are now materialised."""
        if length > self.capacity:
            raise ContextError(f"cannot commit {length} positions to a cache of {self.capacity}")
        self.length = length

    def move(self, source: int, target: int) -> None:
        """Copy what one cell holds, in every layer and slot, to another: a branch that was kept takes its own position."""
        for buffer in (b for part in (self.prelude, self.core, self.coda) for pair in part for b in pair):
            buffer[..., target, :] = buffer[..., source, :]

    def fill_deeper(self, positions: Sequence[int] | torch.Tensor, depth: int | torch.Tensor) -> None:
        """Leave what these positions hold at `depth`, the last they ran, to all deeper readers: K and V of every core layer.

        positions [n]: columns of the cache. depth: one number, or a tensor [batch or 1, n]. A row that stops early then
        looks, to a row that runs deeper, as if nothing had changed from there on; a reader at depth r <= depth reads
        depth r (Huginn's lookup `latest`). Shared slots keep the deepest recurrence of their class that ran, and only a
        class that none ran is filled. Raises DepthError for depths outside the cache, ContextError for such positions.
        """
        at = torch.as_tensor(positions, device=self.device).long()
        last = torch.as_tensor(depth, device=self.device).long()
        low, high = int(last.min()), int(last.max())
        self.slot(low), self.slot(high)
        self.check_positions(int(at.max()) + 1, self.pads)
        if low >= self.slots:
            return  # every class has been run
        target = torch.arange(low + 1, self.slots + 1, device=self.device)[None, :, None]  # the shallowest depth of each class left
        source = target.minimum(last.expand(self.batch, len(at))[:, None])  # [batch, classes, n]
        rows = torch.arange(self.batch, device=self.device)[:, None, None]
        for pair in self.core:
            here, new, old, there = (t.to(pair[0].device) for t in (rows, self.slots - target, self.slots - source, at))
            for buffer in pair:
                cells = buffer.transpose(2, 3)  # [batch, slots, capacity, kv_heads, d_head]
                cells[here, new, there] = cells[here, old, there]

    def keys(self, layer: int, depth: int, length: int | None = None) -> torch.Tensor:
        """Core keys at one depth, a view [batch, kv_heads, length, d_head]; default: the materialised prefix."""
        return self.core[layer][0][:, self.slot(depth), :, : self.length if length is None else length]

    def values(self, layer: int, depth: int, length: int | None = None) -> torch.Tensor:
        """Core values at one depth, a view [batch, kv_heads, length, d_head]; default: the materialised prefix."""
        return self.core[layer][1][:, self.slot(depth), :, : self.length if length is None else length]

    def materialised(self) -> dict[str, torch.Tensor]:
        """Views of all K/V of the prefix C, by name: what two decoders are compared by."""
        out = {}
        for part in ("prelude", "core", "coda"):
            for layer, (k, v) in enumerate(getattr(self, part)):
                out[f"{part}.{layer}.k"] = k[:, :, :, : self.length]
                out[f"{part}.{layer}.v"] = v[:, :, :, : self.length]
        return out

    def clone(self) -> DepthCache:
        """An independent copy (controls of an intervention overwrite values in it)."""
        other = object.__new__(DepthCache)
        other.__dict__.update(self.__dict__, chain=None)
        for part in ("prelude", "core", "coda"):
            setattr(other, part, [LayerCache((k.clone(), v.clone())) for k, v in getattr(self, part)])
        return other

    def additive(self, allowed: torch.Tensor) -> torch.Tensor:
        """The additive mask of a boolean one: 0 where True, -inf where False."""
        return torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(~allowed, float("-inf"))

    def causal(self, start: int, count: int) -> torch.Tensor:
        """Additive mask [count, start + count]: row i reads positions 0..start+i."""
        end = start + count
        if self.capacity > SQUARE_MASK_LIMIT:  # a full square would cost more memory than the cache
            return _causal(start, count, end, self.dtype, self.device)
        if self._square is None:
            self._square = _causal(0, self.capacity, self.capacity, self.dtype, self.device)
        return self._square[start:end, :end]

    def causal_at(self, positions: tuple[int, ...]) -> torch.Tensor:
        """Additive mask [n, last + 1] for rows at any increasing positions."""
        at = torch.tensor(positions, device=self.device)
        return self.additive(torch.arange(positions[-1] + 1, device=self.device) <= at[:, None])


def _causal(start: int, count: int, end: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    mask = torch.full((count, end), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(diagonal=start + 1)
