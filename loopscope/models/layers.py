"""Building blocks: norms, rotary embedding, attention, gated MLP, and the two block wirings in use so far.

A `tap` is None, or a callable `tap(name, tensor) -> tensor` that may look at or replace an activation: hooks cost
nothing where there are none. Shapes inside a block: [batch, rows, d_model]; heads: [batch, rows, heads, d_head].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def rotary_angles(d_head: int, theta: float, context: int) -> Tensor:
    """Angles [context, d_head / 2] in float64: position * theta^(-2i / d_head)."""
    inverse = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    return torch.outer(torch.arange(context, dtype=torch.float64), inverse)


class InterleavedRotary:
    """Rotates adjacent pairs (2i, 2i+1). The table is complex: cos + i sin, [context, 1, d_head / 2]."""

    @staticmethod
    def table(angles: Tensor, dtype: torch.dtype) -> Tensor:
        table = torch.polar(torch.ones_like(angles), angles)[:, None]
        return table if dtype == torch.float64 else table.to(torch.complex64)

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        """x [batch, n, heads, d_head], table [n, 1, d_head / 2]."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


class HalfRotary:
    """Rotates pairs (i, i + d_head / 2). The table stacks cos and sign-carrying sin: [context, 2, 1, d_head]."""

    @staticmethod
    def table(angles: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)[:, :, None]
        return table.to(dtype if dtype == torch.float64 else torch.float32)

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        """x [batch, n, heads, d_head], table [n, 2, 1, d_head]."""
        wide = x if x.dtype == table.dtype else x.to(table.dtype)
        swapped = wide.roll(wide.shape[-1] // 2, -1)
        return torch.addcmul(wide * table[:, 0], swapped, table[:, 1]).to(x.dtype)


class SelfAttention(nn.Module):
    """Packed QKV projection, rotary embedding, attention through the call's plan, output projection."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = config.n_heads, config.n_kv_heads, config.d_head
        both = config.n_heads + config.n_kv_heads
        self.qkv = nn.Linear(config.d_model, (both + config.n_kv_heads) * config.d_head, bias=False)
        self.out = nn.Linear(config.n_heads * config.d_head, config.d_model, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(both, config.d_head)) if config.qk_bias else None
        self.rotate = rotary.rotate
        self.qk_heads = both

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))
        qk, v = heads[:, :, : self.qk_heads], heads[:, :, self.qk_heads :]
        if self.qk_bias is not None:
            qk = qk + self.qk_bias
        if tap is None:
            qk = self.rotate(qk, table)
            z = plan.attend(cached, qk[:, :, : self.heads], qk[:, :, self.heads :], v)
            return self.out(z.flatten(-2))
        q = tap("attn.hook_q", qk[:, :, : self.heads])
        k = tap("attn.hook_k", qk[:, :, self.heads :])
        v = tap("attn.hook_v", v)
        q = tap("attn.hook_rot_q", self.rotate(q, table))
        k = tap("attn.hook_rot_k", self.rotate(k, table))
        z = tap("attn.hook_z", plan.attend(cached, q, k, v, tap.pattern("attn.hook_pattern")))
        return self.out(z.flatten(-2))


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), gate and up packed."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_mlp, bias=False)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Four norms, attention and MLP; a subclass wires them."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__()
        self.attn = SelfAttention(config, rotary)
        self.mlp = GatedMLP(config)
        for i in range(1, 5):
            setattr(self, f"norm_{i}", RMSNorm(config.d_model, config.norm_eps))


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
