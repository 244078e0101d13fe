"""L0 for the later families: every decoder equals autoregressive decoding in tokens, K/V and calls, in float64."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from decoders import DASWave, DraftThenVerify, Wavefront
from decoders.verify import verify_generation
from loopscope.random_models import make_random_core

FAMILIES = ("raven", "raven_olmo", "nanbeige", "parcae")
DECODERS = (Wavefront(1), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"), DASWave(4, 1))
SEEN: dict[str, list[float]] = {}


@lru_cache(maxsize=8)
def model(family: str, gain: float):
    return make_random_core(family, gain=gain, n_core=2, vocab_size=64)


@pytest.mark.support("decoders")
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_commits_the_autoregressive_tokens_and_keys_and_values_in_the_predicted_calls(family, decoder):
    for seed, gain in enumerate((0.05, 0.3, 1.0)):
        prompt = torch.randint(0, 64, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        verdict = verify_generation(decoder, model(family, gain), prompt, 20, depth=5, seed=seed)
        assert verdict.ok, f"{family} gain {gain}: {verdict}"
        SEEN.setdefault(family, []).append(verdict.generation.alpha)


def test_the_generations_above_accepted_and_rejected_drafts():
    if len(SEEN) < len(FAMILIES):
        pytest.skip("needs the generations of the test above, in the same process")
    for family, rates in SEEN.items():
        assert min(rates) < 0.3 and max(rates) > 0.7, f"{family}: {sorted(rates)}"
