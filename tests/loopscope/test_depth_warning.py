"""Depth beyond the trained one: said once per call where only the state is fed back, not where the input enters every recurrence."""

from __future__ import annotations

import warnings

import pytest
import torch

from decoders import Autoregressive
from loopscope.adaptive import adaptive_forward, weighted_logits
from loopscope.errors import DepthWarning
from loopscope.models.hooked import LoopedModel

INJECTED, FED_BACK = ("huginn", "raven", "parcae", "dory"), ("ouro", "nanbeige", "hrm_text")
TOKENS = torch.arange(5)
CALLS = {
    "forward": lambda model, depth: model.core(TOKENS, depth),
    "hooked forward": lambda model, depth: model(TOKENS, depth=depth),
    "run_with_cache": lambda model, depth: model.run_with_cache(TOKENS, depth=depth),
    "generate": lambda model, depth: Autoregressive().generate(model, TOKENS, max_new_tokens=4, depth=depth),
    "adaptive_forward": lambda model, depth: adaptive_forward(model, TOKENS, "latent-diff", depth),
    "make_cache": lambda model, depth: model.make_cache(4, depth),
}


def said(call, *args) -> list:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [w for w in caught if issubclass(w.category, DepthWarning)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", FED_BACK)
def test_a_model_without_injection_says_once_that_it_was_not_trained_so_deep(random_core, family, call):
    model = LoopedModel(random_core(family, depth=3, n_core=1))
    assert not said(CALLS[call], model, None) and not said(CALLS[call], model, 3)
    (warning,) = said(CALLS[call], model, 4)
    assert str(warning.message) == (f"{family} was trained with 3 recurrences and is fed nothing but its own state: at depth 4 it runs "
                                    "outside what it was trained for")
    assert warning.filename == __file__  # the line of whoever called, not one of ours


@pytest.mark.parametrize("family", INJECTED)
def test_a_model_with_injection_runs_as_deep_as_it_is_asked_to(random_core, family):
    model = LoopedModel(random_core(family, depth=2, n_core=1))
    assert not any(said(call, model, 5) for call in CALLS.values())


def test_weighted_logits_say_it_too(random_core):
    assert len(said(weighted_logits, random_core("ouro", depth=2), TOKENS, 3)) == 1
