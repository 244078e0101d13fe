"""Building blocks: norms, rotary embedding, attention, gated MLP, and the block wirings of the families.

A `tap` is None, or a callable `tap(name, tensor) -> tensor` that may look at or replace an activation: hooks cost
nothing where there are none. Shapes inside a block: [batch, rows, d_model]; heads: [batch, rows, heads, d_head].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.models.packing import Linear

if TYPE_CHECKING:
    from loopscope.attention import Pair, Plan
    from loopscope.models.config import LoopedConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, accumulated in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.shape = eps, (width,)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shape, self.weight, self.eps)


def rms_norm(x: Tensor, shape: tuple[int], weight: Tensor | None, eps: float) -> Tensor:
    """x [.., width] / sqrt(mean of squares + eps) * weight, in float32 or better.

    On a CPU torch has no kernel for it: F.rms_norm is a dozen operations there, and a looped block has four norms. These six give
    the same bits in two thirds of the time for one row, a quarter for sixteen. With gradients, in half precision and on other
    devices it is torch's own.
    """
    if not x.is_cpu or x.dtype not in _WIDE or torch.is_grad_enabled():
        return F.rms_norm(x, shape, weight, eps)
    width, least = _scalars((float(shape[0]), eps), x.dtype)
    out = x * torch.addcdiv(least, (x * x).sum(-1, True), width).rsqrt_()
    return out if weight is None else out.mul_(weight)


_WIDE = (torch.float32, torch.float64)


@lru_cache(maxsize=None)
def _scalars(values: tuple[float, ...], dtype: torch.dtype) -> list[Tensor]:
    """As tensors, made once: a Python number costs an operation more than one of these."""
    with torch.inference_mode(False):
        return [torch.tensor(value, dtype=dtype) for value in values]


def rotary_angles(d_head: int, theta: float, context: int, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Angles [context, d_head / 2] in float64: position * theta^(-2i / d_head), frequencies stretched by `scaling`.

    scaling: None, {"rope_type": "linear", "factor": f} or {"rope_type": "llama3", ...} (read_rope makes it).
    """
    inverse = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    if scaling is not None and scaling["rope_type"] == "linear":
        inverse = inverse / scaling["factor"]
    elif scaling is not None:
        inverse = _llama3_frequencies(inverse, scaling)
    return torch.outer(torch.arange(context, dtype=torch.float64), inverse)


def _llama3_frequencies(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's stretch: waves longer than the old context are slowed by `factor`, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)  # of each wave within the old context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (kept + (1 - kept) / scaling["factor"])


class InterleavedRotary:
    """Rotates adjacent pairs (2i, 2i+1). The table is complex: cos + i sin, [context, 1, d_head / 2]."""

    @staticmethod
    def table(angles: Tensor, dtype: torch.dtype) -> Tensor:
        table = torch.polar(torch.ones_like(angles), angles)[:, None]
        return table if dtype == torch.float64 else table.to(torch.complex64)

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        """x [batch, n, heads, d_head], table [n, 1, d_head / 2], or one for each sequence, [batch, n, 1, d_head / 2]."""
        if x.dtype not in _WIDE:
            return InterleavedRotary.rotate(x.float(), table).to(x.dtype)
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2)


class HalfRotary:
    """Rotates pairs (i, i + d_head / 2). The table stacks cos and sign-carrying sin: [context, 2, 1, d_head]."""

    @staticmethod
    def table(angles: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)[:, :, None]
        return table.to(dtype if dtype == torch.float64 else torch.float32)

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        """x [batch, n, heads, d_head], table [n, 2, 1, d_head], or one for each sequence, [batch, n, 2, 1, d_head]."""
        wide = x if x.dtype == table.dtype else x.to(table.dtype)
        swapped = wide.roll(wide.shape[-1] // 2, -1)
        return torch.addcmul(wide * table.select(-3, 0), swapped, table.select(-3, 1)).to(x.dtype)


class SelfAttention(nn.Module):
    """Packed QKV projection, rotary embedding, attention through the call's plan, output projection."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = config.n_heads, config.n_kv_heads, config.d_head
        both = config.n_heads + config.n_kv_heads
        self.qkv = Linear(config.d_model, (both + config.n_kv_heads) * config.d_head)
        self.out = Linear(config.n_heads * config.d_head, config.d_model)
        self.qk_bias = nn.Parameter(torch.zeros(both, config.d_head)) if config.qk_bias else None
        self.rotate = rotary.rotate
        self.qk_heads = both

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], -1, self.d_head)
        qk, v = heads.split((self.qk_heads, self.kv_heads), 2)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias
        return self.attend(qk, v, plan, cached, table, tap)

    def attend(self, qk: Tensor, v: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        """From queries, keys and values [batch, rows, heads, d_head] (queries and keys packed) to what the block adds."""
        if tap is None:
            q, k = self.rotate(qk, table).split((self.heads, self.kv_heads), 2)
            return self.out(plan.attend(cached, q, k, v).flatten(-2))
        q = tap("attn.hook_q", qk[:, :, : self.heads])
        k = tap("attn.hook_k", qk[:, :, self.heads :])
        v = tap("attn.hook_v", v)
        q = tap("attn.hook_rot_q", self.rotate(q, table))
        k = tap("attn.hook_rot_k", self.rotate(k, table))
        z = tap("attn.hook_z", plan.attend(cached, q, k, v, tap.pattern("attn.hook_pattern")))
        return self.out(z.flatten(-2))


class NormedAttention(SelfAttention):
    """OLMo 2: an RMS norm over all query channels and one over all key channels, before heads are split."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        self.q_norm = RMSNorm(self.heads * self.d_head, config.norm_eps)
        self.k_norm = RMSNorm(self.kv_heads * self.d_head, config.norm_eps)

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        q, k, v = self.qkv(x).split([n * self.d_head for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-1).unflatten(-1, (-1, self.d_head))
        if self.qk_bias is not None:
            qk = qk + self.qk_bias
        return self.attend(qk, v.unflatten(-1, (-1, self.d_head)), plan, cached, table, tap)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), gate and up packed."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.d_mlp)
        self.down = Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, MLP and norm_1 .. norm_{norms}; a subclass says how many norms and wires them."""

    norm_1: RMSNorm
    norm_2: RMSNorm
    norm_3: RMSNorm
    norm_4: RMSNorm
    norms: ClassVar[int] = 4
    attention: ClassVar[type[SelfAttention]] = SelfAttention
    feed_forward: ClassVar[type[nn.Module]] = GatedMLP

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__()
        self.attn = self.attention(config, rotary)
        self.mlp = self.feed_forward(config)
        for i in range(1, self.norms + 1):
            setattr(self, f"norm_{i}", RMSNorm(config.d_model, config.norm_eps))

    def attention_input(self, x: Tensor) -> Tensor:
        """What Q, K and V are maps of, from the block's input."""
        return self.norm_1(x)


class SumSandwichBlock(Block):
    """Huginn: the second norm of each half is on the residual SUM, so the stream is not additive."""

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        if tap is None:
            x = self.norm_2(x + self.attn(self.norm_1(x), plan, cached, table))
            return self.norm_4(x + self.mlp(self.norm_3(x)))
        x = tap("hook_resid_pre", x)
        x = self.norm_2(x + tap("hook_attn_out", self.attn(self.norm_1(x), plan, cached, table, tap)))
        x = tap("hook_resid_mid", x)
        return tap("hook_resid_post", self.norm_4(x + tap("hook_mlp_out", self.mlp(self.norm_3(x)))))


class BranchSandwichBlock(Block):
    """Ouro: each branch's output is normed before it is added. hook_attn_out and hook_mlp_out are what is added."""

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        if tap is None:
            x = x + self.norm_2(self.attn(self.norm_1(x), plan, cached, table))
            return x + self.norm_4(self.mlp(self.norm_3(x)))
        x = tap("hook_resid_pre", x)
        x = x + tap("hook_attn_out", self.norm_2(self.attn(self.norm_1(x), plan, cached, table, tap)))
        x = tap("hook_resid_mid", x)
        return tap("hook_resid_post", x + tap("hook_mlp_out", self.norm_4(self.mlp(self.norm_3(x)))))


class PreNormBlock(Block):
    """Llama: a norm before each branch, nothing on the sum."""

    norms = 2

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        if tap is None:
            x = x + self.attn(self.norm_1(x), plan, cached, table)
            return x + self.mlp(self.norm_2(x))
        x = tap("hook_resid_pre", x)
        x = x + tap("hook_attn_out", self.attn(self.norm_1(x), plan, cached, table, tap))
        x = tap("hook_resid_mid", x)
        return tap("hook_resid_post", x + tap("hook_mlp_out", self.mlp(self.norm_2(x))))


class PostNormBlock(Block):
    """OLMo 2: each branch reads the bare stream and its output is normed. hook_attn_out and hook_mlp_out are what is added."""

    norms = 2
    attention = NormedAttention

    def attention_input(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        if tap is None:
            x = x + self.norm_1(self.attn(x, plan, cached, table))
            return x + self.norm_2(self.mlp(x))
        x = tap("hook_resid_pre", x)
        x = x + tap("hook_attn_out", self.norm_1(self.attn(x, plan, cached, table, tap)))
        x = tap("hook_resid_mid", x)
        return tap("hook_resid_post", x + tap("hook_mlp_out", self.norm_2(self.mlp(x))))
