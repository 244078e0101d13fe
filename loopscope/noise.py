"""Keyed noise: random numbers that are a pure function of (seed, sequence, position), whatever the order of the calls.

A counter-based hash in place of a generator. Start states (loopscope/start.py) and sampling (decoders/sampling.py) draw from it,
so that a decoder that visits positions in another order, or twice, still sees the same numbers. Losslessness depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _as_int64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _as_int64(0x9E3779B97F4A7C15)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64 tensors, which wrap like uint64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _as_int64(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)  # logical, not arithmetic


def keyed_uniform(seed: int, sequence: int, positions: Sequence[int] | Tensor, width: int, stream: int = 0,
                  device: torch.device | str = "cpu") -> Tensor:
    """Uniform draws in (0, 1), [positions, width] (float64). `stream` tells draws for different purposes apart."""
    key = torch.tensor([_as_int64(seed)], dtype=torch.int64, device=device)
    key = _mix(key * _GOLDEN + _as_int64(sequence))
    if stream:
        key = _mix(key ^ _as_int64(stream * 0xD1342543DE82EF95))
    key = _mix(key + torch.as_tensor(positions, dtype=torch.int64, device=device)[:, None] * _GOLDEN)
    bits = _mix(key + torch.arange(1, width + 1, dtype=torch.int64, device=device) * _GOLDEN)
    return ((_shift_right(bits, 11).double() + 0.5) / (1 << 53)).clamp(max=1 - 2**-53)  # the largest draw would round to 1
