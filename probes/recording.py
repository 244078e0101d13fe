"""A tap that keeps what a full pass computes in its core, depth by depth, without TransformerLens."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor


class Recorder:
    """Records named core activations of one sequence and the state after each recurrence.

    After `core(tokens, tap=recorder)`: `recorder.core[name, layer]` lists one tensor per depth, [rows, ...] without
    the batch axis, and `recorder.states` one state [rows, d_model] per depth. Prelude and coda run untapped.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = frozenset(names)
        self.core: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self.states: list[Tensor] = []

    def embed(self, x: Tensor, rows) -> Tensor:
        return x

    def prelude(self, layer: int, rows) -> None:
        return None

    def coda(self, layer: int, rows) -> None:
        return None

    def block(self, layer: int, rows) -> _BlockRecorder | None:
        return _BlockRecorder(self, layer) if self.names else None

    def state(self, h: Tensor, rows) -> Tensor:
        self.states.append(h[0])
        return h

    def final(self, h: Tensor, rows) -> Tensor:
        return h


class _BlockRecorder:
    def __init__(self, recorder: Recorder, layer: int) -> None:
        self.recorder, self.layer = recorder, layer

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.recorder.names:
            self.recorder.core[name, self.layer].append(tensor[0])
        return tensor

    def pattern(self, name: str) -> None:
        return None  # attention stays fused
