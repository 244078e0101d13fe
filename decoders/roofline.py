"""How fast a token could come at most: what must be read from memory for it, over how fast this device reads.

At batch 1 a looped model is bound by streaming its block's weights T times per token. Bytes per token of plain decoding: the core's
weights T times, prelude, coda and head once, and the keys and values of the context at every layer and depth. A call on several rows
reads the weights once for all of them, and that is all that a decoder can win there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopscope.memory import kv_bytes

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

_READ = 1 << 30  # bytes of the tensor whose reading is timed; on a CPU a sixteenth, still beyond its caches
_OUTER, _LOOKED_UP = ("prelude.", "coda.", "head."), ("wte.", "value_embeds.")


@dataclass(frozen=True)
class Traffic:
    """Bytes read: core (one recurrence), outer (prelude, coda and head, once per token), kv (of the whole context, once per token)."""

    core: int
    outer: int
    kv: int

    def token(self, depth: int) -> int:
        """Of one token of plain decoding."""
        return depth * self.core + self.outer + self.kv

    def decode(self, calls: float, preludes: float, depth: int) -> float:
        """About what a decode of so many block calls and prelude calls read: the context's K/V are read T times in T calls."""
        return calls * (self.core + self.kv / depth) + preludes * self.outer


def traffic(core: LoopedCore, context: int) -> Traffic:
    """What one token of this model behind `context` positions makes the device read."""
    sizes = {"inner": 0, "outer": 0, "looked up": 0}
    for name, p in core.named_parameters():
        sizes["outer" if name.startswith(_OUTER) else "looked up" if name.startswith(_LOOKED_UP) else "inner"] += p.nbytes
        if name == "wte.weight" and core.config.tied:
            sizes["outer"] += p.nbytes  # as the head it is read whole; looking tokens up reads a row
    return Traffic(sizes["inner"], sizes["outer"], kv_bytes(core.config, context, dtype=core.dtype))


def bandwidth(device: torch.device | str = "cpu", repeats: int = 10) -> float:
    """Bytes per second that reading a large tensor reaches on this device: the median of `repeats` sums of it."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    x = torch.ones(_READ // (4 if cuda else 64), device=device)
    seconds = []
    for i in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        x.sum()
        if cuda:
            torch.cuda.synchronize(device)
        if i >= 2:
            seconds.append(time.perf_counter() - begin)
    return x.nbytes / sorted(seconds)[len(seconds) // 2]
