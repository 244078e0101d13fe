"""Tiny random models of every family, with a dial for how much recurrence changes them.

What a shallow draft gets right decides which branches of a decoder run at all: with near-zero acceptance the accept
paths stay untested, with perfect acceptance the reject paths do. `gain` sweeps acceptance from 1 (gain 0: every
recurrence after the first changes nothing) to about 0 (gain 1 and above). Source of the idea: docs/algorithms.md, 2.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from loopscope import random_native as native
from loopscope.errors import SettingError
from loopscope.models.looped import LoopedCore
from loopscope.models.registry import config_from_dict

# Official config keys, at the sizes of the goldens in tests/.
_HUGINN = {
    "model_type": "huginn_raven", "architectures": ["RavenForCausalLM"], "block_class_name": "SandwichBlock",
    "injection_type": "linear", "state_init": "like-init", "bias": False, "qk_bias": True, "tie_embeddings": True,
    "n_embd": 48, "n_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 256, "padded_vocab_size": 256,
    "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "mean_recurrence": 4,
    "block_size": 128, "norm_eps": 1e-6, "rope_base": 50000, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
_OURO = {
    "model_type": "ouro", "architectures": ["OuroForCausalLM"], "hidden_act": "silu", "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "total_ut_steps": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
_RAVEN = _HUGINN | {
    "qk_bias": False, "tie_embeddings": False, "num_key_value_heads": 2, "intermediate_size": 96, "n_layers_in_recurrent_block": 3,
    "rope_theta": 5e5, "max_position_embeddings": 128, "norm_eps": 1e-5, "initial_state_mode": "random",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}
_RAVEN_OLMO = {name: value for name, value in _RAVEN.items() if name != "rope_scaling"} | {"num_key_value_heads": 4}
_NANBEIGE = {
    "model_type": "nanbeige", "architectures": ["NanbeigeForCausalLM"], "hidden_act": "silu", "hidden_size": 48, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_loops": 4, "loop_loss_weights": [], "skip_loop_final_norm": False, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 7e7, "rope_scaling": None, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}
_PARCAE = {
    "_class_name": "ParcaeConfig", "model_class_name": "Parcae", "block_class_name": "TransformerPreNormBlock",
    "mlp_class_name": "BaseMLP", "nonlin_name": "ReLU2", "norm_class_name": "RMSNorm", "injection_type": "diagonal",
    "init_strategy": "scaled-zero", "state_init": "like-init", "bias": False, "qk_bias": False, "qk_norm": True, "prelude_norm": True,
    "tie_embeddings": True, "n_embd": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
    "vocab_size": 256, "padded_vocab_size": 256, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 2,
    "mean_recurrence": 4, "mean_backprop_depth": 2, "block_size": 128, "norm_eps": 1e-5,
    "rope_settings": {"use_rope": True, "rope_base": 50000, "rope_condense_ratio": 1},
}
# Names of LoopedConfig -> official keys.
_KEYS_HUGINN = {
    "d_model": ("n_embd",), "n_heads": ("n_heads", "num_key_value_heads"), "n_kv_heads": ("num_key_value_heads",),
    "d_mlp": ("intermediate_size",), "vocab_size": ("vocab_size", "padded_vocab_size"), "n_prelude": ("n_layers_in_prelude",),
    "n_core": ("n_layers_in_recurrent_block",), "n_coda": ("n_layers_in_coda",), "depth": ("mean_recurrence",),
    "context": ("block_size",), "norm_eps": ("norm_eps",), "rope_theta": ("rope_base",), "tied": ("tie_embeddings",),
    "qk_bias": ("qk_bias",), "bos": ("bos_token_id",), "eos": ("eos_token_id",)}
_KEYS_RAVEN = _KEYS_HUGINN | {"context": ("max_position_embeddings",), "rope_theta": ("rope_theta",), "rope_scaling": ("rope_scaling",)}
_KEYS_PARCAE = {name: keys for name, keys in _KEYS_HUGINN.items() if name not in ("rope_theta", "qk_bias", "bos", "eos")} | {
    "n_heads": ("num_attention_heads", "num_key_value_heads")}
_KEYS_OURO = {
    "d_model": ("hidden_size",), "n_heads": ("num_attention_heads", "num_key_value_heads"), "n_kv_heads": ("num_key_value_heads",),
    "d_mlp": ("intermediate_size",), "vocab_size": ("vocab_size",), "n_core": ("num_hidden_layers",), "depth": ("total_ut_steps",),
    "context": ("max_position_embeddings",), "norm_eps": ("rms_norm_eps",), "rope_theta": ("rope_theta",),
    "tied": ("tie_word_embeddings",), "bos": ("bos_token_id",), "eos": ("eos_token_id",)}
_KEYS_NANBEIGE = _KEYS_OURO | {"d_head": ("head_dim",), "depth": ("num_loops",), "rope_scaling": ("rope_scaling",)}

_KEYS = {"huginn": _KEYS_HUGINN, "ouro": _KEYS_OURO, "raven": _KEYS_RAVEN, "raven_olmo": _KEYS_RAVEN, "nanbeige": _KEYS_NANBEIGE,
         "parcae": _KEYS_PARCAE}
_RAW = {"huginn": _HUGINN, "ouro": _OURO, "raven": _RAVEN, "raven_olmo": _RAVEN_OLMO, "nanbeige": _NANBEIGE, "parcae": _PARCAE}
_KEYS |= native.KEYS
_RAW |= native.RAW
# Tensors whose presence decides the wiring that the config leaves open.
_NAMES = {"raven": ("transformer.core_block.0.norm_1.weight",),
          "raven_olmo": ("transformer.core_block.0.norm_1.weight", "transformer.core_block.0.attn.q_norm.weight"),
          "huginn": ("transformer.core_block.0.norm_4.weight",)}
FAMILIES = tuple(_RAW)


def settings_of(family: str) -> tuple[str, ...]:
    """What `random_config` lets one set for a family, under LoopedConfig's names."""
    return tuple(_KEYS[family])


def random_config(family: str, **overrides: Any) -> dict[str, Any]:
    """An official config.json of a tiny model; "raven_olmo" is the OLMo wiring of "raven".

    `overrides` use LoopedConfig's names (depth, n_core, context, ...).
    """
    if family not in _RAW:
        raise SettingError(f"no random model of family {family!r}; known: {', '.join(FAMILIES)}")
    raw, keys = dict(_RAW[family]), _KEYS[family]
    for name, value in sorted(overrides.items(), key=lambda item: item[0] == "n_kv_heads"):  # after n_heads, which sets both
        if name not in keys:
            raise SettingError(f"a random {family} model has no setting {name!r}; settings: {', '.join(sorted(keys))}")
        raw |= dict.fromkeys(keys[name], value)
    if family in ("huginn", "raven", "raven_olmo"):
        width = raw["n_embd"]
        std = math.sqrt(2 / (5 * width))
        scale = math.sqrt(width) if family == "huginn" else 1.0
        raw["init_values"] = {"std": std, "embedding": std, "out_proj": std / math.sqrt(10), "embed_scale": scale}
    native.finish(family, raw)
    return raw


@torch.inference_mode(False)  # as in load_core: what is made inside inference mode must give gradients outside it
def make_random_core(family: str, *, seed: int = 0, gain: float = 1.0, dtype: torch.dtype = torch.float64,
                     **config_overrides: Any) -> LoopedCore:
    """A tiny random LoopedCore in evaluation mode; the same for the same arguments on every machine.

    Matrices are N(0, 1 / fan_in), norm weights 1 + 0.1 N(0, 1). `gain` multiplies what one recurrence feeds to the
    next: what the injection keeps of the state, and what the core's blocks add to it. Where a norm acts on what a
    branch adds, it undoes any factor on the matrices before it, so its own weights are scaled. Without injection the
    gain is squared: nothing pulls the state back and the changes of all recurrences add up. Top-1 agreement of depth 1
    with depth 4, Huginn / Ouro: gain 0: 1 / 1; .1: .73 / .91; .3: .45 / .35; .5: .22 / .10; 1: .03 / .07.
    """
    raw = random_config(family, **config_overrides)
    core = LoopedCore.from_config(config_from_dict(raw, _NAMES.get(family)))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in core.named_parameters():
            noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            p.data = _scaled(core, family, name, noise, gain).to(dtype)
    core.source = f"random-{family}"
    return core.eval().requires_grad_(False)


_STRENGTH = {"parcae": 1.5}  # half a squared ReLU is a weak MLP
_BRANCH_NORMS = {"ouro": ("norm_2.weight", "norm_4.weight"), "raven_olmo": ("norm_1.weight", "norm_2.weight")}


def _scaled(core: LoopedCore, family: str, name: str, noise: torch.Tensor, gain: float) -> torch.Tensor:
    """One parameter from standard normal noise."""
    if family in native.RAW:
        return native.scaled(core, family, name, noise, gain)
    config = core.config
    if name == "wte.weight":
        return noise / config.embed_scale
    if name == "norm.weight" and not config.injects:
        return 1 + 0.1 * gain * noise  # this norm closes every loop, so it too must become the identity
    if name == "adapter.A_log":  # Parcae: the state decays by exp(-dt exp(A_log)); here to gain times 0.6 to 0.8
        keep = (0.7 + 0.1 * torch.tanh(noise)) * max(gain, 1e-30)
        return torch.log(-torch.log(keep.clamp(max=0.99)) / torch.nn.functional.softplus(torch.tensor(0.5)))
    if name == "adapter.dt_bias":
        return torch.full_like(noise, 0.5)
    if "norm" in name:
        value = 1 + 0.1 * noise
    elif noise.ndim < 2 or name.endswith("qk_bias"):
        value = 0.1 * noise
    else:
        value = noise / math.sqrt(noise.shape[1])
    if name.startswith("value_embeds."):
        return noise
    if name == "adapter.weight":
        value[:, : config.d_model] *= gain
    if not name.startswith("blocks."):
        return value
    if family in _BRANCH_NORMS:
        return value * (gain if config.injects else gain**2) if name.endswith(_BRANCH_NORMS[family]) else value
    if config.injects:
        return value if "norm" in name or name.endswith("qk_bias") else value * gain * _STRENGTH.get(family, 1.0)
    return value * gain**2 if name.endswith(("attn.out.weight", "mlp.down.weight")) else value
