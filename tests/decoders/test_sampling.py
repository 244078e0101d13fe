"""Sampling: filters, keyed noise, identity with plain decoding under shared noise, exactness in distribution by rejection."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from functools import lru_cache

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from decoders.sampling import Greedy, Rejection, SharedNoise, chooser, gumbel
from loopscope.errors import SettingError
from loopscope.noise import keyed_uniform
from loopscope.random_models import FAMILIES, make_random_core

LOSSLESS = [DraftThenVerify(1, 4), DraftThenVerify(2, 3, "deep_v"), Wavefront(1), Wavefront(1, redraft=1), Wavefront(2, redraft=2),
            LoopSpec(1, 2), DASWave(4, 1), DASWave(3, 2, growth=2, stable=1, bonus=False)]
# Seeds are fixed, so a passing comparison stays one; the mutants of a sampler lie many orders of magnitude below.
UNLIKELY = 1e-3


def draws(*arguments, **settings) -> Sampling:
    return Sampling(*arguments, method="rejection", **settings)


# ---- the law that is drawn from ---------------------------------------------------------------------------------


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The same law as transformers makes it, [n, vocab] probabilities."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = TemperatureLogitsWarper(float(sampling.temperature))(None, logits.double())
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p is not None:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p is not None:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("top_k", [None, 1, 7, 300])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.2])
def test_filters_leave_what_transformers_leaves(top_k, top_p, min_p):
    logits = 3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature in (0.3, 1.0, 4):
        sampling = Sampling(temperature, top_k, top_p, min_p)
        got, want = sampling.scores(logits).softmax(-1), warped(logits, sampling)
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_ties_at_a_cut_are_broken_by_index_so_that_what_stays_is_exactly_what_was_asked_for():
    kept = Sampling(1.0, top_k=2).scores(torch.tensor([[1.0, 3.0, 1.0, 1.0]])) > float("-inf")
    assert kept.tolist() == [[True, True, False, False]]
    kept = Sampling(1.0, top_p=0.5).scores(torch.zeros(1, 4)) > float("-inf")
    assert kept.tolist() == [[True, True, False, False]]  # two quarters are half


def test_settings_out_of_range_are_refused():
    for settings, message in [({"temperature": 0}, "temperature must be a number from 1e-06"), ({"temperature": -1}, "temperature"),
                              ({"temperature": float("nan")}, "temperature"), ({"temperature": float("inf")}, "temperature"),
                              ({"temperature": "1"}, "temperature"), ({"temperature": True}, "temperature"), ({"top_k": 0}, "top_k"),
                              ({"top_k": 2.0}, "top_k"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"min_p": -0.1}, "min_p"),
                              ({"min_p": 2}, "min_p"), ({"method": "guess"}, "shared_noise, rejection")]:
        with pytest.raises(SettingError, match=message):
            Sampling(**settings)
    for wrong in (0.7, "rejection", {"temperature": 1}):
        with pytest.raises(SettingError, match="decoders.Sampling"):
            Wavefront(1).generate(make_random_core("ouro"), [1], 4, sampling=wrong)


# ---- noise ------------------------------------------------------------------------------------------------------


def test_noise_is_a_pure_function_of_seed_position_and_stream():
    like = torch.zeros(1, 32)
    whole = gumbel(7, range(20), like, 1)
    assert torch.equal(whole[5:9], gumbel(7, [5, 6, 7, 8], like, 1)) and torch.equal(whole[[9, 3]], gumbel(7, [9, 3], like, 1))
    other = [gumbel(8, range(20), like, 1), gumbel(7, range(20), like, 2), gumbel(7, range(1, 21), like, 1)]
    assert not any((whole == changed).any() for changed in other)


def test_streams_are_independent_of_each_other_and_of_the_start_state():
    """Streams of one seed and position are uncorrelated; so are neighbouring positions and seeds."""
    n, width = 400, 50
    streams = [keyed_uniform(3, 0, range(n), width, stream) for stream in range(7)]
    streams += [keyed_uniform(3, 0, range(1, n + 1), width, 1), keyed_uniform(4, 0, range(n), width, 1)]
    flat = torch.stack([s.flatten() - 0.5 for s in streams])
    off = torch.corrcoef(flat) - torch.eye(len(streams), dtype=torch.float64)
    assert off.abs().max() < 5 / (n * width) ** 0.5
    assert (flat.mean(1).abs() < 5 * (1 / 12 / (n * width)) ** 0.5).all()


@pytest.mark.parametrize("method", ["shared_noise", "rejection"])
@pytest.mark.parametrize("decoder", [Autoregressive(), DraftThenVerify(1, 4), Wavefront(1, redraft=1), DASWave(4, 1)], ids=repr)
def test_a_seed_gives_one_text_whatever_the_limit_and_seeds_give_different_ones(decoder, method):
    core = make_random_core("huginn", gain=0.3, n_core=1)
    sampling = Sampling(1.0, method=method)
    texts = [decoder.generate(core, [1, 2, 3], 12, seed=s, start_state="zero", sampling=sampling).tokens for s in (0, 1, -5, 0)]
    assert texts[0] == texts[3] and len(set(map(tuple, texts))) == 3
    if method == "shared_noise":  # what is drawn at a position depends on nothing behind it
        assert decoder.generate(core, [1, 2, 3], 5, start_state="zero", sampling=sampling).tokens == texts[0][:5]


def test_a_low_temperature_is_greedy_and_top_k_1_too():
    core = make_random_core("ouro", gain=0.3)
    want = Autoregressive().generate(core, [1, 2, 3], 12).tokens
    for sampling in (Sampling(1e-6), Sampling(1.3, top_k=1), draws(1e-6), draws(1.3, top_k=1)):
        for decoder in (Autoregressive(), Wavefront(1), DraftThenVerify(1, 3)):
            assert decoder.generate(core, [1, 2, 3], 12, sampling=sampling).tokens == want
    assert isinstance(chooser(None, 0), Greedy) and type(chooser(None, 0)) is Greedy


# ---- shared noise: the tokens of plain decoding -----------------------------------------------------------------


@lru_cache(maxsize=16)
def small(family: str, gain: float):
    core = make_random_core(family, gain=gain, seed=2, n_core=1)
    if family == "parcae":
        core.norm.weight.data *= 0.3  # its logits are so far apart that sampling would be greedy
    return core


@torch.inference_mode()
def decoded(decoder, core, seed: int, sampling: Sampling):
    """The finished session: its tokens, its counters and its cache."""
    session = decoder._open(core, [3, 1, 4], 12, 4, seed, sampling=sampling)
    decoder._run(session)
    return session


@pytest.mark.support("decoders")
@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_noise_gives_the_tokens_of_plain_decoding_under_every_decoder(family, temperature):
    sampling, rates = Sampling(temperature, top_p=0.9), []
    sampled = False
    for seed, gain in enumerate((0.05, 2.0)):
        core = small(family, gain)
        want = decoded(Autoregressive(), core, seed, sampling)
        sampled = sampled or want.new_tokens != Autoregressive().generate(core, [3, 1, 4], 12, 4, seed).tokens
        for decoder in LOSSLESS:
            if isinstance(decoder, LoopSpec) and getattr(core.config, "window", 0):
                continue  # branches refuse sliding windows
            got = decoded(decoder, core, seed, sampling)
            assert got.tokens == want.tokens and got.cache.length == want.cache.length, f"{family} gain {gain}: {decoder}"
            for name, kept in got.cache.materialised().items():
                torch.testing.assert_close(kept, want.cache.materialised()[name], rtol=0, atol=1e-8, msg=f"{decoder}: {name}")
            rates.append(got.accepted / got.proposed)
    assert sampled and min(rates) < 0.9 and max(rates) > 0.6, "drafts must be accepted and rejected"


# ---- rejection: exact in distribution ---------------------------------------------------------------------------


def p_value(counts: Counter, law: dict) -> float:
    """Chi-square test of counted outcomes against their probabilities; rare outcomes are pooled. Impossible ones may not occur."""
    from scipy.stats import chisquare

    n = sum(counts.values())
    assert all(law.get(outcome, 0) > 0 for outcome in counts), "an outcome of probability 0 was drawn"
    often = [outcome for outcome, p in law.items() if p * n >= 5]
    rest = 1 - sum(law[outcome] for outcome in often)
    observed = [counts[outcome] for outcome in often] + [n - sum(counts[outcome] for outcome in often)]
    expected = [law[outcome] * n for outcome in often] + [rest * n]
    if expected[-1] < 5:  # too few to stand alone
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return chisquare(observed, expected).pvalue


N = 8_000  # rows, each at a position of its own: independent draws


def laws(vocab: int = 6):
    g = torch.Generator().manual_seed(5)
    return [1.5 * torch.randn(1, vocab, generator=g, dtype=torch.float64) for _ in range(3)]


def accept_all_kinds(sampling: Sampling, propose):
    """What `propose` and then the target give over N positions -> (tokens, proposals, the target's law)."""
    draft, second, target = (logits.expand(N, -1) for logits in laws())
    sampler, at = Rejection(sampling, 11), range(N)
    proposals = propose(sampler, draft, second, at)
    tokens = sampler.target(target, at, proposals, list(at))
    assert not sampler._laws, "what was judged is forgotten"
    return tokens, proposals, dict(enumerate(warped(target[:1], sampling)[0].tolist()))


def one_draft(sampler, draft, second, at):
    return [[t] for t in sampler.draft(draft, at, list(at)).tolist()]


def two_drafts(sampler, draft, second, at):
    first = sampler.draft(draft, at, list(at)).tolist()
    return [list(pair) for pair in zip(first, sampler.second(second, at, list(at)).tolist())]


def read_twice(sampler, draft, second, at):
    """A draft that is drawn anew from another law before it is judged: the last one counts."""
    sampler.draft(second, at, list(at))
    return one_draft(sampler, draft, second, at)


def one_guess(sampler, draft, second, at):
    sampler.draft(draft, at, list(at))  # remembered, and void once a guess takes its place
    return [[t] for t in sampler.guess(draft, at, list(at)).tolist()]


def none(sampler, draft, second, at):
    return [[] for _ in at]


@pytest.mark.parametrize("sampling", [draws(), draws(0.7, top_p=0.9), draws(1.3, top_k=4, min_p=0.05)], ids=str)
@pytest.mark.parametrize("propose", [one_draft, two_drafts, read_twice, one_guess, none])
def test_whatever_is_proposed_the_token_has_the_law_of_the_target(propose, sampling):
    tokens, proposals, law = accept_all_kinds(sampling, propose)
    assert p_value(Counter(tokens.tolist()), law) > UNLIKELY
    if propose is one_draft:  # accepted as often as can be: sum of min(p, q)
        q = warped(laws()[0], sampling)[0]
        share = sum(t == p[0] for t, p in zip(tokens.tolist(), proposals)) / N
        most = sum(min(law[t], float(q[t])) for t in law)
        assert abs(share - most) < 5 * (most * (1 - most) / N) ** 0.5


def test_a_token_is_independent_of_what_was_drafted_behind_it():
    """Noise of one position is used by several drafts; tokens at other positions must not feel it."""
    sampler, at = Rejection(draws(), 11), range(0, 2 * N, 2)
    draft, _, target = (logits.expand(N, -1) for logits in laws())
    first = sampler.target(target, at, one_draft(sampler, draft, None, at), list(at))
    behind = [p + 1 for p in at]
    second = sampler.target(target, behind, one_draft(sampler, draft, None, behind), behind)
    p = warped(target[:1], draws())[0].tolist()
    both = {(a, b): p[a] * p[b] for a in range(len(p)) for b in range(len(p))}
    assert p_value(Counter(zip(first.tolist(), second.tolist())), both) > UNLIKELY


VOCAB, LIMIT, SEEDS, DEPTH = 4, 4, 300, 3
DRAWN = [Autoregressive(), DraftThenVerify(1, 2), DraftThenVerify(1, 3, "deep_kv"), Wavefront(1), Wavefront(1, redraft=1), LoopSpec(1, 2),
         LoopSpec(1, 2, gate=0.3), DASWave(2, 1), PromptLookup(3, 1)]


@lru_cache(maxsize=2)
def tiny(eos: tuple[int, ...] = ()):
    core = make_random_core("ouro", gain=0.5, seed=2, vocab_size=VOCAB, n_core=1, d_model=16, n_heads=2, d_mlp=16, depth=DEPTH)
    core.config = dataclasses.replace(core.config, eos=eos)
    return core


def law_of_all_texts(core, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Every text of up to LIMIT tokens and its probability, by teacher forcing."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=LIMIT)))
    inputs = torch.cat((torch.tensor(prompt).expand(len(texts), -1), texts[:, :-1]), 1)
    with torch.inference_mode():
        logits = core(inputs)[:, len(prompt) - 1 :]
    p = warped(logits.flatten(0, 1), sampling).view(len(texts), LIMIT, VOCAB).gather(-1, texts[..., None])[..., 0]
    law: dict[tuple[int, ...], float] = {}
    for text, each in zip(texts.tolist(), p):
        end = next((i + 1 for i, t in enumerate(text) if t in core.config.eos), LIMIT)
        law[tuple(text[:end])] = float(each[:end].prod())
    assert sum(law.values()) == pytest.approx(1)
    return law


def worse(final, hook):
    """Drafts say the contrary of what they mean, so that most are rejected: the law of the text may not feel it."""
    return -final if hook.ctx["role"] == "draft" else None


@pytest.mark.parametrize("decoder", DRAWN, ids=repr)
def test_rejection_draws_whole_texts_as_often_as_exhaustive_enumeration_says(decoder):
    core, prompt, sampling = tiny((3,)), [1, 2], draws(0.8, top_p=0.97, min_p=0.01)
    batch = decoder.generate_batch(core, [prompt] * SEEDS, LIMIT, seed=list(range(SEEDS)), sampling=sampling,
                                   fwd_hooks=[("hook_final", worse)], hook_drafts=True)
    law, proposed, accepted = law_of_all_texts(core, prompt, sampling), sum(g.proposed for g in batch), sum(g.accepted for g in batch)
    assert p_value(Counter(tuple(g.tokens) for g in batch), law) > UNLIKELY
    assert type(decoder) is Autoregressive or 0.05 < accepted / proposed < 0.6


def test_shared_noise_draws_from_the_target_too():
    core, prompt, sampling = tiny((3,)), [1, 2], Sampling(1.3)
    batch = Wavefront(1).generate_batch(core, [prompt] * SEEDS, LIMIT, seed=list(range(SEEDS)), sampling=sampling)
    assert p_value(Counter(tuple(g.tokens) for g in batch), law_of_all_texts(core, prompt, sampling)) > UNLIKELY
    assert isinstance(chooser(sampling, 0), SharedNoise)
