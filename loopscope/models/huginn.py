"""Huginn-0125 (tomg-group-umd/huginn-0125): prelude, adapter-injected core, coda, sandwich norms, random start state.

Equations and names: docs/families.md, section 1; after seal-rg/recurrent-pretraining@59e0b69.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need
from loopscope.models.layers import InterleavedRotary, SumSandwichBlock
from loopscope.models.looped import LoopedCore


class HuginnCore(LoopedCore):
    family = "huginn"
    block_class = SumSandwichBlock
    rotary = InterleavedRotary

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        if need(raw, "injection_type") != "linear":
            raise CheckpointError(f"config.json: injection_type {raw['injection_type']!r} is not supported; Huginn's is 'linear'")
        if raw.get("bias"):
            raise CheckpointError("config.json: bias true is not supported; released Huginn models have none")
        if need(raw, "block_class_name") != "SandwichBlock":
            raise CheckpointError(f"config.json: block_class_name {raw['block_class_name']!r} is not Huginn's 'SandwichBlock'; "
                                  "retrofitted models share its model_type and are not supported yet")
        d_model, n_heads = need(raw, "n_embd"), need(raw, "n_heads")
        init = need(raw, "init_values")
        if "state_init" in raw and raw["state_init"] not in ("like-init", "zero"):
            raise CheckpointError(f"config.json: state_init {raw['state_init']!r} is not supported (like-init, zero)")
        scale = need(init, "embed_scale")
        return LoopedConfig(
            family=cls.family, vocab_size=raw.get("padded_vocab_size") or need(raw, "vocab_size"), d_model=d_model,
            n_heads=n_heads, n_kv_heads=raw.get("num_key_value_heads") or n_heads,
            d_head=raw.get("head_dim") or d_model // n_heads, d_mlp=need(raw, "intermediate_size"),
            n_prelude=need(raw, "n_layers_in_prelude"), n_core=need(raw, "n_layers_in_recurrent_block"),
            n_coda=need(raw, "n_layers_in_coda"), depth=need(raw, "mean_recurrence"), context=need(raw, "block_size"),
            norm_eps=need(raw, "norm_eps"), rope_theta=float(need(raw, "rope_base")), tied=bool(need(raw, "tie_embeddings")),
            injects=True, embed_scale=float(scale), qk_bias=bool(need(raw, "qk_bias")),
            state_std=0.0 if raw.get("state_init") == "zero" else float(need(init, "std")) * float(scale),
            bos=raw.get("bos_token_id"), eos=as_ids(raw.get("eos_token_id")), pad=raw.get("pad_token_id"), raw=dict(raw))

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        names = {"wte.weight": "transformer.wte.weight", "adapter.weight": "transformer.adapter.weight",
                 "norm.weight": "transformer.ln_f.weight"}
        if not config.tied:
            names["head.weight"] = "lm_head.weight"
        inner = {"attn.qkv.weight": "attn.Wqkv.weight", "attn.out.weight": "attn.proj.weight",
                 "mlp.gate_up.weight": "mlp.fc.weight", "mlp.down.weight": "mlp.proj.weight",
                 **{f"norm_{i}.weight": f"norm_{i}.weight" for i in range(1, 5)}}
        if config.qk_bias:
            inner["attn.qk_bias"] = "attn.qk_bias"
        parts = (("prelude", "prelude", config.n_prelude), ("blocks", "core_block", config.n_core), ("coda", "coda", config.n_coda))
        for ours, theirs, count in parts:
            for i in range(count):
                names |= {f"{ours}.{i}.{a}": f"transformer.{theirs}.{i}.{b}" for a, b in inner.items()}
        return {ours: (theirs,) for ours, theirs in names.items()}

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        names = {"freqs_cis": "the rotary table is computed from rope_base"}
        return names | ({"lm_head.weight": "tied to transformer.wte.weight"} if config.tied else {})

    @classmethod
    def to_official(cls, name: str, tensor: Tensor, config: LoopedConfig) -> Tensor:
        """The official tensor of an own parameter: qk_bias is [2, 1, heads, d_head] there."""
        return tensor.view(2, 1, config.n_heads, config.d_head) if name.endswith("qk_bias") else tensor

    def inject(self, state: Tensor, x: Tensor) -> Tensor:
        return self.adapter(torch.cat((state, x), dim=-1))  # state first

    def before_coda(self, state: Tensor) -> Tensor:
        return self.norm(state)

    def before_head(self, h: Tensor) -> Tensor:
        return self.norm(h)  # ln_f is used twice, with the same weight


def official_init_std(d_model: int) -> float:
    """sqrt(2 / (5 d)): the standard deviation Huginn initialises embeddings and start states with."""
    return math.sqrt(2 / (5 * d_model))
