"""How the phases of a static decode run: eagerly, as CUDA graphs, or as tapes, which stand in for graphs where there is no GPU.

A phase is a function of buffers that stay where they are: it reads them, calls the model, and writes into them. A runner is asked
for one under a key, which holds every number that the phase depends on; a captured phase is then replayed for that key. What is not
in the key and not in a buffer would be frozen at its first value: tapes freeze it just as graphs do, so a test on a CPU notices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loopscope.errors import SettingError

Phase = Callable[[], None]


class Eager:
    """Runs every phase anew. The host knows where all rows stand, and phases may use that (`knows`)."""

    knows = True

    def reach(self, end: int, capacity: int) -> int:
        """The number of cells that a phase may read whose rows read fewer than `end`."""
        return end

    def rows(self, count: int, most: int) -> int:
        """The number of rows that a phase has whose decoder needs `count`."""
        return count

    def run(self, key: Hashable, phase: Phase) -> None:
        phase()


class Captured:
    """What is captured at first use and replayed from then on. Rows and reach are rounded up, so that few captures serve all.

    Rows: 1, 2, 4, 8, .. . Reach: `cells` (default 256), twice that, four times that, .. : masked attention reads a bucket whole.
    """

    knows = False

    def __init__(self, cells: int = 256) -> None:
        self.cells = cells
        self.made: dict[Hashable, Any] = {}
        self.replays = 0

    def reach(self, end: int, capacity: int) -> int:
        bucket = self.cells
        while bucket < end:
            bucket *= 2
        return min(bucket, capacity)

    def rows(self, count: int, most: int) -> int:
        return min(1 << (count - 1).bit_length(), most)

    def run(self, key: Hashable, phase: Phase) -> None:
        if key in self.made:
            self.replays += 1
            self.made[key].replay()
        else:
            self.made[key] = self.capture(phase)

    def capture(self, phase: Phase) -> Any:
        """Run the phase once, and return what replays it."""
        raise NotImplementedError


class CudaGraphs(Captured):
    """One CUDA graph per key, all in one memory pool. The first use of a phase runs it eagerly, which warms its kernels up."""

    def __init__(self, cells: int = 256) -> None:
        super().__init__(cells)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, phase):
        phase()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            phase()  # recorded, not run
        return graph


class Tapes(Captured):
    """One tape per key: the operators of the first use, with the very tensors and numbers they were given, run again at each replay."""

    def capture(self, phase):
        tape = Tape()
        with tape:
            phase()
        return tape


class Tape(TorchDispatchMode):
    """A record of operators that replays as a CUDA graph does: same addresses, same numbers, no Python between.

    Raises SettingError for what a graph cannot capture: an operator that hands a number to the host, or whose output's shape
    depends on data, and a tensor made from the host's data.
    """

    REFUSED = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "lift_fresh", "item"))

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple, dict, list[Tensor], bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.REFUSED:
            raise SettingError(f"a phase that is to be captured cannot run {func}: it waits for the host or takes data from it")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = func._schema.is_mutable
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [t for t in outs if t.untyped_storage().data_ptr() not in given]
        if written or fresh:  # a mere view of what was given needs no second look
            self.steps.append((func, args, kwargs, outs, written))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outs, written in self.steps:
            again = func(*args, **kwargs)
            if not written:
                for mine, new in zip(outs, (t for t in tree_leaves(again) if isinstance(t, Tensor))):
                    mine.copy_(new)


def runner_for(device: torch.device) -> Eager | Captured:
    """CUDA graphs on CUDA, otherwise eager calls."""
    return CudaGraphs() if device.type == "cuda" else Eager()
