"""L0: every decoder commits exactly the autoregressive tokens, with the autoregressive K/V, in the predicted calls.

In float64, on random models of all families whose gain sweeps acceptance from 0 to 1 (docs/algorithms.md, 2.7); alone and in batches,
greedy and with shared noise, with EOS, stop strings and limits anywhere. `loopscope verify --full` draws thousands of the like.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from decoders.counting import wavefront_counts
from decoders.ladder import SAMPLINGS, STARTS, VOCAB, Case, check, model, runs_on
from decoders.verify import verify_generation
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.rows import POLICIES

SETTINGS = 32  # for each family
GAINS = (0.3, 0.4, 0.5, 0.6, 0.35, 0.45, 0.25, 0.55, 0.2, 0.7, 0.1, 0.0, 1.0)

small = st.integers(1, 4)
decoders = st.one_of(
    st.builds(DraftThenVerify, small, st.integers(1, 6), st.sampled_from(("aligned", *POLICIES))),
    st.builds(Wavefront, small, st.one_of(st.none(), st.integers(1, 3))),
    st.builds(LoopSpec, st.integers(1, 2), st.sampled_from([None, 3]), st.sampled_from([0.0, 0.0, 0.1]), st.sampled_from([64, 5])),
    st.builds(PromptLookup, st.integers(1, 6), st.integers(1, 3)),
    st.builds(lambda j, k, cap, w, read, carry, growth, stable, bonus: DASWave(j, k, cap, w, read, carry, growth, stable, bonus),
              st.integers(1, 6), st.integers(1, 3), st.sampled_from([1, 4, 32]), st.integers(1, 3),
              st.sampled_from(("deep_kv", "deep_kv", *POLICIES)), st.sampled_from([None, None, False]), st.integers(0, 2),
              st.sampled_from([None, None, 1, 2]), st.booleans()),
)
limits = st.one_of(st.integers(14, 24), st.integers(14, 24), st.integers(1, 20))  # in a short text all drafts are right, or none is
sequences = st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), limits, st.integers(-3, 2**40)),
                     min_size=1, max_size=3)
SEEN: list[tuple[str, float]] = []


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=SETTINGS, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(gain=st.sampled_from(GAINS), model_seed=st.integers(0, 2), decoder=decoders,
       depth=st.integers(4, 7), drawn=sequences, sampling=st.one_of(st.none(), st.none(), st.sampled_from(SAMPLINGS)),
       eos=st.one_of(st.none(), st.none(), st.integers(0, 20)),
       stop=st.one_of(*[st.none()] * 4, st.tuples(st.integers(0, 40), st.integers(1, 5))), zero=st.booleans(), prefix=st.integers(0, 3))
def test_every_decoder_commits_the_autoregressive_tokens_and_keys_and_values_in_the_predicted_calls(
        family, gain, model_seed, decoder, depth, drawn, sampling, eos, stop, zero, prefix):
    assume(runs_on(decoder, family))
    prompts, limits, seeds = (tuple(each) for each in zip(*((tuple(p), n, s) for p, n, s in drawn)))
    verdicts = check(Case(
        -1, family, gain, model_seed, decoder, depth, prompts, limits, seeds, sampling, "zero" if zero and family in STARTS else None,
        min(prefix, *map(len, prompts)) if family == "hrm_text" else 0, () if eos is None else (eos,), stop))
    for verdict in verdicts:
        got = verdict.generation
        assert verdict.ok and verdict.tokens_equal, str(verdict)
        assert got.accepted == sum(got.accept_lengths) <= got.proposed
        if got.proposed:
            SEEN.append((family, got.alpha))


def test_the_draws_above_reach_every_branch():
    """Acceptance must cover 0 to 1, or the accept and reject paths went untested."""
    if len(SEEN) < 100:
        pytest.skip("needs the draws of the test above, in the same process")
    rates = [alpha for _, alpha in SEEN]
    assert sum(a == 0 for a in rates) > 5 and sum(a == 1 for a in rates) > 5
    assert sum(0.2 <= a <= 0.95 for a in rates) >= len(rates) / 3, sorted(rates)
    assert {family for family, _ in SEEN} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_autoregressive_tokens_are_those_of_one_full_pass(family):
    core = model(family, 0.5, 0)
    verdict = verify_generation(Autoregressive(), core, [1, 2, 3], 12, 4)
    assert verdict.ok and verdict.cache_tolerance < 1e-6, str(verdict)
    with torch.inference_mode():
        logits = core(torch.tensor([[1, 2, 3, *verdict.generation.tokens[:-1]]]), depth=4)
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
        assert verdict.ok and verdict.predicted is not None, str(verdict)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_shared_noise_is_held_to_a_reference_that_samples(temperature):
    """Without this the sampled draws above could quietly be greedy ones."""
    sampling = Sampling(temperature, top_p=0.9)
    core = model("ouro", 0.3, 0)
    sampled = verify_generation(Wavefront(1), core, [1, 2], 16, 4, sampling=sampling)
    greedy = verify_generation(Wavefront(1), core, [1, 2], 16, 4)
    assert sampled.ok and greedy.ok and sampled.generation.tokens != greedy.generation.tokens
