"""Start states: a pure function of (seed, sequence, position).

Huginn draws s_0 anew in every forward from the global generator, so cached and uncached runs of the official code
disagree. Here every element comes from a counter-based hash of (seed, sequence, position, channel): the same in
prefill, in autoregressive decoding and in every decoder, whatever the order of the calls. Losslessness depends on it.
"""

from __future__ import annotations

import math

import torch

_CUT = 3.0  # the official draw is a normal truncated at three standard deviations


def _as_int64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64 tensors, which wrap like uint64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _as_int64(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)  # logical, not arithmetic


def keyed_normal(seed: int, sequence: int, start: int, count: int, width: int, std: float) -> torch.Tensor:
    """Truncated-normal draws [count, width] (float64, CPU) for positions start..start+count-1.

    Always computed on the CPU in float64, so that a device's own erfinv cannot change a start state.
    """
    golden = _as_int64(0x9E3779B97F4A7C15)
    key = torch.tensor([_as_int64(seed)], dtype=torch.int64)
    key = _mix(key * golden + _as_int64(sequence))
    key = _mix(key + torch.arange(start, start + count, dtype=torch.int64)[:, None] * golden)
    bits = _mix(key + torch.arange(1, width + 1, dtype=torch.int64) * golden)
    uniform = (_shift_right(bits, 11).double() + 0.5) / (1 << 53)
    low = 0.5 * math.erfc(_CUT / math.sqrt(2))
    return torch.erfinv(2 * (low + uniform * (1 - 2 * low)) - 1) * (math.sqrt(2) * std)
