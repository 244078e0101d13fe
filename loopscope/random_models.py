"""Tiny random models of every family, with a dial for how much recurrence changes them.

What a shallow draft gets right decides which branches of a decoder run at all: with near-zero acceptance the accept
paths stay untested, with perfect acceptance the reject paths do. `gain` sweeps acceptance from 1 (gain 0: every
recurrence after the first changes nothing) to about 0 (gain 1 and above). Source of the idea: docs/algorithms.md, 2.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch

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
# Names of LoopedConfig -> official keys.
_KEYS = {
    "huginn": {"d_model": ("n_embd",), "n_heads": ("n_heads", "num_key_value_heads"), "n_kv_heads": ("num_key_value_heads",),
               "d_mlp": ("intermediate_size",), "vocab_size": ("vocab_size", "padded_vocab_size"),
               "n_prelude": ("n_layers_in_prelude",), "n_core": ("n_layers_in_recurrent_block",), "n_coda": ("n_layers_in_coda",),
               "depth": ("mean_recurrence",), "context": ("block_size",), "norm_eps": ("norm_eps",), "rope_theta": ("rope_base",),
               "tied": ("tie_embeddings",), "qk_bias": ("qk_bias",), "bos": ("bos_token_id",), "eos": ("eos_token_id",)},
    "ouro": {"d_model": ("hidden_size",), "n_heads": ("num_attention_heads", "num_key_value_heads"),
             "n_kv_heads": ("num_key_value_heads",), "d_mlp": ("intermediate_size",), "vocab_size": ("vocab_size",),
             "n_core": ("num_hidden_layers",), "depth": ("total_ut_steps",), "context": ("max_position_embeddings",),
             "norm_eps": ("rms_norm_eps",), "rope_theta": ("rope_theta",), "tied": ("tie_word_embeddings",),
             "bos": ("bos_token_id",), "eos": ("eos_token_id",)},
}
_RAW = {"huginn": _HUGINN, "ouro": _OURO}
FAMILIES = tuple(_RAW)


def random_config(family: str, **overrides: Any) -> dict[str, Any]:
    """An official config.json of a tiny model. `overrides` use LoopedConfig's names (depth, n_core, context, ...)."""
    if family not in _RAW:
        raise SettingError(f"no random model of family {family!r}; known: {', '.join(FAMILIES)}")
    raw, keys = dict(_RAW[family]), _KEYS[family]
    for name, value in sorted(overrides.items(), key=lambda item: item[0] == "n_kv_heads"):  # after n_heads, which sets both
        if name not in keys:
            raise SettingError(f"a random {family} model has no setting {name!r}; settings: {', '.join(sorted(keys))}")
        raw |= dict.fromkeys(keys[name], value)
    if family == "huginn":
        width = raw["n_embd"]
        std = math.sqrt(2 / (5 * width))
        raw["init_values"] = {"std": std, "embedding": std, "out_proj": std / math.sqrt(10), "embed_scale": math.sqrt(width)}
    return raw


def make_random_core(family: str, *, seed: int = 0, gain: float = 1.0, dtype: torch.dtype = torch.float64,
                     **config_overrides: Any) -> LoopedCore:
    """A tiny random LoopedCore in evaluation mode; the same for the same arguments on every machine.

    Matrices are N(0, 1 / fan_in), norm weights 1 + 0.1 N(0, 1). `gain` multiplies what one recurrence feeds to the
    next: with injection (Huginn) the core's matrices and the state's half of the adapter; without (Ouro) the weights
    of the norms on the branch outputs (those norms undo any factor on the matrices before them), and squared, since
    nothing pulls the state back and the changes of all recurrences add up. Top-1 agreement of depth 1 with depth 4,
    Huginn / Ouro: gain 0: 1 / 1; .1: .73 / .91; .3: .45 / .35; .5: .22 / .10; 1: .03 / .07.
    """
    core = LoopedCore.from_config(config_from_dict(random_config(family, **config_overrides)))
    draw = torch.Generator().manual_seed(seed)
    d = core.config.d_model
    with torch.no_grad():
        for name, p in core.named_parameters():
            noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            if name == "wte.weight":
                value = noise / core.config.embed_scale
            elif "norm" in name:
                value = 1 + 0.1 * noise
            elif p.ndim < 2 or name.endswith("qk_bias"):
                value = 0.1 * noise
            else:
                value = noise / math.sqrt(p.shape[1])
            if name == "adapter.weight":
                value[:, :d] *= gain
            elif name == "norm.weight" and not core.config.injects:
                value = 1 + 0.1 * gain * noise  # this norm closes every loop, so it too must become the identity
            elif name.startswith("blocks.") and core.config.injects and "norm" not in name and not name.endswith("qk_bias"):
                value *= gain
            elif name.startswith("blocks.") and not core.config.injects and name.endswith(("norm_2.weight", "norm_4.weight")):
                value *= gain**2
            p.data = value.to(dtype)
    core.source = f"random-{family}"
    return core.eval().requires_grad_(False)
