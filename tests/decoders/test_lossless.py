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
from decoders.counting import wavefront_counts
from decoders.verify import verify_generation
from loopscope.random_models import make_random_core
from loopscope.rows import POLICIES

SETTINGS = 320
GAINS = (0.0, 0.03, 0.1, 0.3, 0.5, 1.0)


@lru_cache(maxsize=24)
def model(family: str, gain: float, seed: int):
    sizes = {"n_core": 2, "n_kv_heads": 2, "vocab_size": 64}
    return make_random_core(family, gain=gain, seed=seed, **sizes, **({"n_prelude": 1, "n_coda": 1} if family == "huginn" else {}))


def with_eos(core, eos):
    """The same weights under a config with other end-of-sequence ids."""
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(eos))
    return other


decoders = st.one_of(
    st.builds(lambda d, k, read: DraftThenVerify(d, k, read), st.integers(1, 4), st.integers(1, 6), st.sampled_from(POLICIES)),
    st.builds(Wavefront, st.integers(1, 4)),
    st.builds(lambda j, k, cap, w, read, carry: DASWave(j, k, capacity=cap, initial_width=w, read=read, carry=carry),
              st.integers(1, 6), st.integers(1, 3), st.sampled_from([1, 4, 32]), st.integers(1, 3),
              st.sampled_from(("deep_kv", "deep_kv", *POLICIES)), st.sampled_from([None, None, False])),
)
SEEN: list[float] = []


@pytest.mark.support("decoders", family=("huginn", "ouro"))
@settings(max_examples=SETTINGS, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(family=st.sampled_from(["huginn", "ouro"]), gain=st.sampled_from(GAINS), model_seed=st.integers(0, 2), decoder=decoders,
       depth=st.integers(4, 7), prompt=st.lists(st.integers(0, 63), min_size=1, max_size=9), limit=st.integers(1, 24),
       seed=st.integers(-3, 2**40), eos_at=st.one_of(st.none(), st.none(), st.integers(0, 20)), zero=st.booleans())
def test_every_decoder_commits_the_autoregressive_tokens_and_keys_and_values_in_the_predicted_calls(
        family, gain, model_seed, decoder, depth, prompt, limit, seed, eos_at, zero):
    core = model(family, gain, model_seed)
    start = "zero" if zero and family == "huginn" else None
    if eos_at is not None:  # declare one of the tokens it produces to be the end
        tokens = Autoregressive().generate(core, prompt, limit, depth, seed, start_state=start).tokens
        core = with_eos(core, [tokens[eos_at % len(tokens)]])
    verdict = verify_generation(decoder, core, prompt, limit, depth, seed, start_state=start)
    assert verdict.tokens_equal and verdict.cache_equal and verdict.counts_equal, str(verdict)
    got = verdict.generation
    assert got.accepted == sum(got.accept_lengths) <= got.proposed
    if got.proposed:
        SEEN.append(got.alpha)


def test_the_draws_above_reach_every_branch():
    """Acceptance must cover 0 to 1, or the accept and reject paths went untested."""
    if len(SEEN) < 100:
        pytest.skip("needs the draws of the test above, in the same process")
    assert sum(a == 0 for a in SEEN) > 5 and sum(a == 1 for a in SEEN) > 5
    assert sum(0.2 <= a <= 0.95 for a in SEEN) >= len(SEEN) / 3, sorted(SEEN)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_autoregressive_tokens_are_those_of_one_full_pass(family):
    core = model(family, 0.5, 0)
    verdict = verify_generation(Autoregressive(), core, [1, 2, 3], 12, 5)
    assert verdict.ok and verdict.cache_tolerance < 1e-6, str(verdict)
    with torch.inference_mode():
        logits = core(torch.tensor([[1, 2, 3, *verdict.generation.tokens[:-1]]]), depth=5)
    assert logits.argmax(-1)[0, 2:].tolist() == verdict.generation.tokens


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


def test_an_eos_that_shortens_blocks_at_the_limit_is_not_called_a_miscount():
    core = make_random_core("ouro", seed=316360, gain=2, depth=7, n_core=1, vocab_size=2, context=12, tied=True, eos=[0, 0])
    for decoder in (DraftThenVerify(1, 1), Wavefront(1), DASWave(2, 1)):
        verdict = verify_generation(decoder, core, [1, 0, 0], 3, depth=9, seed=-1)
        assert verdict.ok, str(verdict)
