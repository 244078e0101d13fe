"""Huginn-0125 (tomg-group-umd/huginn-0125): prelude, adapter-injected core, coda, sandwich norms, random start state.

Equations and names: docs/families.md, section 1; after seal-rg/recurrent-pretraining@59e0b69.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need, need_bool, need_dict, need_heads, need_int, need_number, refuse
from loopscope.models.layers import Block, InterleavedRotary, SumSandwichBlock
from loopscope.models.looped import LoopedCore


class HuginnCore(LoopedCore):
    family = "huginn"
    block_class: ClassVar[type[Block]] = SumSandwichBlock
    rotary: ClassVar[type] = InterleavedRotary

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        refuse(raw, "Huginn", bias=False, test_time_noise=0, mlp_class_name="GatedMLP", nonlin_name="SiLU")
        if need(raw, "injection_type") != "linear":
            raise CheckpointError(f"config.json: injection_type {raw['injection_type']!r} is not supported; Huginn's is 'linear'")
        if need(raw, "block_class_name") != "SandwichBlock":
            raise CheckpointError(f"config.json: block_class_name {raw['block_class_name']!r} is not Huginn's 'SandwichBlock'")
        d_model, n_heads = need_int(raw, "n_embd"), need_int(raw, "n_heads")
        init = need_dict(raw, "init_values")
        if "state_init" in raw and raw["state_init"] not in ("like-init", "zero"):
            raise CheckpointError(f"config.json: state_init {raw['state_init']!r} is not supported (like-init, zero)")
        scale = need_number(init, "embed_scale")
        return LoopedConfig(
            family=cls.family, vocab_size=need_int(raw, "padded_vocab_size" if raw.get("padded_vocab_size") else "vocab_size"),
            d_model=d_model, n_heads=n_heads,
            n_kv_heads=need_int(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else n_heads,
            d_head=need_heads(raw, d_model, n_heads), d_mlp=need_int(raw, "intermediate_size"),
            n_prelude=need_int(raw, "n_layers_in_prelude", 0), n_core=need_int(raw, "n_layers_in_recurrent_block"),
            n_coda=need_int(raw, "n_layers_in_coda", 0), depth=need_int(raw, "mean_recurrence"), context=need_int(raw, "block_size"),
            norm_eps=need_number(raw, "norm_eps"), rope_theta=need_number(raw, "rope_base"), tied=need_bool(raw, "tie_embeddings"),
            injects=True, embed_scale=scale, qk_bias=need_bool(raw, "qk_bias"),
            state_std=0.0 if raw.get("state_init") == "zero" else need_number(init, "std", zero=True) * scale,
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
        """qk_bias is [2, 1, heads, d_head] there."""
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
