"""A long prompt is read in stretches: the same tokens and K/V as in one call, and the head runs on the last row alone."""

import pytest
import torch

from decoders import Autoregressive, Sampling, Wavefront
from decoders.calls import advance
from loopscope.errors import NumericsError
from loopscope.random_models import FAMILIES, make_random_core

PROMPT = torch.randint(0, 256, (23,), generator=torch.Generator().manual_seed(1)).tolist()


def prefilled(core, prefix=0):
    session = Autoregressive()._open(core, PROMPT, 4, prefix=prefix)
    for _ in advance(session, session.prefill()):
        pass
    return session


@pytest.mark.parametrize("decoder", [Autoregressive(slots=1), Autoregressive(slots=2), Wavefront(1, slots=2)], ids=lambda d: d.label)
def test_a_prompt_is_read_unshared_where_depths_share_slots(decoder, monkeypatch):
    """docs/algorithms.md, 2.3: a later stretch would find the earlier ones as their deepest recurrence left them."""
    core = make_random_core("huginn", gain=0.5, depth=4)
    whole = decoder.generate(core, PROMPT, 8).tokens
    monkeypatch.setattr("decoders.session.PREFILL", 5)
    assert decoder.generate(core, PROMPT, 8).tokens == whole
    dory = make_random_core("dory", gain=0.5, depth=3, kv_slots=1)
    state = prefilled(dory).cache.materialised()
    cache = dory.make_cache(23, 3)
    dory(torch.tensor([PROMPT]), cache=cache)
    assert all(torch.allclose(k, state[name], atol=1e-11) for name, k in cache.materialised().items())


@pytest.mark.parametrize("stretch", [1, 7, 23])
@pytest.mark.parametrize("family", FAMILIES)
def test_stretches_leave_what_one_call_leaves(family, stretch, monkeypatch):
    core = make_random_core(family, gain=0.3, depth=3)
    whole = prefilled(core)
    monkeypatch.setattr("decoders.session.PREFILL", stretch)
    parts = prefilled(core)
    assert parts.tokens == whole.tokens and parts.cache.length == 23 and parts.counts == whole.counts
    theirs = whole.cache.materialised()
    for name, k in parts.cache.materialised().items():
        assert torch.allclose(k, theirs[name], atol=1e-11, rtol=1e-9), name


def test_a_prefix_that_reads_itself_both_ways_stays_one_call(monkeypatch):
    core = make_random_core("hrm_text", gain=0.3, depth=2)
    whole = prefilled(core, prefix=9)
    monkeypatch.setattr("decoders.session.PREFILL", 5)
    parts = prefilled(core, prefix=9)
    assert parts.tokens == whole.tokens
    assert all(torch.equal(k, whole.cache.materialised()[name]) for name, k in parts.cache.materialised().items())


def test_the_head_runs_on_one_row_of_a_prompt(monkeypatch):
    core, rows = make_random_core("huginn", gain=0.3, depth=3), []
    unembed = type(core).unembed
    monkeypatch.setattr(type(core), "unembed", lambda self, h: rows.append(h.shape[1]) or unembed(self, h))
    monkeypatch.setattr("decoders.session.PREFILL", 10)
    Autoregressive().generate(core, PROMPT, 3)
    assert rows == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("sampling", [None, Sampling(0.9)])
def test_a_batch_reads_its_prompts_as_each_alone(sampling, monkeypatch):
    core = make_random_core("huginn", gain=0.3, depth=3)
    prompts = [PROMPT, PROMPT[:4], PROMPT[:11]]
    alone = [Wavefront(1).generate(core, p, 9, sampling=sampling).tokens for p in prompts]
    monkeypatch.setattr("decoders.session.PREFILL", 6)
    assert [g.tokens for g in Wavefront(1).generate_batch(core, prompts, 9, sampling=sampling)] == alone


def test_hooks_see_every_row_of_every_stretch(monkeypatch):
    from loopscope import LoopedModel

    model, seen = LoopedModel(make_random_core("huginn", gain=0.3, depth=3)), []
    monkeypatch.setattr("decoders.session.PREFILL", 10)
    Autoregressive().generate(model, PROMPT, 1, fwd_hooks=[("hook_final", lambda x, hook: seen.extend(hook.ctx["positions"]))])
    assert [int(p) for p in seen] == list(range(23))


def test_nan_is_said_at_its_position(monkeypatch):
    core = make_random_core("huginn", gain=0.3, depth=3)
    monkeypatch.setattr(type(core), "unembed", lambda self, h: torch.full((*h.shape[:2], 256), float("nan"), dtype=h.dtype))
    with pytest.raises(NumericsError, match="at position 22 are NaN"):
        Autoregressive().generate(core, PROMPT, 3)


def test_a_stretch_may_want_no_row_of_a_packed_head(monkeypatch):
    """float32 and large enough to be packed (loopscope/models/packing.py): there the head is another product."""
    core = make_random_core("huginn", dtype=torch.float32, d_model=128, n_core=1, depth=2, vocab_size=4096)
    whole = prefilled(core)
    monkeypatch.setattr("decoders.session.PREFILL", 7)
    assert prefilled(core).tokens == whole.tokens
