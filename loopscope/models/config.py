"""What a looped model is, read from its checkpoint's own config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopscope.errors import CheckpointError


MOST_DEPTH = 65536  # recurrences; a typo beyond it would only show as a machine out of memory
MOST_LAYERS = 1024  # of prelude, core or coda
_MOST = {"inner_cycles": 1024, "n_prelude": MOST_LAYERS, "n_core": MOST_LAYERS, "n_coda": MOST_LAYERS, "depth": MOST_DEPTH,
         "context": 2**27,
         "vocab_size": 2**27, "d_model": 2**20, "d_mlp": 2**22, "d_head": 2**16, "n_heads": 2**16}


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
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)  # as read_rope gives it
    variant: str = ""  # which of a family's wirings, where it has several
    state_std: float | None = None  # standard deviation of the start state; None: the state starts as the embedding
    kv_slots: int | None = None  # K/V slots that the depths of a core layer share; None: one per depth
    inner_cycles: int = 0  # runs of a second stack of n_core layers inside every recurrence, before the first
    prefix_lm: bool = False  # whether a prefix of the prompt may be read in both directions
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "n_core", "depth", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"config: {name} must be a whole number of at least 1, found {value!r}")
        for name in ("n_prelude", "n_coda"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointError(f"config: {name} must be a whole number of at least 0, found {value!r}")
        # Numbers that only a damaged file holds; unchecked they would fill the memory before anything could be said about them.
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise CheckpointError(f"config: {name} {getattr(self, name)} is more than any model has; at most {most} is supported")
        for name in ("bos", "pad"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise CheckpointError(f"config.json: {name}_token_id must be a whole number or absent, found {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(f"config: {self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly")
        if self.d_head % 2:
            raise CheckpointError(f"config: d_head must be even, since rotary embedding turns pairs of channels, found {self.d_head}")


def need(raw: Mapping[str, Any], key: str) -> Any:
    """raw[key], or a CheckpointError that names the key: class defaults are never assumed."""
    if key not in raw or raw[key] is None:
        raise CheckpointError(f"config.json has no {key!r}, which a model of type {raw.get('model_type')!r} needs")
    return raw[key]


def need_int(raw: Mapping[str, Any], key: str, least: int = 1) -> int:
    """need(), and a whole number of at least `least`."""
    value = need(raw, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least {least}, found {value!r}")
    return value


def need_number(raw: Mapping[str, Any], key: str, zero: bool = False) -> float:
    """need(), and a finite number above 0 (with `zero`: not below it)."""
    value = need(raw, key)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        least = "of at least" if zero else "above"
        raise CheckpointError(f"config.json: {key} must be a finite number {least} 0, found {repr(value)[:60]}")
    return number


def need_bool(raw: Mapping[str, Any], key: str, absent: bool | None = None) -> bool:
    """need(), and true or false. `absent`: what a missing key means, where the family's own files may leave it out."""
    if absent is not None and raw.get(key) is None:
        return absent
    value = need(raw, key)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, found {value!r}")
    return value


def need_dict(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """need(), and an object whose own missing keys are named together with it."""
    value = need(raw, key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, found {value!r}")
    return {**value, "model_type": f"{raw.get('model_type')} ({key})"}


def need_heads(raw: Mapping[str, Any], d_model: int, n_heads: int) -> int:
    """Width of one head: head_dim where the config has it, else d_model / n_heads."""
    if raw.get("head_dim") is not None:
        return need_int(raw, "head_dim")
    if d_model % n_heads:
        raise CheckpointError(f"config.json: a width of {d_model} cannot be split over {n_heads} heads, and there is no head_dim")
    return d_model // n_heads


def refuse(raw: Mapping[str, Any], family: str, **only: Any) -> None:
    """Raise where the config switches on what we do not run. only: key -> the value that it must have, or be absent or None."""
    for key, value in only.items():
        if raw.get(key) is not None and raw[key] != value:
            raise CheckpointError(f"config.json: {key} {raw[key]!r} is not supported for {family} models; supported: {value!r}")


_SCALINGS = {"linear": ("factor",),
             "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def read_rope(raw: Mapping[str, Any], *theta_keys: str) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling): from rope_parameters (transformers 5) or the first of `theta_keys` and rope_scaling.

    scaling is None, or the keys of a supported rope_type. Raises CheckpointError for other types: a model read with
    the wrong frequencies looks almost right.
    """
    packed = need_dict(raw, "rope_parameters") if raw.get("rope_parameters") is not None else {}
    if "rope_theta" in packed:
        theta = need_number(packed, "rope_theta")
    else:
        theta = need_number(raw, next((key for key in theta_keys if raw.get(key) is not None), theta_keys[0]))
    scaling = need_dict(raw, "rope_scaling") if raw.get("rope_scaling") is not None else packed
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise CheckpointError(f"config.json: rope scaling of type {kind!r} is not supported; supported: default, {', '.join(_SCALINGS)}")
    return theta, {"rope_type": kind, **{key: need_number(scaling, key) for key in _SCALINGS[kind]}}


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids as config.json gives them: None, one id or a list."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"config.json: token ids must be whole numbers, found {value!r}")
    return ids
