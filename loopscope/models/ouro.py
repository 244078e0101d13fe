"""Ouro (ByteDance/Ouro-1.4B, -2.6B, -Thinking): the whole stack is the loop; no prelude, coda, injection or start state.

Equations and names: docs/families.md, section 2; after LoopedLMs/ouro_rl@531187b.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need_bool, need_heads, need_int, need_number, read_rope, refuse
from loopscope.models.layers import BranchSandwichBlock, HalfRotary
from loopscope.models.looped import LoopedCore


class OuroCore(LoopedCore):
    family = "ouro"
    block_class = BranchSandwichBlock
    rotary = HalfRotary

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.d_model, 1)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        refuse(raw, "Ouro", hidden_act="silu", use_sliding_window=False, attention_bias=False)
        types = raw.get("layer_types") or []
        if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
            raise CheckpointError(f"config.json: layer_types {raw['layer_types']!r} are not supported; Ouro's are all 'full_attention'")
        d_model, n_heads = need_int(raw, "hidden_size"), need_int(raw, "num_attention_heads")
        theta, scaling = read_rope(raw, "rope_theta")
        if scaling is not None:
            raise CheckpointError("config.json: rope_scaling is not used by any released Ouro model and is not supported")
        return LoopedConfig(
            family=cls.family, vocab_size=need_int(raw, "vocab_size"), d_model=d_model, n_heads=n_heads,
            n_kv_heads=need_int(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else n_heads,
            d_head=need_heads(raw, d_model, n_heads), d_mlp=need_int(raw, "intermediate_size"), n_prelude=0,
            n_core=need_int(raw, "num_hidden_layers"), n_coda=0, depth=need_int(raw, "total_ut_steps"),
            context=need_int(raw, "max_position_embeddings"), norm_eps=need_number(raw, "rms_norm_eps"), rope_theta=theta,
            tied=need_bool(raw, "tie_word_embeddings", absent=False), injects=False, bos=raw.get("bos_token_id"),
            eos=as_ids(raw.get("eos_token_id")), pad=raw.get("pad_token_id"), raw=dict(raw))

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        names: dict[str, tuple[str, ...]] = {
            "wte.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",),
            "gate.weight": ("model.early_exit_gate.weight",), "gate.bias": ("model.early_exit_gate.bias",)}
        if not config.tied:
            names["head.weight"] = ("lm_head.weight",)
        inner = {"attn.qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
                 "attn.out.weight": ("self_attn.o_proj.weight",),
                 "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
                 "mlp.down.weight": ("mlp.down_proj.weight",),
                 "norm_1.weight": ("input_layernorm.weight",), "norm_2.weight": ("input_layernorm_2.weight",),
                 "norm_3.weight": ("post_attention_layernorm.weight",), "norm_4.weight": ("post_attention_layernorm_2.weight",)}
        for i in range(config.n_core):
            names |= {f"blocks.{i}.{a}": tuple(f"model.layers.{i}.{x}" for x in b) for a, b in inner.items()}
        return names

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        return {"lm_head.weight": "tied to model.embed_tokens.weight"} if config.tied else {}

    def close_loop(self, state: Tensor) -> Tensor:
        return self.norm(state)  # after every loop: the next loop's input, the readout state and the gate's input

    def exit_pdf(self, states: Tensor) -> Tensor:
        """Probability of leaving at each depth. states [depth, batch, n, d_model] -> [batch, n, depth], summing to 1.

        p_t = lambda_t prod_{j<t} (1 - lambda_j); the last depth takes the remainder, its gate is unused.
        """
        stay = torch.sigmoid(self.gate(states)).squeeze(-1).movedim(0, -1)
        left = torch.cumprod(torch.cat((torch.ones_like(stay[..., :1]), 1 - stay[..., :-1]), -1), -1)
        return torch.cat((left[..., :-1] * stay[..., :-1], left[..., -1:]), -1)
