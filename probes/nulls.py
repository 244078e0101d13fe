"""What convergence would look like if it meant nothing: a random-weight model and random channel maps.

Both keep the scale of what they replace and destroy its content. Everything is drawn on the CPU in float64 from a
seed, so that a null is the same on every device.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from loopscope.models.layers import SelfAttention
    from loopscope.models.looped import LoopedCore


def generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator that depends on the seed and on every part of the key."""
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, (seed, *key))).encode()))


def random_weight_model(core: LoopedCore, seed: int = 0) -> LoopedCore:
    """A model of the same config whose every weight matrix has the same entries in a random order.

    Permuting keeps each matrix's own scale and distribution, which a fresh initialisation would not. Packed matrices
    are permuted part by part (Q, K and V; gate and up; the adapter's state half and embedding half), because the parts
    differ in scale. Norm weights and biases are permuted too.
    """
    null = type(core)(core.config).to(device=core.device, dtype=core.dtype)
    own = dict(null.named_parameters())
    with torch.no_grad():
        for name, trained in core.named_parameters():
            parts = _parts(core, name, trained.detach())
            targets = _parts(core, name, own[name])
            for index, (source, target) in enumerate(zip(parts, targets)):
                order = torch.randperm(source.numel(), generator=generator(seed, name, index)).to(source.device)
                target.copy_(source.reshape(-1)[order].view_as(source))
    null.tokenizer = core.tokenizer
    return null.eval().requires_grad_(False)


def _parts(core: LoopedCore, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
    config = core.config
    if name.endswith("attn.qkv.weight"):
        return tensor.split([h * config.d_head for h in (config.n_heads, config.n_kv_heads, config.n_kv_heads)])
    if name.endswith("attn.gqkv.weight"):
        return tensor.chunk(4)
    if name.endswith("mlp.gate_up.weight"):
        return tensor.chunk(2)
    if name == "adapter.weight":
        return tensor.chunk(2, dim=1)
    return (tensor,)


def channel_weights(attention: SelfAttention) -> dict[str, tuple[Tensor, Tensor]]:
    """The maps from the normed state to Q, K and V: channel -> (weight [heads * d_head, d_model], bias [heads, d_head])."""
    heads, kv, d = attention.heads, attention.kv_heads, attention.d_head
    weights = attention.qkv.weight.detach().double().split([heads * d, kv * d, kv * d])
    zero = weights[0].new_zeros(heads + 2 * kv, d)
    if attention.qk_bias is not None:
        zero[: heads + kv] = attention.qk_bias.detach().double()
    return dict(zip("qkv", zip(weights, zero.split([heads, kv, kv]))))


def apply_channel(normed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """normed [.., d_model] -> the channel [.., heads, d_head], float64."""
    return (normed.double() @ weight.T).unflatten(-1, tuple(bias.shape)) + bias


def random_map(weight: Tensor, draw: torch.Generator) -> Tensor:
    """A random matrix of the same shape with the same singular values: both orthogonal factors drawn uniformly."""
    rank = min(weight.shape)
    return with_factors(weight, _orthogonal(weight.shape[0], rank, draw), _orthogonal(weight.shape[1], rank, draw))


def with_factors(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left diag(singular values of weight) right^T; left [out, rank], right [in, rank] with orthonormal columns."""
    values = torch.linalg.svdvals(weight.double())
    return (left.to(values.device) * values) @ right.to(values.device).T


def _orthogonal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal columns, uniform (Haar): QR of a Gaussian matrix with the signs of R's diagonal put back."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()
