"""int8 weights: close to the model, never taken for it."""

import copy

import pytest
import torch

import loopscope
from decoders import Autoregressive, Wavefront
from loopscope.errors import SettingError
from loopscope.models.quantise import quantise
from loopscope.random_models import make_random_core

pytest.importorskip("torchao", reason="the extra int8 is not installed")


@pytest.fixture(scope="module")
def pair():
    core = make_random_core("huginn", dtype=torch.float32, gain=0.2, tied=False)
    return core, quantise(copy.deepcopy(core))


def test_an_int8_model_is_close_to_its_checkpoint_and_another_one(pair):
    core, ours = pair
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        a, b = core(tokens), ours(tokens)
    error = float((a - b).norm() / a.norm())
    assert 1e-4 < error < 0.2
    assert type(ours.blocks[0].attn.qkv.weight).__name__ == "Int8Tensor" and type(ours.head.weight).__name__ == "Int8Tensor"


def test_its_name_says_so_and_it_is_not_saved_as_the_checkpoint(pair, tmp_path):
    core, ours = pair
    assert loopscope.load("tiny-huginn", hooked=False, int8=True).source == "tiny-huginn int8"
    assert ours.source == "random-huginn int8" and core.source == "random-huginn" and core.quantised is None
    with pytest.raises(SettingError, match="holds int8 weights"):
        ours.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingError, match="quantised already"):
        quantise(ours)


def test_decoders_are_lossless_on_the_int8_model(pair):
    _, ours = pair
    plain, wave = (d.generate(ours, [1, 2, 3], max_new_tokens=10) for d in (Autoregressive(), Wavefront(1)))
    assert wave.tokens == plain.tokens and ours.blocks[0].attn.qkv._packed is None


def test_a_model_that_takes_gradients_is_refused():
    with pytest.raises(SettingError, match="take no gradients"):
        quantise(make_random_core("ouro", dtype=torch.float32).requires_grad_(True))
