"""Rows: what one call works on. ReadPolicy: at which depth the verified prefix is read.

A row is one position at one recurrence depth. All decoders, probes and interventions call the same
`recur` and differ only in the rows and the policy they pass (docs/algorithms.md, sections 0 and 1).
Depth r is the recurrence being applied, 1..T: a row "at depth r" writes K^r, V^r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from loopscope.errors import SettingError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Depth at which prefix keys (`k`) and prefix values (`v`) are read; None means the row's own depth.

    The layer index never moves, only the recurrence index does. Source: DAS (arXiv 2609.34538), section 3.
    """

    k: int | None = None
    v: int | None = None

    @property
    def aligned(self) -> bool:
        return self.k is None and self.v is None

    @classmethod
    def named(cls, name: str, depth: int) -> ReadPolicy:
        """The four policies of the paper; `depth` is full depth T. Raises SettingError for other names."""
        table = {"aligned": ALIGNED, "deep_v": cls(None, depth), "deep_k": cls(depth, None), "deep_kv": cls(depth, depth)}
        if not isinstance(name, str) or name not in table:
            raise SettingError(f"read policy {name!r} is unknown; use one of {', '.join(map(repr, table))}")
        return table[name]


POLICIES = ("aligned", "deep_v", "deep_k", "deep_kv")
ALIGNED = ReadPolicy()


@dataclass(frozen=True, slots=True)
class Chain:
    """Rows at consecutive positions, all at one depth; each reads everything before it and itself.

    Prefill, autoregressive decoding, drafting, verification and DAS-Wave rounds are chains. Rows at and after
    `start` are the active region: their K/V lie in the cache's buffers just beyond the materialised prefix.
    prefix: the first `prefix` positions of the sequence read each other in both directions (PrefixLM). They are one
    chunk: SettingError if the rows hold some of them and not all.
    pads: per sequence of a left-padded batch, how many first columns hold no token; `start` and `positions` then count
    columns (loopscope/padding.py).
    """

    start: int
    count: int
    depth: int = 1
    prefix: int = 0
    pads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prefix and (self.start + self.count < self.prefix or 0 < self.start < self.prefix):
            raise SettingError(f"a prefix of {self.prefix} positions read in both directions is one chunk, but this call holds "
                               f"positions {self.start} to {self.start + self.count - 1}; run the whole prefix in one call")

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.start + self.count))

    @property
    def depths(self) -> list[int]:
        return [self.depth] * self.count

    def at_depth(self, depth: int) -> Chain:
        return Chain(self.start, self.count, depth, self.prefix, self.pads)


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows at consecutive positions and different depths, deepest (frontmost) first.

    Each row reads and writes the slot of its own depth (Wavefront Decoding, arXiv 2609.23033, section 3).
    """

    start: int
    depths: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.depths)

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.start + len(self.depths)))


@dataclass(frozen=True, slots=True)
class At:
    """Rows of one depth at any increasing positions; each reads all cache rows up to and including its own position.

    A readout of a verify row and a draft row, or the rows of a wave that have not stopped yet.
    """

    at: tuple[int, ...]
    depth: int = 1

    @property
    def count(self) -> int:
        return len(self.at)

    @property
    def positions(self) -> list[int]:
        return list(self.at)

    @property
    def depths(self) -> list[int]:
        return [self.depth] * len(self.at)


@dataclass(frozen=True, slots=True)
class Draft:
    """Consecutive rows of a sequential draft under a foreign read policy.

    The verified prefix, positions 0..prefix-1, is read at the policy's depths; earlier drafts of the block, positions
    prefix..start-1, at the row's own depth, where they wrote it. Verification overwrites what these rows write.
    """

    prefix: int
    start: int
    depth: int
    count: int = 1

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.start + self.count))

    @property
    def depths(self) -> list[int]:
        return [self.depth] * self.count


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of branches: several may stand at one position, each with K/V cells of its own (LoopSpec, arXiv 2609.17184).

    cells: where each row's K/V lie in the cache's buffers; they need not equal `at`, the positions. ancestors: for each
    row the cells that it reads beyond the verified prefix of `prefix` positions, its own included; never a sibling's.
    """

    at: tuple[int, ...]
    cells: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]
    depths_: tuple[int, ...]
    prefix: int

    @property
    def count(self) -> int:
        return len(self.at)

    @property
    def positions(self) -> list[int]:
        return list(self.at)

    @property
    def depths(self) -> list[int]:
        return list(self.depths_)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Rows with a prefix and ancestors of their own, kept outside the cache: probes at any lag in one batched pass.

    at [n]: absolute positions. prefix_end [n]: the row reads cached positions below it. ancestors [n, n] (bool):
    the rows of this call whose current K/V it reads, itself included. depth: one for all rows, or one per row.
    reach: the largest prefix_end, where the host knows it: it then need not wait for the device to say.
    Nothing is written to the cache, so an unverified row cannot leak into it.
    """

    at: torch.Tensor
    prefix_end: torch.Tensor
    ancestors: torch.Tensor
    depth: int | tuple[int, ...] = 1
    reach: int | None = None

    @property
    def count(self) -> int:
        return len(self.at)

    @property
    def positions(self) -> list[int]:
        return self.at.tolist()

    @property
    def depths(self) -> list[int]:
        return [self.depth] * len(self.at) if isinstance(self.depth, int) else list(self.depth)

    def at_depth(self, depth: int) -> Forest:
        return Forest(self.at, self.prefix_end, self.ancestors, depth, self.reach)


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows of several sequences in one call, sequence after sequence: what batched decoding runs.

    parts: the rows of each sequence, of any kind. sequences: which sequence each part belongs to (hooks are told). The
    call's tensors are [1, rows, ...]; each part attends to its own sequence's cache only (loopscope/merged.py), so a
    sequence's numbers do not depend on its neighbours, and prompts of different lengths need no padding.
    """

    parts: tuple[Chain | Wave | At | Draft | Forest | Tree, ...]
    sequences: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def positions(self) -> list[int]:
        return [p for part in self.parts for p in part.positions]

    @property
    def depths(self) -> list[int]:
        return [r for part in self.parts for r in part.depths]

    @property
    def owners(self) -> list[int]:
        """The sequence of each row."""
        return [s for part, s in zip(self.parts, self.sequences) for _ in range(part.count)]


Rows = Union[Chain, Wave, At, Draft, Forest, Tree, Merged]
