"""Forced acceptance: real calls, tokens by position, drafts right as often as is said, and a label that says so."""

import math

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, Wavefront
from decoders.forced import Forced
from decoders.graphs import Eager, Tapes
from decoders.static import release
from loopscope.errors import SettingError
from loopscope.random_models import make_random_core

DECODERS = [Wavefront(1), Wavefront(2), Wavefront(1, redraft=1), DraftThenVerify(1, 3), DraftThenVerify(2, 4, "deep_kv"), DASWave(4, 1),
            LoopSpec(1, 2)]


@pytest.fixture(scope="module")
def core():
    return make_random_core("huginn", depth=4, context=400)


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_every_decoder_gives_the_text_of_ar_under_the_same_coins(core, decoder, alpha):
    plain, ours = (Forced(d, alpha, seed=3).generate(core, [1, 2, 3], max_new_tokens=30) for d in (Autoregressive(), decoder))
    assert ours.tokens == plain.tokens and len(set(ours.tokens)) > 10
    assert alpha not in (0, 1) or ours.alpha == alpha
    assert ours.fidelity == "lossy" and f"forced alpha={alpha:g}" in ours.decoder and decoder.label in ours.decoder


def test_calls_are_those_of_the_oracles(core):
    """docs/algorithms.md, 2.3: N tokens in T + (N - 2) d recurrences if all are right, in (N - 1) T if none is."""
    for alpha, expected in ((1, 4 + 38 * 1), (0, 39 * 4)):
        assert Forced(Wavefront(1), alpha).generate(core, [1, 2, 3], max_new_tokens=40).calls.recur == expected


def test_drafts_are_right_as_often_as_said_and_independently(core):
    made = [Forced(Wavefront(1), 0.8, seed=seed).generate(core, [5], max_new_tokens=200) for seed in range(2)]
    proposed, accepted = sum(g.proposed for g in made), sum(g.accepted for g in made)
    assert proposed > 250 and abs(accepted / proposed - 0.8) < 4 * math.sqrt(0.8 * 0.2 / proposed)
    assert len({tuple(g.tokens) for g in made}) == 2, "the seed keys the coins"


def test_tokens_that_end_a_text_never_come_up():
    core = make_random_core("huginn", depth=2, eos=list(range(2, 256)))
    g = Forced(Wavefront(1), 0.5).generate(core, [0], max_new_tokens=40)
    assert len(g.tokens) == 40 and set(g.tokens) == {0, 1}
    with pytest.raises(SettingError, match="two tokens"):
        Forced(Wavefront(1), 0.5).generate(make_random_core("huginn", depth=2, eos=list(range(1, 256))), [0], max_new_tokens=4)


def test_the_models_own_arithmetic_runs(core):
    """Logits that cannot be are noticed: the calls are real."""
    with pytest.raises(Exception, match="NaN"):
        Forced(Wavefront(1), 0.5).generate(core, [1, 2], max_new_tokens=4, start_state=torch.full((1, 8, 48), float("nan")))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, "1", True, None])
def test_what_is_no_share_is_refused(alpha):
    with pytest.raises(SettingError, match="share of drafts"):
        Forced(Wavefront(1), alpha)
    with pytest.raises(SettingError, match="goes around a decoder"):
        Forced("wfd", 0.5)


@pytest.mark.parametrize("runner", [Eager, lambda: Tapes(16)], ids=["eager", "tape"])
@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1), Wavefront(2), DASWave(4, 1), DASWave(3, 1, bonus=False)],
                         ids=lambda d: d.label)
def test_static_turns_take_the_same_coins(core, decoder, runner):
    """Calls, accepts and text of the generator; on a tape for another prompt than it was made for, whose coins are others."""
    forced, run = Forced(decoder, 0.6, seed=3), runner()
    for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
        said = forced.generate(core, prompt, 30)
        session = forced._open(core, prompt, 30)
        forced._run(session, static=True, runner=run)
        got = session.result(forced)
        assert (got.tokens, got.calls, got.accepted, got.proposed) == (said.tokens, said.calls, said.accepted, said.proposed)
    release(core)
