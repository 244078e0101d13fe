"""Batches: ragged prompts decoded together give what each gives alone, in fewer calls, with hooks alive."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from loopscope.errors import ContextError, NumericsError, PromptError, SettingError
from loopscope.models.hooked import LoopedModel
from loopscope.random_models import make_random_core

DECODERS = [Autoregressive(), DraftThenVerify(1, 4), DraftThenVerify(2, 3, "deep_v"), Wavefront(1), Wavefront(2, redraft=1), LoopSpec(1, 2),
            DASWave(4, 1), DASWave(3, 1, read="deep_v", carry=False, stable=1), PromptLookup(4, 2)]
PROMPTS = [[1, 2, 3], [7], [5, 6, 5, 6, 5, 6, 5], [9, 8, 7, 6]]
LIMITS = [14, 9, 1, 12]


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def core(request):
    core = make_random_core(request.param, gain=0.2, seed=4, n_core=1)
    core.tokenizer = Letters()
    return core


def same(got, want) -> None:
    """Equal in everything but the clock."""
    for field in dataclasses.fields(got):
        if field.name != "seconds":
            assert getattr(got, field.name) == getattr(want, field.name), field.name


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
def test_each_sequence_gives_what_it_gives_alone_tokens_calls_rows_and_trace(core, decoder):
    """Ragged prompts, a limit and a seed each, sequences that leave early by limit, EOS or stop string."""
    plain = Autoregressive().generate(core, PROMPTS[0], 14)
    ended = object.__new__(type(core))
    ended.__dict__ = dict(core.__dict__)
    ended.config = dataclasses.replace(core.config, eos=(plain.tokens[8],))
    stop = Autoregressive().generate(core, PROMPTS[3], 12, seed=3).text[4:6]
    for model, sampling in ((ended, None), (core, Sampling(0.8, top_p=0.9, method="rejection"))):
        options = {"stop": stop if sampling is None else (), "sampling": sampling}
        batch = decoder.generate_batch(model, PROMPTS, LIMITS, seed=[0, 1, 2, 3], **options)
        alone = [decoder.generate(model, p, n, seed=i, **options) for i, (p, n) in enumerate(zip(PROMPTS, LIMITS))]
        for got, want in zip(batch, alone):
            same(got, want)
        if sampling is None:
            assert len({len(g.tokens) for g in batch}) >= 3 and len(batch[0].tokens) < 14, "some must leave early"
        assert len(batch) == 4 and batch[1].tokens == alone[1].tokens


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
def test_a_batch_makes_fewer_calls_than_its_sequences_alone(core, decoder):
    batch = decoder.generate_batch(core, PROMPTS, 12)
    prefill = core.config.depth
    alone = [g.calls.recur + prefill for g in batch]
    assert max(alone) <= batch.calls.recur < sum(alone)
    assert batch.rows == sum(g.rows for g in batch) + prefill * sum(map(len, PROMPTS)), "no row is run twice, none is left out"
    twins = decoder.generate_batch(core, [PROMPTS[0]] * 3, 12)
    assert twins.calls.recur == twins[0].calls.recur + prefill and twins.rows == 3 * (twins[0].rows + prefill * 3)
    assert twins.calls.prelude == twins[0].calls.prelude + 1 and twins.calls.readout == twins[0].calls.readout + 1
    if type(decoder) in (Autoregressive, Wavefront, LoopSpec):  # one recurrence per tick: they never wait for each other
        assert batch.calls.recur == max(alone)


def shift_one(sequence: int, position: int):
    def hook(tensor, hook):
        assert hook.ctx["sequence"] in range(len(PROMPTS)) and tensor.shape[1] == len(hook.ctx["positions"])
        at = [i for i, p in enumerate(hook.ctx["positions"].tolist()) if p >= position]
        if hook.ctx["sequence"] == sequence and at:
            tensor[:, at] *= -3
        return tensor

    return hook


def look_away(sequence: int | None):
    """No head of depth 2 looks at position 0: rows of another sequence, whose keys are others, stay as they are."""
    def hook(pattern, hook):
        if sequence is None or hook.ctx["sequence"] == sequence:
            keep = torch.ones_like(pattern)
            keep[..., 0] = torch.where((hook.ctx["positions"] > 1)[None, None], 0.0, 1.0)
            pattern = pattern * keep
        return pattern

    return hook


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
def test_an_intervention_on_one_sequence_acts_on_it_as_alone_and_on_no_other(core, decoder):
    plain = decoder.generate_batch(core, PROMPTS, 10)
    bare, hooked = core, LoopedModel(core)
    for model, name, one, alone in [(bare, "depth.2.blocks.0.attn.hook_v", shift_one(2, 3), shift_one(0, 3)),
                                    (hooked, "depth.2.blocks.0.attn.hook_pattern", look_away(2), look_away(None)),
                                    (hooked, "hook_embed", shift_one(2, 8), shift_one(0, 8))]:
        want = decoder.generate(core, PROMPTS[2], 10, fwd_hooks=[(name, alone)])
        got = decoder.generate_batch(model, PROMPTS, 10, fwd_hooks=[(name, one)])
        same(got[2], want)
        assert [got[i].tokens for i in (0, 1, 3)] == [plain[i].tokens for i in (0, 1, 3)]
        assert want.tokens == Autoregressive().generate(core, PROMPTS[2], 10, fwd_hooks=[(name, alone)]).tokens
    assert want.tokens != plain[2].tokens, "the intervention must matter, or this test sees nothing"


def test_an_error_names_the_prompt_it_is_about(core):
    decoder, context = Wavefront(1), core.config.context
    for prompts, options, error, message in [
            ([[1], []], {}, PromptError, "prompt 2 of 2: the prompt is empty"),
            ([[10**6], [1]], {}, PromptError, "prompt 1 of 2: token id"),
            ([[1], [2] * context], {}, ContextError, f"prompt 2 of 2: a prompt of {context} tokens"),
            ([[1], [2]], {"max_new_tokens": [4, 0]}, SettingError, "prompt 2 of 2: max_new_tokens"),
            ([[1], [2]], {"max_new_tokens": [4]}, SettingError, "one for each of the 2 prompts, got 1"),
            ([[1], [2]], {"seed": [4, 5, 6]}, SettingError, "one for each of the 2 prompts, got 3"),
            ([[1], [2]], {"depth": 0}, Exception, "^depth must"), ([[1], [2]], {"stop": [""]}, SettingError, "^stop must"),
            ("one text", {}, SettingError, "several prompts in a list"), ([], {}, SettingError, "several prompts")]:
        with pytest.raises(error, match=message):
            decoder.generate_batch(core, prompts, **({"max_new_tokens": 4} | options))


@pytest.mark.parametrize("sampling", [None, Sampling(1.0)], ids=["greedy", "sampled"])
def test_nan_names_the_prompt_it_came_from(core, sampling):
    def poison(state, hook):
        if hook.ctx["sequence"] == 1:
            state = state * float("nan")
        return state

    with pytest.raises(NumericsError, match="the logits of prompt 2 at position 0 are NaN"):
        Wavefront(1).generate_batch(core, PROMPTS, 4, sampling=sampling, fwd_hooks=[("depth.3.hook_state", poison)])
    with pytest.raises(NumericsError, match="^the logits at position"):
        Wavefront(1).generate(core, [1], 4, sampling=sampling, fwd_hooks=[("depth.3.hook_state", lambda s, hook: s * float("nan"))])
