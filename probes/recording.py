"""One full-depth pass with what it computed in its core, depth by depth. Needs no TransformerLens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopscope.hook_names import STATE, block_prefix
from loopscope.tap import RecordingTap

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore


class Recording:
    """A pass over ids [n]: its logits [n, vocab], the states after each recurrence and the named activations of every core block.

    names: hook names within a block ("attn.hook_v", "hook_attn_out", ...); none records the states alone.
    """

    def __init__(self, core: LoopedCore, ids: Tensor, names: Iterable[str] = (), *, depth: int | None = None,
                 start_state: str | Tensor | None = None, seed: int = 0) -> None:
        self.depth = core.check_depth(depth)
        depths, layers = range(1, self.depth + 1), range(core.config.n_core)
        wanted = [f"depth.{r}.{STATE}" for r in depths]
        wanted += [block_prefix("blocks", layer, r) + name for name in names for layer in layers for r in depths]
        self._tap = RecordingTap(wanted)
        self.logits = core(ids, self.depth, start_state=start_state, seed=seed, tap=self._tap)[0]

    def states(self) -> Tensor:
        """[depth, n, d_model]: entry r - 1 is the state after r recurrences."""
        return torch.stack([self._tap[f"depth.{r}.{STATE}"][0] for r in range(1, self.depth + 1)])

    def stack(self, name: str, layer: int) -> Tensor:
        """One activation of one core layer at every depth: [depth, n, ...]."""
        return torch.stack([self._tap[block_prefix("blocks", layer, r) + name][0] for r in range(1, self.depth + 1)])
