"""Distances between two tensors or two next-token distributions, as pure functions.

Vectors are compared in float64 and distributions in float32 or better, whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """a . b / (|a| |b|) over the last axis: [.., d], [.., d] -> [..], float64.

    A zero vector has no direction: it counts as 1 beside another zero vector and as 0 beside anything else. The
    product of the squared norms is rooted once, which makes the cosine of a vector with itself exactly 1.
    """
    a, b = a.double(), b.double()
    aa, bb = (a * a).sum(-1), (b * b).sum(-1)
    norms = (aa * bb).sqrt()
    return torch.where(norms > 0, (a * b).sum(-1) / norms, (aa == bb).double())


def relative_l2(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| / |b| over the last axis, b the reference: [.., d], [.., d] -> [..], float64."""
    a, b = a.double(), b.double()
    distance, size = (a - b).norm(dim=-1), b.norm(dim=-1)
    return torch.where(distance == 0, torch.zeros_like(distance), distance / size)


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 or better."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def kl_nats(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q) over the last axis, in nats: [.., vocab], [.., vocab] -> [..].

    Rounding can push a vanishing divergence just below zero, where it is cut off.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)


def entropy_nats(log_p: Tensor) -> Tensor:
    """-sum p log p over the last axis, in nats."""
    return -(log_p.exp() * log_p).sum(-1)


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rank of tokens [n] among logits [n, vocab], from 1; of equal logits the lower id comes first: [n]."""
    own = logits.gather(1, tokens[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    return 1 + ((logits > own) | ((logits == own) & earlier)).sum(-1)
