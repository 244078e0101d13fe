"""Nanbeige 4.2 (Nanbeige/Nanbeige4.2-3B, -Base): a Llama stack run num_loops times, with the final norm after every loop.

Equations and names: docs/families.md, section 5; after the original modelling file archived in
johnhalloran321/Nanbeige4.2-3B-mps-fix@a8de726.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need_bool, need_heads, need_int, need_number, read_rope, refuse
from loopscope.models.layers import HalfRotary, PreNormBlock
from loopscope.models.looped import LoopedCore


class NanbeigeCore(LoopedCore):
    family = "nanbeige"
    block_class = PreNormBlock
    rotary = HalfRotary

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        # In the official code, and off in every release.
        refuse(raw, cls.family, hidden_act="silu", attention_bias=False, mlp_bias=False, qk_layernorm=False,
               enable_double_loop_split=False, enable_hyper_connection=False, enable_mhc=False, enable_depth_attention=False,
               loop_share_kv=False, ngram_insert_all_layers=False, insert_ngram_layer_idx=[], emb_neighbor_num=None)
        weights = raw.get("loop_loss_weights") or []
        if not isinstance(weights, list):
            raise CheckpointError(f"config.json: loop_loss_weights must be a list, found {weights!r}")
        theta, scaling = read_rope(raw, "rope_theta")
        if scaling is not None and scaling["rope_type"] != "linear":
            raise CheckpointError(f"config.json: rope scaling of type {scaling['rope_type']!r} is not one of Nanbeige's (linear)")
        d_model, n_heads = need_int(raw, "hidden_size"), need_int(raw, "num_attention_heads")
        return LoopedConfig(
            family=cls.family, vocab_size=need_int(raw, "vocab_size"), d_model=d_model, n_heads=n_heads,
            n_kv_heads=need_int(raw, "num_key_value_heads"), d_head=need_heads(raw, d_model, n_heads),
            d_mlp=need_int(raw, "intermediate_size"), n_prelude=0, n_core=need_int(raw, "num_hidden_layers"), n_coda=0,
            # A list of loss weights outranks num_loops: one weight per loop before the last.
            depth=len(weights) + 1 if weights else need_int(raw, "num_loops"), context=need_int(raw, "max_position_embeddings"),
            norm_eps=need_number(raw, "rms_norm_eps"), rope_theta=theta, rope_scaling=scaling,
            tied=need_bool(raw, "tie_word_embeddings"), injects=False,
            variant="norm once" if need_bool(raw, "skip_loop_final_norm") else "norm every loop", bos=raw.get("bos_token_id"),
            eos=as_ids(raw.get("eos_token_id")), pad=raw.get("pad_token_id"), raw=dict(raw))

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        names: dict[str, tuple[str, ...]] = {"wte.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
        if not config.tied:
            names["head.weight"] = ("lm_head.weight",)
        inner = {"attn.qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
                 "attn.out.weight": ("self_attn.o_proj.weight",),
                 "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
                 "mlp.down.weight": ("mlp.down_proj.weight",),
                 "norm_1.weight": ("input_layernorm.weight",), "norm_2.weight": ("post_attention_layernorm.weight",)}
        for i in range(config.n_core):
            names |= {f"blocks.{i}.{a}": tuple(f"model.layers.{i}.{x}" for x in b) for a, b in inner.items()}
        return names

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        # Saved by patched copies of the official code; released files have none.
        names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": "computed from rope_theta" for i in range(config.n_core)}
        return names | ({"lm_head.weight": "tied to model.embed_tokens.weight"} if config.tied else {})

    def close_loop(self, state: Tensor) -> Tensor:
        return state if self.config.variant == "norm once" else self.norm(state)

    def before_head(self, h: Tensor) -> Tensor:
        return self.norm(h) if self.config.variant == "norm once" else h
