"""Nulls keep the scale of what they replace and nothing else."""

from __future__ import annotations

import pytest
import torch

from probes.nulls import apply_channel, channel_weights, generator, random_map, random_weight_model, with_factors
from probes.recording import Recording
from probes.settling import channels, distances, normed_states


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_random_weights_are_the_same_numbers_in_another_order(family, request):
    core = request.getfixturevalue(family)
    null = random_weight_model(core, seed=3)
    own = dict(core.named_parameters())
    for name, tensor in null.named_parameters():
        assert torch.equal(tensor.flatten().sort().values, own[name].flatten().sort().values), name
        assert tensor.numel() < 10 or not torch.equal(tensor, own[name]), name
    again, other = (dict(random_weight_model(core, seed).named_parameters()) for seed in (3, 4))
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(again[name], dict(null.named_parameters())[name]) and not torch.equal(again[name], other[name])


def test_random_weights_stay_within_q_k_and_v_and_within_the_adapter_halves(huginn):
    null = random_weight_model(huginn)
    for theirs, own in ((null.blocks[1].attn.qkv.weight.split(48), huginn.blocks[1].attn.qkv.weight.split(48)),
                        (null.adapter.weight.chunk(2, 1), huginn.adapter.weight.chunk(2, 1)),
                        (null.blocks[1].mlp.gate_up.weight.chunk(2), huginn.blocks[1].mlp.gate_up.weight.chunk(2))):
        for a, b in zip(theirs, own):
            assert torch.equal(a.flatten().sort().values, b.flatten().sort().values)


def test_making_the_null_leaves_the_model_alone(huginn):
    before = huginn(torch.arange(9))
    random_weight_model(huginn)
    assert torch.equal(huginn(torch.arange(9)), before)


def test_a_random_map_has_the_singular_values_of_the_original_and_no_other_likeness():
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    null = random_map(weight, generator(0, "a"))
    assert torch.allclose(torch.linalg.svdvals(null), torch.linalg.svdvals(weight))
    assert not torch.allclose(null, weight)
    assert torch.equal(null, random_map(weight, generator(0, "a"))) and not torch.equal(null, random_map(weight, generator(0, "b")))


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_with_the_true_factors_the_random_map_gives_the_true_distances(family, request):
    """Per channel, layer and head, biases included: the null differs from the measurement in its two factors only."""
    core = request.getfixturevalue(family)
    names = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "hook_attn_out", "hook_resid_pre")
    with torch.inference_mode():
        recorded = Recording(core, torch.arange(10, 22), names)
        true = {(c, layer): values for c, layer, values in channels(core, recorded)}
        for layer, block in enumerate(core.blocks):
            normed = normed_states(core, recorded, layer)
            for channel, (weight, bias) in channel_weights(block.attn).items():
                left, _, right = torch.linalg.svd(weight, full_matrices=False)
                same = apply_channel(normed, with_factors(weight, left, right.T), bias)
                other = apply_channel(normed, random_map(weight, generator(0, channel)), bias)
                for metric, expected in distances(true[channel, layer]).items():
                    assert distances(same)[metric] == pytest.approx(expected, abs=1e-10)
                    assert distances(other)[metric][0] != pytest.approx(expected[0], abs=1e-4)
