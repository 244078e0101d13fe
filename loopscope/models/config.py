"""What a looped model is, read from its checkpoint's own config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopscope.errors import CheckpointError


@dataclass(frozen=True)
class LoopedConfig:
    """Sizes and constants of one looped model. `depth` is T, the checkpoint's own number of recurrences."""

    family: str
    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    n_prelude: int
    n_core: int
    n_coda: int
    depth: int
    context: int  # positions
    norm_eps: float
    rope_theta: float
    tied: bool
    injects: bool  # whether the embedding enters every recurrence
    embed_scale: float = 1.0
    qk_bias: bool = False
    state_std: float | None = None  # standard deviation of the start state; None: the state starts as the embedding
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "n_core", "depth", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"config: {name} must be a whole number of at least 1, found {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(f"config: {self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly")


def need(raw: Mapping[str, Any], key: str) -> Any:
    """raw[key], or a CheckpointError that names the key: class defaults are never assumed."""
    if key not in raw or raw[key] is None:
        raise CheckpointError(f"config.json has no {key!r}, which a model of type {raw.get('model_type')!r} needs")
    return raw[key]


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids as config.json gives them: None, one id or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
