"""Retrofitted recurrence (Recurrent-Llama-3.2, -TinyLlama, -OLMo-2): a pretrained stack cut into prelude, core and coda.

They share Huginn's model_type, class name and `block_class_name`, but not its maths: Llama's pre-norm or OLMo 2's
post-norm blocks, rotate-half rotary embedding, and no norm between core and coda. Which of the two wirings it is,
nothing in the config says: the tensor names do. Equations and names: docs/families.md, section 4; after
LoopedLMs/retrofitting-recurrence@3797ded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need, need_bool, need_dict, need_heads, need_int, need_number, read_rope, refuse
from loopscope.models.huginn import HuginnCore
from loopscope.models.layers import Block, HalfRotary, PostNormBlock, PreNormBlock

VARIANTS: dict[str, type[Block]] = {"llama": PreNormBlock, "olmo": PostNormBlock}


def is_retrofit(raw: Mapping[str, Any], names: Collection[str] | None = None) -> bool:
    """Whether a `huginn_raven` checkpoint is a retrofit and not Huginn: by its tensor names, else by its config."""
    blocks = [name for name in names or () if name.startswith("transformer.core_block.")]
    if blocks:
        return not any(name.endswith(("norm_3.weight", "norm_4.weight", "qk_bias")) for name in blocks)
    return raw.get("qk_bias") is False


def variant_of(raw: Mapping[str, Any], names: Collection[str] | None = None) -> str:
    """"llama" or "olmo". Without tensor names the config can only hint: scaled rotary embedding and shared heads are Llama's."""
    if names:
        return "olmo" if any(name.endswith("attn.q_norm.weight") for name in names) else "llama"
    if raw.get("rope_scaling") or raw.get("num_key_value_heads") != raw.get("n_heads"):
        return "llama"
    return "olmo" if "olmo" in f"{raw.get('_name_or_path')} {raw.get('auto_map')}".lower() else "llama"


class RavenCore(HuginnCore):
    family = "raven"
    block_class: ClassVar[type[Block]] = PreNormBlock
    rotary = HalfRotary

    def __init__(self, config: LoopedConfig) -> None:
        self.block_class = VARIANTS[config.variant]  # type: ignore[misc]  # the instance's, before its blocks are built
        super().__init__(config)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        refuse(raw, "retrofitted", injection_type="linear", bias=False, test_time_noise=0, initial_state_mode="random",
               mlp_class_name="GatedMLP", nonlin_name="SiLU")
        if need(raw, "state_init") not in ("like-init", "zero"):
            raise CheckpointError(f"config.json: state_init {raw['state_init']!r} is not supported (like-init, zero)")
        d_model, n_heads = need_int(raw, "n_embd"), need_int(raw, "n_heads")
        init = need_dict(raw, "init_values")
        scale = need_number(init, "embed_scale")
        # The official code takes rope_theta; the converters leave another value behind in rope_base.
        theta, scaling = read_rope(raw, "rope_theta", "rope_base")
        if raw.get("max_position_embeddings") is not None:
            context = need_int(raw, "max_position_embeddings")  # block_size is only the length that was trained on
        else:
            context = need_int(raw, "block_size")
        config = LoopedConfig(
            family=cls.family, vocab_size=need_int(raw, "padded_vocab_size" if raw.get("padded_vocab_size") else "vocab_size"),
            d_model=d_model, n_heads=n_heads, n_kv_heads=need_int(raw, "num_key_value_heads"),
            d_head=need_heads(raw, d_model, n_heads), d_mlp=need_int(raw, "intermediate_size"),
            n_prelude=need_int(raw, "n_layers_in_prelude", 0), n_core=need_int(raw, "n_layers_in_recurrent_block"),
            n_coda=need_int(raw, "n_layers_in_coda", 0), depth=need_int(raw, "mean_recurrence"), context=context,
            norm_eps=need_number(raw, "norm_eps"), rope_theta=theta, rope_scaling=scaling,
            tied=need_bool(raw, "tie_embeddings"), injects=True, embed_scale=scale, qk_bias=need_bool(raw, "qk_bias"),
            # Read, never recomputed: converted models keep the value of Huginn's width.
            state_std=0.0 if raw["state_init"] == "zero" else need_number(init, "std", zero=True) * scale,
            variant=variant_of(raw), bos=raw.get("bos_token_id"), eos=as_ids(raw.get("eos_token_id")),
            pad=raw.get("pad_token_id"), raw=dict(raw))
        if config.qk_bias and config.n_kv_heads != config.n_heads:
            raise CheckpointError("config.json: qk_bias with shared key-value heads has no official layout and is not supported")
        return config

    @classmethod
    def config_of(cls, raw: Mapping[str, Any], names: Collection[str] | None = None) -> LoopedConfig:
        return replace(cls.read_config(raw), variant=variant_of(raw, names))

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        names = {ours: theirs for ours, theirs in super().official_names(config).items()
                 if not ours.endswith(("norm_3.weight", "norm_4.weight"))}
        if config.variant == "olmo":
            for ours in [name for name in names if name.endswith("attn.qkv.weight")]:
                for norm in ("q_norm.weight", "k_norm.weight"):
                    names[ours.replace("qkv.weight", norm)] = (names[ours][0].replace("Wqkv.weight", norm),)
        return names

    def before_coda(self, state: Tensor) -> Tensor:
        return state  # unlike Huginn: ln_f is used once, at the end
