"""Start states: a pure function of (seed, sequence, position).

Huginn draws s_0 anew in every forward from the global generator, so cached and uncached runs of the official code
disagree. Here every element comes from keyed noise (loopscope/noise.py): the same in prefill, in autoregressive decoding
and in every decoder, whatever the order of the calls. Losslessness depends on it.
"""

from __future__ import annotations

import math

import torch

from loopscope.noise import keyed_uniform

_CUT = 3.0  # the official draw is a normal truncated at three standard deviations


def keyed_normal(seed: int, sequence: int, start: int, count: int, width: int, std: float) -> torch.Tensor:
    """Truncated-normal draws [count, width] (float64, CPU) for positions start..start+count-1.

    Always computed on the CPU in float64, so that a device's own erfinv cannot change a start state.
    """
    uniform = keyed_uniform(seed, sequence, torch.arange(start, start + count), width)
    low = 0.5 * math.erfc(_CUT / math.sqrt(2))
    return torch.erfinv(2 * (low + uniform * (1 - 2 * low)) - 1) * (math.sqrt(2) * std)
