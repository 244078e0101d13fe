"""How fast the machine is at this moment: the same few block calls, timed again and again.

A shared machine changes its pace for a second or so at a time, by more than decoders differ (docs/algorithms.md, section 4). What is timed
right before and right after a decode says which pace the decode ran at; a benchmark that has a metronome divides by it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from loopscope.rows import Chain

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

_PREFIX = 64  # positions that its row attends to, where the context has room


class Metronome:
    """Calling it runs T recurrences of one row behind a short prefix, as often as fits into about `seconds`; gives the mean seconds of T.

    How often is settled once, at the pace of that moment: a run that goes on later may settle on another number, so beats do not depend
    on it.
    """

    @torch.inference_mode()
    def __init__(self, core: LoopedCore, seconds: float = 0.02, seed: int = 0) -> None:
        prefix, depth = min(_PREFIX, core.config.context - 1), core.config.depth
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, core.config.vocab_size, (1, prefix + 1), generator=draw).to(core.device)
        self.core, self._cache = core, core.make_cache(prefix + 1, depth)
        if prefix:
            core(tokens[:, :prefix], cache=self._cache)
        row = Chain(prefix, 1)
        self._x = core.embed(tokens[:, prefix:], row, self._cache)
        self._state = core.start(self._x, row)
        self._rows = [Chain(prefix, 1, r) for r in range(1, depth + 1)]
        self.tokens = 1  # of plain decoding, as far as block calls go
        self()  # the first call pays for set-up
        self.tokens = max(1, round(seconds / self()))

    @torch.inference_mode()
    def __call__(self) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(self.tokens):
            for rows in self._rows:
                self.core.recur(self._state, self._x, rows, self._cache)
        self._wait()
        return (time.perf_counter() - begin) / self.tokens

    def _wait(self) -> None:
        if self.core.device.type == "cuda":
            torch.cuda.synchronize(self.core.device)
