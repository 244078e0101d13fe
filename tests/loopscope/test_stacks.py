"""Retrofits and Nanbeige equal stacks of transformers' own Llama and OLMo 2 layers, on freshly drawn sizes.

The goldens hold one size each. Here heads and key-value heads, widths, loops, rotary bases and scalings, epsilons and
splits into prelude, core and coda are drawn; the layers are somebody else's, only the loop around them is written here.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from loopscope.models.layers import rotary_angles
from loopscope.random_models import make_random_core

FAMILIES = ("raven", "raven_olmo", "nanbeige")


def draw(family: str, seed: int):
    """A random core of drawn sizes, in float32."""
    rng = random.Random(f"{family} {seed}")
    kv = rng.choice([1, 2, 3])
    heads = kv * rng.choice([1, 2, 4])
    d_head = 2 * rng.randint(4, 12)
    sizes = {"n_heads": heads, "n_kv_heads": kv, "d_mlp": rng.randint(20, 90), "n_core": rng.randint(1, 3), "depth": rng.randint(1, 6),
             "vocab_size": rng.randint(40, 99), "context": 512, "norm_eps": 10.0 ** -rng.randint(3, 6),
             "rope_theta": 10.0 ** rng.uniform(2, 7), "tied": rng.random() < 0.5}
    if family == "nanbeige":
        sizes |= {"d_model": heads * rng.randint(4, 12), "d_head": d_head}  # transformers wants a multiple of the heads
        if rng.random() < 0.5:
            sizes["rope_scaling"] = {"type": "linear", "factor": rng.uniform(1, 9)}
    else:
        sizes |= {"d_model": heads * d_head, "n_prelude": rng.randint(0, 2), "n_coda": rng.randint(0, 2)}
        if family == "raven":
            low = rng.uniform(1, 2)
            sizes["rope_scaling"] = {"rope_type": "llama3", "factor": rng.uniform(2, 40), "low_freq_factor": low,
                                     "high_freq_factor": low + rng.uniform(0.5, 4),
                                     "original_max_position_embeddings": rng.randint(16, 300)}
    return make_random_core(family, seed=seed, gain=0.5, dtype=torch.float32, **sizes)


def reference_stack(core, blocks: nn.ModuleList):
    """The same layers as a transformers model without embedding and final norm: hidden [batch, n, d] -> hidden."""
    from transformers import LlamaConfig, LlamaModel, Olmo2Config, Olmo2Model

    c = core.config
    olmo = c.variant == "olmo"
    scaling = dict(c.rope_scaling) if c.rope_scaling else {"rope_type": "default"}
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    config = (Olmo2Config if olmo else LlamaConfig)(
        vocab_size=1, pad_token_id=None, hidden_size=c.d_model, intermediate_size=c.d_mlp, num_hidden_layers=len(blocks),
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.d_head, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context, rope_parameters=scaling | {"rope_theta": c.rope_theta}, attn_implementation="eager")
    model = (Olmo2Model if olmo else LlamaModel)(config).eval()
    model.norm = nn.Identity()
    rows = [n * c.d_head for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads)]
    with torch.no_grad():
        for layer, block in zip(model.layers, blocks, strict=True):
            for name, part in zip("qkv", block.attn.qkv.weight.split(rows)):
                getattr(layer.self_attn, f"{name}_proj").weight.copy_(part)
            gate, up = block.mlp.gate_up.weight.chunk(2)
            pairs = [(layer.self_attn.o_proj, block.attn.out), (layer.mlp.down_proj, block.mlp.down)]
            norms = ("post_attention_layernorm", "post_feedforward_layernorm") if olmo else ("input_layernorm", "post_attention_layernorm")
            pairs += [(getattr(layer, name), own) for name, own in zip(norms, (block.norm_1, block.norm_2))]
            if olmo:
                pairs += [(layer.self_attn.q_norm, block.attn.q_norm), (layer.self_attn.k_norm, block.attn.k_norm)]
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            for theirs, own in pairs:
                theirs.weight.copy_(own.weight)
    return lambda h: model(inputs_embeds=h, use_cache=False).last_hidden_state


@pytest.mark.support("transformers")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_a_loop_around_the_layers_of_transformers(family, seed):
    core = draw(family, seed)
    c, norm = core.config, core.norm
    tokens = torch.randint(0, c.vocab_size, (2, 40), generator=torch.Generator().manual_seed(seed))
    middle = reference_stack(core, core.blocks)
    embedding = core.wte.weight[tokens]
    if c.injects:
        before, after = (reference_stack(core, part) if len(part) else nn.Identity() for part in (core.prelude, core.coda))
        e = before(embedding)
        state = torch.zeros_like(e)
        for _ in range(c.depth):
            state = middle(torch.cat((state, e), -1) @ core.adapter.weight.T)
        hidden = norm(after(state))
    else:
        hidden = embedding
        for _ in range(c.depth):
            hidden = norm(middle(hidden))
    head = core.wte.weight if c.tied else core.head.weight
    start = "zero" if c.injects else None
    torch.testing.assert_close(core(tokens, start_state=start), hidden @ head.T, atol=3e-4, rtol=0)
    cache = core.make_cache(40, batch=2)
    parts = [core(chunk, start_state=start, cache=cache) for chunk in tokens.split([7, 1, 32], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), hidden @ head.T, atol=3e-4, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_llama3_frequencies_are_those_of_transformers_in_all_three_ranges(seed):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = random.Random(seed)
    theta, low = 10.0 ** rng.uniform(3, 6), rng.uniform(0.5, 2)
    scaling = {"rope_type": "llama3", "factor": rng.uniform(2, 40), "low_freq_factor": low, "high_freq_factor": low + rng.uniform(1, 5),
               "original_max_position_embeddings": rng.randint(100, 9000)}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, max_position_embeddings=131072,
                         rope_parameters=scaling | {"rope_theta": theta})
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = rotary_angles(128, theta, 2, scaling)[1]
    assert factor == 1
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)
    stretch = rotary_angles(128, theta, 2)[1] / ours
    assert stretch.min() == pytest.approx(1) and stretch.max() == pytest.approx(scaling["factor"])
    assert ((stretch > 1.01) & (stretch < scaling["factor"] - 0.01)).any()
