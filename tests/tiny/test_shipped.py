"""The shipped folders: complete, small, official in every name, and showing the depth they are meant to show."""

import json

import pytest
import torch
from safetensors import safe_open

from loopscope.models.loading import load_core
from loopscope.tiny import NAMES, WEIGHTS
from loopscope.tiny.recipe import RECIPES

MIB = 1024 * 1024


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


def card(name):
    return json.loads((WEIGHTS / name / "card.json").read_text())


def test_the_folder_is_complete_and_below_four_mebibytes(name):
    files = {f.name: f.stat().st_size for f in (WEIGHTS / name).iterdir()}
    assert set(files) == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "card.md", "card.json"
    }
    assert sum(files.values()) < 4 * MIB


def test_the_config_is_that_of_the_recipe(name):
    assert json.loads((WEIGHTS / name / "config.json").read_text()) == RECIPES[name].config


def test_weights_are_bfloat16_finite_and_officially_named(name):
    with safe_open(WEIGHTS / name / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    assert all(t.dtype == torch.bfloat16 and torch.isfinite(t).all() for t in tensors.values())
    expected = {
        "tiny-huginn": {"transformer.wte.weight", "transformer.adapter.weight", "transformer.core_block.0.attn.Wqkv.weight"},
        "tiny-ouro": {"model.embed_tokens.weight", "model.early_exit_gate.bias", "model.layers.0.self_attn.q_proj.weight"},
    }[name]
    assert expected <= set(tensors)


def test_it_loads_by_name_and_reads_held_out_text(name):
    core = load_core(name)
    assert core.config.depth == {"tiny-huginn": 16, "tiny-ouro": 4}[name]
    tokens = core.to_tokens("Q: Add 23 and 48 in columns.\nA: 3+8=11, write 1, carry 1. 2+4+1=7, write 7. The answer is")
    with torch.no_grad():
        logits = core(tokens)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss < 3.0  # a fresh model has log(1024) = 6.9


def test_the_card_is_of_a_finished_run(name):
    n = card(name)
    assert n["steps"] == n["planned_steps"] == RECIPES[name].steps
    assert n["command"] == f"python -m loopscope.tiny.train {name}"
    assert n["loss_curve"][-1]["loss"] < n["loss_curve"][0]["loss"] / 2


def test_the_card_s_numbers_are_those_of_the_shipped_weights(name):
    """A part of the card measured again: loss and agreement on maths (code depends on the Python version)."""
    from loopscope.tiny.data import Validation
    from loopscope.tiny.evaluate import _scores

    core = load_core(name)
    from loopscope.tiny import tokenizer as tok

    x, y = Validation(tok.load(WEIGHTS / name)).maths(128)
    start = "keyed" if core.has_start_state else "none"
    loss, agreement, _ = _scores(core, x[:32], y[:32], core.config.depth, start)
    full = card(name)["evaluation"][start]
    assert loss[-1] == pytest.approx(full["loss"]["maths"][-1], rel=0.25)
    assert agreement[0] == pytest.approx(full["agreement"]["maths"][0], abs=0.05)


def test_depth_shows_on_tiny_huginn():
    keyed = card("tiny-huginn")["evaluation"]["keyed"]
    code = keyed["agreement"]["code"]
    assert code[0] < 0.8 and code[1] < 0.95
    assert keyed["loss"]["code"][3] < keyed["loss"]["code"][1]
    assert keyed["agreement"]["maths"][0] >= 0.9
