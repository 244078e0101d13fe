"""Huginn and Ouro match outputs of their official code on the same weights (tests/goldens/*/README.md)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from decoders import Autoregressive, Wavefront
from loopscope.models.loading import load_core

ATOL = 3e-4


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def cases(goldens, dtype):
    out = {}
    for family in ("huginn", "ouro"):
        out[family] = load_core(goldens / family, dtype=dtype), load_file(goldens / family / "io.safetensors")
    return out


def runs(family, io):
    if family == "ouro":
        return [(f"_T{t}", t, None) for t in range(1, 5)]
    return [(f"_{mode}_T{t}", t, "zero" if mode == "zero" else io["init_states"]) for mode in ("zero", "state") for t in range(1, 5)]


@pytest.mark.support("golden logits")
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_logits_match_at_every_depth(cases, family):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        logits = core(io["input_ids"], depth=depth, start_state=start)
        torch.testing.assert_close(logits.float(), io[f"logits{name}"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_logits_match_when_the_prompt_goes_through_the_cache_in_chunks(cases, family):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        cache = core.make_cache(24, depth, batch=2)
        parts = [core(chunk, depth=depth, start_state=start, cache=cache) for chunk in io["input_ids"].split([9, 1, 14], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1).float(), io[f"logits{name}"], atol=ATOL, rtol=0)


@pytest.mark.support("golden tokens")
@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1)], ids=repr)
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_greedy_tokens_match_exactly(cases, family, decoder):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        if f"greedy{name}" not in io:
            continue
        for row in range(2):
            own = start if start is None or isinstance(start, str) else start[row : row + 1]
            got = decoder.generate(core, io["input_ids"][row], max_new_tokens=16, depth=depth, start_state=own)
            # the official runs go on behind an end-of-sequence token; ours stop there
            want = io[f"greedy{name}"][row].tolist()
            assert got.tokens == want[: len(got.tokens)]
            assert len(got.tokens) == 16 or got.tokens[-1] in core.config.eos


@pytest.mark.support("golden states", family="huginn")
def test_huginn_states_prelude_and_latents_match(cases):
    core, io = cases["huginn"]
    x = core.embed(io["input_ids"])
    torch.testing.assert_close(x.float(), io["prelude_out"], atol=ATOL, rtol=0)
    for mode in ("zero", "state"):
        state = core.start(x, start_state="zero" if mode == "zero" else io["init_states"])
        for r in range(4):
            state = core.recur(state, x)
            torch.testing.assert_close(state.float(), io[f"core_states_{mode}"][r], atol=ATOL, rtol=0)
        torch.testing.assert_close(core.norm(state).float(), io[f"latent_ln_{mode}_T4"], atol=ATOL, rtol=0)


@pytest.mark.support("golden states", family="ouro")
def test_ouro_states_gate_and_exit_distribution_match(cases):
    core, io = cases["ouro"]
    state = x = core.embed(io["input_ids"])
    states = []
    for r in range(4):
        state = core.recur(state, x)
        states.append(state)
        torch.testing.assert_close(state.float(), io["hidden_steps"][r], atol=ATOL, rtol=0)
    stacked = torch.stack(states)
    torch.testing.assert_close(core.gate(stacked).squeeze(-1).movedim(0, -1).float(), io["gate_logits"], atol=ATOL, rtol=0)
    pdf = core.exit_pdf(stacked)
    torch.testing.assert_close(pdf.float(), io["exit_pdf"], atol=ATOL, rtol=0)
    torch.testing.assert_close(pdf.sum(-1), torch.ones_like(pdf[..., 0]))


@pytest.mark.support("save")
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_what_was_loaded_can_be_written_and_loaded_again_bit_for_bit(cases, family, dtype, tmp_path):
    core, io = cases[family]
    core.save_pretrained(tmp_path / "copy")
    again = load_core(tmp_path / "copy", dtype=dtype)
    assert again.config == core.config
    for (name, a), (other, b) in zip(core.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_loaded_inside_inference_mode_gives_gradients_outside_it(goldens):
    with torch.inference_mode():
        core = load_core(goldens / "huginn")
        core(torch.tensor([[1, 2, 3]]))  # the rotary table and start states are made here
    state = core.start(core.embed(torch.tensor([[1, 2, 3]]))).clone().requires_grad_()
    core.read(core.recur(state, core.embed(torch.tensor([[1, 2, 3]])))).sum().backward()
    assert state.grad.abs().sum() > 0
