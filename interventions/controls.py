"""Controls of a deep-value read: the same size and distribution, the wrong content.

Each takes the full-depth values of one layer [kv_heads, n, d_head] and returns what stands in for them. If a draft
does as well on these, it did not need the prefix's own mature values.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONTROLS = ("shuffled_v", "other_prompt_v", "noise_v")


def shuffled(values: Tensor, order: Tensor) -> Tensor:
    """Position j gets the values of position order[j] (all heads together); keys stay where they are.

    The order runs over the whole prompt, so a prefix may hold a value of a later position: a leak of 1/n per position
    that can only flatter the control.
    """
    return values[:, order.to(values.device)]


def from_other(values: Tensor, other: Tensor) -> Tensor:
    """Position j gets another prompt's values of position j; a shorter prompt is repeated."""
    return other[:, torch.arange(values.shape[1], device=values.device) % other.shape[1]]


def noise(values: Tensor, draw: torch.Generator) -> Tensor:
    """Gaussian directions with the norm of the value they replace, per position and head."""
    drawn = torch.randn(values.shape, generator=draw, dtype=torch.float64).to(values.device)
    size = values.double().norm(dim=-1, keepdim=True)
    return (drawn / drawn.norm(dim=-1, keepdim=True) * size).to(values.dtype)
