"""Hooks stay alive inside a mixed-depth decode: an intervention gives the same tokens under AR and every lossless decoder."""

from __future__ import annotations

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from loopscope.errors import HookError
from loopscope.models.hooked import LoopedModel
from loopscope.random_models import make_random_core
from loopscope.tap import tapped

DECODERS = [DraftThenVerify(1, 4), DraftThenVerify(2, 3, "deep_kv"), Wavefront(1), Wavefront(3), Wavefront(1, redraft=1), LoopSpec(1, 2),
            DASWave(4, 1), PromptLookup(4, 2)]
DEPTH, LIMIT = 5, 16


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def core(request):
    return make_random_core(request.param, gain=0.3, seed=3, n_core=2)


def negate_and_amplify_at(positions):
    def hook(tensor, hook):
        for i, position in enumerate(hook.ctx["positions"].tolist()):
            if position in positions:
                tensor[:, i] = tensor[:, i] * -4
        return tensor

    return hook


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_an_intervention_gives_the_same_tokens_under_every_decoder(core, decoder):
    plain = Autoregressive().generate(core, [1, 2, 3], LIMIT, DEPTH).tokens
    hooks = [("depth.2.blocks.1.attn.hook_v", negate_and_amplify_at({4, 9})),
             ("depth.5.blocks.1.hook_mlp_out", negate_and_amplify_at(range(6, 14)))]
    want = Autoregressive().generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks).tokens
    assert want != plain, "the intervention must matter, or this test sees nothing"
    assert decoder.generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks).tokens == want
    model = LoopedModel(core)
    assert decoder.generate(model, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks).tokens == want
    with model.hooks(fwd_hooks=hooks):
        assert decoder.generate(model, [1, 2, 3], LIMIT, DEPTH).tokens == want
    assert decoder.generate(model, [1, 2, 3], LIMIT, DEPTH).tokens == plain
    core.tokenizer = core.tokenizer or _Ids()
    assert "".join(decoder.stream(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks)) == _Ids().decode(want)


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_an_intervention_acts_the_same_on_what_is_sampled(core, decoder):
    hooks = [("depth.5.hook_state", negate_and_amplify_at({5, 8, 11})), ("depth.2.blocks.1.attn.hook_v", negate_and_amplify_at({4}))]
    options = {"seed": 4, "sampling": Sampling(1.1, top_p=0.95)}
    want = Autoregressive().generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks, **options).tokens
    assert want != Autoregressive().generate(core, [1, 2, 3], LIMIT, DEPTH, **options).tokens
    assert decoder.generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=hooks, **options).tokens == want


class _Ids:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"{i} " for i in ids)


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_hooks_see_target_rows_and_on_request_drafts(core, decoder):
    seen = []

    def look(tensor, hook):
        assert tensor.shape[1] == len(hook.ctx["positions"])
        seen.extend((p, hook.ctx["role"]) for p in hook.ctx["positions"].tolist())

    name = f"depth.{DEPTH}.blocks.0.attn.hook_k"
    got = decoder.generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=[(name, look)])
    inputs = set(range(3 + len(got.tokens) - 1))
    assert {p for p, role in seen} >= inputs and {role for _, role in seen} == {"target"}
    seen.clear()
    first = "depth.1.blocks.0.attn.hook_k"
    decoder.generate(core, [1, 2, 3], LIMIT, DEPTH, fwd_hooks=[(first, look)], hook_drafts=True)
    only_drafts = isinstance(decoder, DASWave) or getattr(decoder, "read", "aligned") != "aligned"
    assert ("draft" in {role for _, role in seen}) == only_drafts  # aligned drafts are the target's own early recurrences


def test_a_hook_that_matches_nothing_is_refused_before_decoding(core):
    for model in (core, LoopedModel(core)):
        with pytest.raises(HookError):
            Wavefront(1).generate(model, [1], 4, fwd_hooks=[("depth.1.blocks.9.attn.hook_v", lambda t, hook: None)])


def test_no_hooks_no_tap(core):
    with tapped(LoopedModel(core), depth=DEPTH) as tap:
        assert tap is None
    with tapped(core) as tap:
        assert tap is None
    assert torch.is_inference_mode_enabled() is False
