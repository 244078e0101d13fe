"""What is trained, and how: the official config of each shipped model and its training recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

WIDTH, HEADS, MLP, VOCAB, CONTEXT = 128, 4, 352, 1024, 512


def huginn_config(core_layers: int = 2) -> dict[str, Any]:
    """The official ``config.json`` keys of a small Huginn (``huginn_raven``)."""
    std = math.sqrt(2 / (5 * WIDTH))
    layers = 2 + core_layers
    effective = 2 + 16 * core_layers
    return {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "norm_eps": 1e-6,
        "n_embd": WIDTH,
        "n_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "intermediate_size": MLP,
        "n_layers": layers,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": core_layers,
        "n_layers_in_coda": 1,
        "effective_expected_depth": effective,
        "mean_recurrence": 16,
        "mean_backprop_depth": 4,
        "sampling_scheme": "poisson-lognormal-filling",
        "injection_type": "linear",
        "state_init": "like-init",
        "init_strategy": "takase",
        "init_orthogonal": False,
        "init_values": {
            "std": std,
            "embedding": std,
            "embed_scale": math.sqrt(WIDTH),
            "out_proj": std / math.sqrt(2 * effective),
        },
        "qk_bias": True,
        "bias": False,
        "rope_base": 50000,
        "block_size": CONTEXT,
        "vocab_size": VOCAB,
        "padded_vocab_size": VOCAB,
        "padding_multiple": 256,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def ouro_config(layers: int = 3) -> dict[str, Any]:
    """The official ``config.json`` keys of a small Ouro."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Recipe:
    """One training run. ``rows`` x ``length`` tokens a step; learning rates are the peaks."""

    config: dict[str, Any]
    steps: int
    rows: int = 4
    length: int = 512
    seed: int = 0
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.05
    clip: float = 1.0
    warmup: int = 50
    #: Share of the run over which the rates fall linearly to zero.
    decay_share: float = 0.6
    #: Huginn only: recurrences are drawn as 1 + Poisson(lognormal), with this mean and at most ``most_recurrences``.
    mean_recurrences: float = 8.0
    most_recurrences: int = 24
    #: Ouro only: weight of the entropy in the exit gate's own objective.
    gate_entropy: float = 0.05
    #: Huginn only: gradients flow through the last recurrences only.
    backprop_recurrences: int = 4

    def rate(self, step: int) -> float:
        """Learning-rate factor: warm-up, a plateau, then linear to zero."""
        falling = min(1.0, (self.steps - step) / (self.decay_share * self.steps))
        return min((step + 1) / self.warmup, falling)

    def shortened(self, steps: int) -> Recipe:
        """The same recipe over fewer steps."""
        return replace(self, steps=steps)


RECIPES: dict[str, Recipe] = {
    "tiny-huginn": Recipe(huginn_config(), steps=2600, rows=2, muon_lr=0.015, adam_lr=0.003, mean_recurrences=12.0),
    "tiny-ouro": Recipe(ouro_config(), steps=1700),
}
