"""Tiny random Dory and HRM-Text models: the parts of loopscope.random_models that only these two need."""

from __future__ import annotations

import math
from typing import Any

import torch

from loopscope.models.looped import LoopedCore

_SHARED: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "hidden_size": 48, "head_dim": 12, "num_attention_heads": 4,
    "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}
RAW: dict[str, dict[str, Any]] = {
    "dory": _SHARED | {
        "model_type": "dory", "num_key_value_heads": 2, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
        "n_recurrent_loops": 4, "sliding_window": 6, "initializer_range": 0.0177, "ngpt_alpha_init": 0.4, "recurrent_kv_cache_mode": None,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e7},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "hrm_text": _SHARED | {
        "model_type": "hrm_text", "num_layers_per_stack": 2, "H_cycles": 4, "L_cycles": 2, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "embedding_scale": 50.0, "prefix_lm": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
_KEYS: dict[str, tuple[str, ...]] = {
    "d_model": ("hidden_size",), "n_heads": ("num_attention_heads",), "d_head": ("head_dim",), "d_mlp": ("intermediate_size",),
    "vocab_size": ("vocab_size",), "context": ("max_position_embeddings",), "tied": ("tie_word_embeddings",), "bos": ("bos_token_id",),
    "eos": ("eos_token_id",)}
KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "dory": _KEYS | {"n_heads": ("num_attention_heads", "num_key_value_heads"), "n_kv_heads": ("num_key_value_heads",),
                     "n_prelude": ("n_input_layers",), "n_core": ("n_recurrent_layers",), "n_coda": ("n_output_layers",),
                     "depth": ("n_recurrent_loops",), "window": ("sliding_window",), "kv_slots": ("recurrent_kv_cache_mode",)},
    "hrm_text": _KEYS | {"n_core": ("num_layers_per_stack",), "depth": ("H_cycles",), "inner_cycles": ("L_cycles",),
                         "norm_eps": ("rms_norm_eps",)},
}


def finish(family: str, raw: dict[str, Any]) -> None:
    """Fill in the keys that follow from others. Dory: every second layer reads a window; kv_slots None or 1 names the mode."""
    if family == "dory":
        layers = raw["num_hidden_layers"] = sum(raw[f"n_{part}_layers"] for part in ("input", "recurrent", "output"))
        raw["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        raw["recurrent_kv_cache_mode"] = "last_loop" if raw["recurrent_kv_cache_mode"] else "per_loop"


def scaled(core: LoopedCore, family: str, name: str, noise: torch.Tensor, gain: float) -> torch.Tensor:
    """One parameter from standard normal noise.

    `gain` multiplies the rates of the core's steps (Dory), or what the blocks of both stacks add and where z_L starts
    (HRM-Text). Top-1 agreement of depth 1 with depth 4, Dory / HRM-Text: gain 0: 1 / 1; .1: .78 / .75; .3: .55 / .40;
    .5: .28 / .28; 1: .10 / .08.
    """
    if name == "wte.weight":
        return noise / core.config.embed_scale
    if family == "hrm_text":
        value = 0.1 * noise if noise.ndim < 2 else noise / math.sqrt(noise.shape[1])
        return value * gain if name.endswith(("attn.out.weight", "mlp.down.weight", "z_l_init")) else value
    if noise.ndim > 1:
        return noise / math.sqrt(noise.shape[1])
    # Learned scales; all but the MLP's are stored as multiples of the initialiser range.
    value = (1 + 0.1 * noise) * (1.0 if ".suv_" in name else core.config.raw["initializer_range"])
    return value * gain if name.startswith("blocks.") and ".lambda_" in name else value
