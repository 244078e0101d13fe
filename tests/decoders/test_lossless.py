"""L0: every decoder commits exactly the autoregressive tokens, with the autoregressive K/V, in the predicted calls.

In float64, on random models whose gain sweeps acceptance from 0 to 1 (docs/algorithms.md, 2.7).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.counting import autoregressive_counts, das_wave_counts, draft_then_verify_counts, wavefront_counts
from loopscope.random_models import make_random_core
from loopscope.rows import POLICIES

SETTINGS = 320
GAINS = (0.0, 0.03, 0.1, 0.3, 0.5, 1.0)


@lru_cache(maxsize=24)
def model(family: str, gain: float, seed: int):
    sizes = {"n_core": 2, "n_kv_heads": 2, "vocab_size": 64}
    return make_random_core(family, gain=gain, seed=seed, **sizes, **({"n_prelude": 1, "n_coda": 1} if family == "huginn" else {}))


def generate(decoder, core, prompt, limit, depth, seed, start_state=None):
    session = decoder._run(core, prompt, limit, depth, seed, (), start_state)
    return session, session.result(decoder)


def with_eos(core, eos):
    """The same weights under a config with other end-of-sequence ids."""
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(eos))
    return other


def cache_deviation(core, session, other) -> tuple[float, float]:
    """(largest K/V difference, tolerance): the tolerance is 100 x that of the same tokens prefilled in one pass."""
    length = session.cache.length
    again = core.make_cache(session.cache.capacity, session.depth)
    with torch.inference_mode():
        core(torch.tensor([session.tokens[:length]]), depth=session.depth, start_state=session.start_state, seed=session.seed, cache=again)
    mine, theirs, one_pass = (c.materialised() for c in (session.cache, other, again))
    floor = max(float((mine[k] - one_pass[k]).abs().max()) for k in mine)
    gap = max(float((mine[k] - theirs[k]).abs().max()) for k in mine)
    return gap, max(1e-12, 100 * floor)


decoders = st.one_of(
    st.builds(lambda d, k, read: DraftThenVerify(d, k, read), st.integers(1, 4), st.integers(1, 6), st.sampled_from(POLICIES)),
    st.builds(Wavefront, st.integers(1, 4)),
    st.builds(lambda j, k, cap, w, read, carry: DASWave(j, k, capacity=cap, initial_width=w, read=read, carry=carry),
              st.integers(1, 6), st.integers(1, 3), st.sampled_from([1, 4, 32]), st.integers(1, 3),
              st.sampled_from(("deep_kv", "deep_kv", *POLICIES)), st.sampled_from([None, None, False])),
)
SEEN: list[float] = []


@settings(max_examples=SETTINGS, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(family=st.sampled_from(["huginn", "ouro"]), gain=st.sampled_from(GAINS), model_seed=st.integers(0, 2), decoder=decoders,
       depth=st.integers(4, 7), prompt=st.lists(st.integers(0, 63), min_size=1, max_size=9), limit=st.integers(1, 24),
       seed=st.integers(-3, 2**40), eos_at=st.one_of(st.none(), st.none(), st.integers(0, 20)), zero=st.booleans())
def test_every_decoder_commits_the_autoregressive_tokens_and_keys_and_values_in_the_predicted_calls(
        family, gain, model_seed, decoder, depth, prompt, limit, seed, eos_at, zero):
    core = model(family, gain, model_seed)
    start = "zero" if zero and family == "huginn" else None
    reference, expected = generate(Autoregressive(), core, prompt, limit, depth, seed, start)
    if eos_at is not None:  # declare one of the tokens it produces to be the end
        core = with_eos(core, [expected.tokens[eos_at % len(expected.tokens)]])
        reference, expected = generate(Autoregressive(), core, prompt, limit, depth, seed, start)
    session, got = generate(decoder, core, prompt, limit, depth, seed, start)

    assert got.tokens == expected.tokens
    gap, tolerance = cache_deviation(core, session, reference.cache)
    assert session.cache.length == reference.cache.length == len(session.tokens) - 1
    assert gap <= tolerance, f"materialised K/V differ by {gap:.2e}, tolerance {tolerance:.2e}"
    assert got.accepted == sum(got.accept_lengths) <= got.proposed
    if eos_at is None:
        check_counts(decoder, got, depth, core)
    if got.proposed:
        SEEN.append(got.alpha)


def check_counts(decoder, got, depth, core):
    n = len(got.tokens)
    counted = (*got.calls, got.rows)
    judged = {e.position: e.event == "accept" for e in got.trace if e.event in ("accept", "reject")}
    accepts = [judged.get(got.prompt_length + i + 1, False) for i in range(n)]
    if isinstance(decoder, Wavefront):
        assert counted == wavefront_counts(accepts, n, depth, decoder.draft_depth)
    elif isinstance(decoder, DraftThenVerify):
        assert counted == draft_then_verify_counts(accepts, n, depth, decoder.draft_depth, decoder.block, decoder.read == "aligned")
    else:
        most = das_wave_counts(_per_block(got), n, depth, decoder.rounds, decoder.updates, decoder.capacity, decoder.initial_width)
        if decoder.carry is None and not core.config.injects:  # frozen rows save rows, and calls once all are frozen
            assert all(a <= b for a, b in zip(counted, most)) and got.calls[1:] == most[1:3]
        else:
            assert counted == most


def _per_block(generation) -> list[int]:
    """Accepted drafts of each block that proposed any (a block with no accept and no reject has none)."""
    return [run.accepted for run in generation.runs]


def test_the_draws_above_reach_every_branch():
    """Acceptance must cover 0 to 1, or the accept and reject paths went untested."""
    if len(SEEN) < 100:
        pytest.skip("needs the draws of the test above, in the same process")
    assert sum(a == 0 for a in SEEN) > 5 and sum(a == 1 for a in SEEN) > 5
    assert sum(0.2 <= a <= 0.95 for a in SEEN) >= len(SEEN) / 3, sorted(SEEN)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_autoregressive_counts_and_cache_equal_one_prefill(family):
    core = model(family, 0.5, 0)
    session, got = generate(Autoregressive(), core, [1, 2, 3], 12, 5, 0)
    assert (*got.calls, got.rows) == autoregressive_counts(12, 5)
    gap, tolerance = cache_deviation(core, session, session.cache)
    cache = core.make_cache(14, 5)
    with torch.inference_mode():
        logits = core(torch.tensor([session.tokens[:-1]]), depth=5, cache=cache)
    assert logits.argmax(-1)[0, 2:].tolist() == got.tokens
    assert gap <= tolerance


@pytest.mark.parametrize("draft_depth", [1, 2, 3])
def test_wavefront_accepts_exactly_what_one_teacher_forced_pass_says(draft_depth):
    """Exact replay: without attention in the readout, the argmax at every depth of ONE full-depth pass fixes every accept."""
    for seed in range(3):
        core = model("ouro", 0.2, seed)
        got = Wavefront(draft_depth).generate(core, [5, 6, 7], 20, depth=4, seed=0)
        tokens = torch.tensor([[5, 6, 7, *got.tokens]])
        tops = []
        with torch.inference_mode():
            x = state = core.embed(tokens)
            for _ in range(4):
                state = core.recur(state, x)
                tops.append(core.read(state)[0].argmax(-1))
        expected = {p + 1: bool(tops[draft_depth - 1][p] == tops[-1][p]) for p in range(3, 3 + 18)}
        assert {e.position: e.event == "accept" for e in got.trace if e.event in ("accept", "reject")} == expected
        assert got.calls.recur == wavefront_counts([expected[p] for p in range(4, 22)], 20, 4, draft_depth).recur
