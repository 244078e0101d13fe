"""What a generation returns, where it stops, and what it refuses, the same under every decoder."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from loopscope.errors import ContextError, DepthError, HookError, NumericsError, PromptError, SettingError
from loopscope.random_models import make_random_core

DECODERS = [Autoregressive(), DraftThenVerify(1, 4), DraftThenVerify(2, 3, "deep_kv"), Wavefront(1), Wavefront(3), DASWave(4, 1)]


class Letters:
    """A tokenizer of one letter per id, so that stop strings can be written down."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def core(request):
    core = make_random_core(request.param, gain=0.1, seed=4, n_core=2)
    core.tokenizer = Letters()
    return core


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_a_stop_string_ends_the_text_the_same_way(core, decoder):
    plain = Autoregressive().generate(core, [1, 2, 3], 20)
    stop = plain.text[6:9]  # spans three tokens, whatever blocks they are accepted in
    cut = plain.text.index(stop)
    got = decoder.generate(core, [1, 2, 3], 20, stop=(stop, "not there"))
    assert got.text == plain.text[:cut]
    assert got.tokens == plain.tokens[: cut + 3]
    assert decoder.generate(core, [1, 2, 3], 20, stop=stop).tokens == got.tokens


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_is_exact_and_the_whole_context_can_be_used(core, decoder, limit):
    prompt = [5] * (core.config.context - limit + 1)
    got = decoder.generate(core, prompt, limit)
    assert got.tokens == Autoregressive().generate(core, prompt, limit).tokens and len(got.tokens) == limit
    with pytest.raises(ContextError, match=f"context is {core.config.context}"):
        decoder.generate(core, [5, *prompt], limit)


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_seed_and_start_state_reach_every_decoder(decoder):
    core = make_random_core("huginn", gain=1.0, seed=4, n_core=2)
    states = torch.randn(1, 30, core.config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for options in ({}, {"seed": 9}, {"start_state": "zero"}, {"start_state": states}, {"depth": 6}):
        want = Autoregressive().generate(core, [1, 2, 3], 20, **options).tokens
        assert decoder.generate(core, [1, 2, 3], 20, **options).tokens == want
        outputs.append(tuple(want))
    assert len(set(outputs)) == len(outputs), "each option must change what is generated, or this test sees nothing"


def test_prompts_may_be_ids_tensors_or_nothing_else(core):
    want = Autoregressive().generate(core, [1, 2], 4).tokens
    assert Autoregressive().generate(core, torch.tensor([1, 2]), 4).tokens == want
    for bad, message in (([], "empty"), ("", "empty"), (torch.zeros(2, 2, dtype=torch.long), "one sequence"),
                         ([10**6], "outside the vocabulary"),
                         ([-1], "outside the vocabulary"), (object(), "token ids"), ([5.9, 6.9], "whole numbers"),
                         (torch.tensor([True, False]), "whole numbers")):
        with pytest.raises(PromptError, match=message):
            Wavefront(1).generate(core, bad, 4)
    bare = make_random_core("ouro")
    with pytest.raises(PromptError, match="tokenizer"):
        Wavefront(1).generate(bare, "text", 4)
    with pytest.raises(SettingError, match="tokenizer"):
        Wavefront(1).generate(bare, [1], 4, stop=("a",))


def test_bad_settings_are_refused_before_anything_runs(core):
    for make in (lambda: Wavefront(0), lambda: Wavefront(True), lambda: DraftThenVerify(1, 0), lambda: DraftThenVerify(1, 2, "deep"),
                 lambda: DASWave(0, 1), lambda: DASWave(1, 0), lambda: DASWave(1, 1, capacity=0), lambda: DASWave(1, 1, read="x")):
        with pytest.raises(SettingError):
            make()
    for decoder in (Wavefront(5), DraftThenVerify(5, 2)):
        with pytest.raises(SettingError, match="deeper than the target"):
            decoder.generate(core, [1], 4, depth=4)
    for limit in (0, -1, 2.5, True):
        with pytest.raises(SettingError, match="max_new_tokens"):
            Wavefront(1).generate(core, [1], limit)
    with pytest.raises(DepthError):
        Wavefront(1).generate(core, [1], 4, depth=0)


def test_carry_needs_injection():
    with pytest.raises(SettingError, match="injects"):
        DASWave(2, 1, carry=True).generate(make_random_core("ouro"), [1], 4)
    core = make_random_core("huginn", gain=0.1)
    carried, default = (DASWave(3, 1, carry=c).generate(core, [1], 12) for c in (True, None))
    assert carried.tokens == default.tokens and carried.calls == default.calls


def test_nan_logits_are_refused():
    core = make_random_core("ouro")
    core.norm.weight.data[0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        Autoregressive().generate(core, [1, 2], 4)


def test_several_eos_ids_all_end_the_text(core):
    plain = Autoregressive().generate(core, [1, 2, 3], 20).tokens
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=(plain[9], plain[5]))
    first = min(plain.index(plain[9]), plain.index(plain[5]))
    for decoder in DECODERS:
        assert decoder.generate(other, [1, 2, 3], 20).tokens == plain[: first + 1]


def test_the_trace_tells_what_was_run_drafted_and_judged(core):
    got = Wavefront(1).generate(core, [1, 2, 3], 20, depth=4)
    frame = got.trace_frame()
    assert (frame.event == "run").sum() == got.rows
    assert frame[frame.event == "run"].tick.nunique() == got.calls.recur
    assert (frame.event == "accept").sum() == got.accepted
    assert (frame.event == "accept").sum() + (frame.event == "reject").sum() == got.proposed
    assert frame[frame.event == "commit"].token.tolist() == got.tokens
    assert frame[frame.event == "run"].depth.max() == 4
    places = got.acceptance_by_position()
    assert sum(reached for _, reached, _ in places) == got.proposed and sum(accepted for *_, accepted in places) == got.accepted
    assert got.alpha == got.accepted / got.proposed
    assert got.trace_frame(core.tokenizer).token.iloc[-1] in "abcdefghijklmnopqrstuvwxyz"


def test_arguments_of_the_wrong_kind_are_refused_and_never_ignored(core):
    for options, message in (({"stop": 5}, "stop"), ({"stop": None}, "stop"), ({"seed": 1.5}, "seed"), ({"seed": "a"}, "seed")):
        with pytest.raises(SettingError, match=message):
            Wavefront(1).generate(core, [1], 4, **options)
    with pytest.raises(SettingError, match="loopscope.load"):
        Wavefront(1).generate("tiny-huginn", [1], 4)
    with pytest.raises(DepthError, match="supported"):
        Wavefront(1).generate(core, [1], 4, depth=10**9)
    huginn = make_random_core("huginn", n_core=2)
    for start in (torch.ones(1, 9, huginn.config.d_model).numpy(), 3.7, 0, False, [0]):
        with pytest.raises(SettingError, match="start_state must be"):
            Wavefront(1).generate(huginn, [1], 4, start_state=start)


@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1)], ids=repr)
@pytest.mark.parametrize("change", [lambda v: v.float(), lambda v: v[:, :, :1], lambda v: v[:, :1].expand(2, -1, -1, -1), lambda v: 3.0])
def test_a_hook_that_returns_another_shape_or_dtype_is_refused_by_every_decoder(core, decoder, change):
    with pytest.raises(HookError, match="depth.2.blocks.0.attn.hook_v.*must return"):
        decoder.generate(core, [1, 2], 6, fwd_hooks=[("depth.2.blocks.0.attn.hook_v", lambda v, hook: change(v))])


def test_a_model_that_has_decoded_can_be_copied_and_pickled():
    core = make_random_core("huginn", gain=0.5, n_core=2)
    want = Wavefront(1).generate(core, [1, 2], 8).tokens
    for other in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert Wavefront(1).generate(other, [1, 2], 8).tokens == want
