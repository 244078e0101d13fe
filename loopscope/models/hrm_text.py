"""HRM-Text (sapientinc/HRM-Text-1B, transformers' model_type `hrm_text`): a slow and a fast stack in nested cycles.

One recurrence is one H-cycle: the fast stack runs `inner_cycles` times on z_L + z_H, then the slow stack once on
z_H + z_L. A state holds both, [batch, n, 2 d_model]: z_H, which is read out and is what hook_state shows, and z_L. The
prompt may begin with a prefix read in both directions. Equations and names: docs/families.md, section 6; after
transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.attention import Pair, Plan
from loopscope.planning import core_plan
from loopscope.cache import DepthCache
from loopscope.models.config import LoopedConfig, as_ids, need_bool, need_int, need_number, read_rope, refuse
from loopscope.models.layers import HalfRotary, PreNormBlock, SelfAttention, rms_norm
from loopscope.models.looped import LoopedCore
from loopscope.models.packing import Linear
from loopscope.rows import ALIGNED, Chain, ReadPolicy, Rows

PACKED = "packed projections"  # variant: gate, query, key and value in one tensor, as in the released files


class UnitRMS(nn.Module):
    """x / rms(x), without a weight, accumulated in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (width,), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shape, None, self.eps)


class HrmTextAttention(SelfAttention):
    """A sigmoid gate per channel on what is read; hook_z is before the gate."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        self.width = self.heads * self.d_head
        del self.qkv
        self.gqkv = Linear(config.d_model, 4 * self.width)

    @property
    def qkv(self) -> Any:  # type: ignore[override]
        """`.weight`: the rows of the packed matrix that make queries, keys and values."""
        return SimpleNamespace(weight=self.gqkv.weight[self.width :])

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        gate, heads = self.gqkv(x).split((self.width, 3 * self.width), dim=-1)
        heads = heads.unflatten(-1, (-1, self.d_head))
        qk, v = heads[:, :, : self.qk_heads], heads[:, :, self.qk_heads :]
        if tap is None:
            qk = self.rotate(qk, table)
            z = plan.attend(cached, qk[:, :, : self.heads], qk[:, :, self.heads :], v)
        else:
            q = tap("attn.hook_q", qk[:, :, : self.heads])
            k = tap("attn.hook_k", qk[:, :, self.heads :])
            v = tap("attn.hook_v", v)
            q = tap("attn.hook_rot_q", self.rotate(q, table))
            k = tap("attn.hook_rot_k", self.rotate(k, table))
            z = tap("attn.hook_z", plan.attend(cached, q, k, v, tap.pattern("attn.hook_pattern")))
        return self.out(torch.sigmoid(gate) * z.flatten(-2))


class HrmTextBlock(PreNormBlock):
    """Pre-norm, with norms that have no weights."""

    norms = 0
    attention = HrmTextAttention

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        self.norm_1 = self.norm_2 = UnitRMS(config.d_model, config.norm_eps)  # type: ignore[assignment]


class HrmTextCore(LoopedCore):
    """`blocks` is the slow (H) stack, `low` the fast (L) one; both have n_core layers."""

    family = "hrm_text"
    block_class = HrmTextBlock
    rotary = HalfRotary

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.norm = UnitRMS(config.d_model, config.norm_eps)  # type: ignore[assignment]
        self.low = nn.ModuleList(self.block_class(config, self.rotary) for _ in range(config.n_core))
        self.z_l_init = nn.Parameter(torch.zeros(config.d_model))

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        refuse(raw, cls.family, hidden_act="silu", attention_bias=False, mlp_bias=False)
        heads = need_int(raw, "num_attention_heads")
        refuse(raw, cls.family, num_key_value_heads=heads)
        theta, scaling = read_rope(raw, "rope_theta")
        # transformers writes the layers of a stack beside an inflated num_hidden_layers; older configs have only the former in it.
        per_stack = need_int(raw, "num_hidden_layers" if raw.get("num_layers_per_stack") is None else "num_layers_per_stack")
        scale = need_number(raw, "embedding_scale") if raw.get("embedding_scale") is not None else 1 / need_number(raw, "initializer_range")
        return LoopedConfig(
            family=cls.family, vocab_size=need_int(raw, "vocab_size"), d_model=need_int(raw, "hidden_size"), n_heads=heads,
            n_kv_heads=heads, d_head=need_int(raw, "head_dim"), d_mlp=need_int(raw, "intermediate_size"), n_prelude=0, n_core=per_stack,
            n_coda=0, depth=need_int(raw, "H_cycles"), inner_cycles=need_int(raw, "L_cycles"),
            context=need_int(raw, "max_position_embeddings"), norm_eps=need_number(raw, "rms_norm_eps"), rope_theta=theta,
            rope_scaling=scaling, tied=need_bool(raw, "tie_word_embeddings", absent=False), injects=False, embed_scale=scale,
            prefix_lm=need_bool(raw, "prefix_lm", absent=False), bos=raw.get("bos_token_id"), eos=as_ids(raw.get("eos_token_id")),
            pad=raw.get("pad_token_id"), raw=dict(raw))

    @classmethod
    def config_of(cls, raw: Mapping[str, Any], names: Collection[str] | None = None) -> LoopedConfig:
        config = cls.read_config(raw)
        return replace(config, variant=PACKED) if any(name.endswith(".gqkv_proj.weight") for name in names or ()) else config

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        names: dict[str, tuple[str, ...]] = {"wte.weight": ("model.embed_tokens.weight",), "z_l_init": ("model.z_L_init",)}
        if not config.tied:
            names["head.weight"] = ("lm_head.weight",)
        if config.variant == PACKED:
            inner: dict[str, tuple[str, ...]] = {
                "attn.gqkv.weight": ("attn.gqkv_proj.weight",), "attn.out.weight": ("attn.o_proj.weight",),
                "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",), "mlp.down.weight": ("mlp.down_proj.weight",)}
        else:
            inner = {"attn.gqkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in ("gate", "q", "k", "v")),
                     "attn.out.weight": ("self_attn.o_proj.weight",),
                     "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.down.weight": ("mlp.down_proj.weight",)}
        for ours, theirs in (("low", "L_module"), ("blocks", "H_module")):
            for i in range(config.n_core):
                names |= {f"{ours}.{i}.{a}": tuple(f"model.{theirs}.layers.{i}.{x}" for x in b) for a, b in inner.items()}
        return names

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        return {"lm_head.weight": "tied to the embedding"} if config.tied else {}

    # ---- the calls ------------------------------------------------------------------------------------------

    def start(self, x: Tensor, rows: Rows | None = None, **options: Any) -> Tensor:
        """[batch, n, 2 d_model]: z_H, which starts as the embedding, and z_L, which starts as a learned vector."""
        high = super().start(x, rows, **options)
        return torch.cat((high, self.z_l_init.expand_as(high)), dim=-1)

    def recur(self, state: Tensor, x: Tensor, rows: Rows | None = None, cache: DepthCache | None = None,
              policy: ReadPolicy = ALIGNED, tap=None) -> Tensor:
        rows = rows or Chain(0, state.shape[1])
        plan = core_plan(rows, cache, policy)
        high, low = state.chunk(2, dim=-1)
        for cycle in range(1, self.config.inner_cycles + 1):
            low = self._stack(self.low, cycle, low + high, plan, rows, cache, tap)
        high = self._stack(self.blocks, 0, high + low, plan, rows, cache, tap)
        if tap is not None:
            high = tap.state(high, rows)
        return torch.cat((high, low), dim=-1)

    def _stack(self, blocks: nn.ModuleList, cycle: int, h: Tensor, plan: Plan, rows: Rows, cache: DepthCache | None, tap) -> Tensor:
        """Inner cycle `cycle`, or the slow stack (0), with the K/V of its own that it has at every depth."""
        table, first = plan.rotary(self.rotary_table), cycle * self.config.n_core
        for layer, block in enumerate(blocks):
            h = block(h, plan, cache and cache.core[first + layer], table, tap and tap.block(layer, rows, cycle))
        return self.norm(h)

    def before_coda(self, state: Tensor) -> Tensor:
        return state[..., : self.config.d_model]
