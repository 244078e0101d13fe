"""What the losslessness ladder draws, what it holds decoders to, and when it calls a difference a near tie."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, Wavefront
from decoders.ladder import KINDS, VOCAB, Case, Letters, case, check, model, opened, runs_on
from decoders.reference import CEILING, follow
from decoders.sampling import Sampling
from decoders.verify import Verdict, verify_generation
from loopscope.errors import SettingError
from loopscope.random_models import FAMILIES

DRAWN = [case(number) for number in range(400)]


def test_a_case_is_a_pure_function_of_its_number():
    assert [repr(case(number)) for number in range(50)] == [repr(drawn) for drawn in DRAWN[:50]]
    assert len({repr(dataclasses.replace(drawn, number=0)) for drawn in DRAWN}) == len(DRAWN)


def test_cases_are_the_same_on_every_machine():
    """A certificate names a case by its number only, so what it draws may not change with a version of anything."""
    drawn = case(7)
    assert (drawn.family, drawn.decoder.label, drawn.depth, drawn.prompts, drawn.limits) == EXPECTED


EXPECTED = ("raven_olmo", "DtV d=1 K=5 deep_kv", 24, ((60, 39, 62, 37, 10, 5, 42), (28, 13, 4)), (3, 8))


def test_the_draws_cover_what_decoding_depends_on():
    families, labels = Counter(d.family for d in DRAWN), Counter(type(d.decoder).__name__ for d in DRAWN)
    assert set(families) == set(FAMILIES) and min(families.values()) > 20
    assert set(labels) == {"Autoregressive", "DASWave", "DraftThenVerify", "LoopSpec", "PromptLookup", "Wavefront"}
    assert {len(d.prompts) for d in DRAWN} == {1, 2, 3, 4}
    assert {len(p) for d in DRAWN for p in d.prompts} == set(range(1, 10)) and {n for d in DRAWN for n in d.limits} >= set(range(1, 25))
    sampled = Counter(d.sampling for d in DRAWN)
    assert 0.4 < sampled[None] / len(DRAWN) < 0.7
    for temperature in (0.7, 1.3):
        assert sampled[Sampling(temperature, top_p=0.9)] > 20
    assert sum(bool(d.eos) for d in DRAWN) > 100 and sum(d.stop is not None for d in DRAWN) > 25
    assert sum(d.start == "zero" for d in DRAWN) > 25 and sum(d.prefix > 0 for d in DRAWN) > 10 and sum(d.depth > 20 for d in DRAWN) > 2
    reads = {d.decoder.read for d in DRAWN if isinstance(d.decoder, (DASWave, DraftThenVerify))}
    assert reads == {"aligned", "deep_v", "deep_k", "deep_kv"}
    waves = [d.decoder for d in DRAWN if isinstance(d.decoder, DASWave)]
    assert {w.growth for w in waves} == {0, 1, 2} and {w.stable for w in waves} == {None, 1, 2}
    assert {w.bonus for w in waves} == {True, False}
    assert {w.redraft for w in (d.decoder for d in DRAWN) if isinstance(w, Wavefront)} == {None, 1, 2, 3}


def test_decoders_are_drawn_only_where_they_run_and_as_deep_as_they_need():
    for decoder in (LoopSpec(2, 6), Wavefront(9), DASWave(3, 1, carry=True)):
        for number in range(60):
            drawn = case(number, decoders=[decoder])
            assert drawn.decoder is decoder and runs_on(decoder, drawn.family)
            decoder._check(model(drawn.family, drawn.gain, drawn.model_seed), drawn.depth)
    assert not runs_on(LoopSpec(1, 2), "dory") and not runs_on(DASWave(3, 1, carry=True), "ouro")
    assert {type(case(number, decoders=["pld", "ar"]).decoder).__name__ for number in range(40)} == {"PromptLookup", "Autoregressive"}
    assert len(set(KINDS)) == 8


def test_an_end_cuts_the_reference_at_the_first_token_that_completes_it():
    core = model("ouro", 0.5, 0)
    reference = follow(core, [1, 2, 3], 16, 4)
    new = reference.new_tokens
    assert reference.ended({new[5]}).new_tokens == new[: new.index(new[5]) + 1]
    text = Letters().decode(new)
    for at in range(0, 30, 4):  # pieces that begin and end anywhere in a token
        stop = text[at : at + 4]
        cut = reference.ended(stop=stop)
        kept = Letters().decode(cut.new_tokens)
        assert stop in kept and stop not in kept[:-3] and cut.tokens == [1, 2, 3, *cut.new_tokens]
    assert reference.ended({VOCAB}, "not there") is reference


def test_stops_of_a_case_are_found_in_its_own_text():
    drawn = Case(-1, "ouro", 0.5, 0, Wavefront(1), 4, ((1, 2, 3), (4,)), (16, 16), (0, 1), eos=(9,), stop=(3, 5))
    core, references, stop = opened(drawn)
    whole = follow(model("ouro", 0.5, 0), [1, 2, 3], 16, 4).new_tokens
    assert core.config.eos == (whole[9],) and stop == Letters().decode(whole)[3:8] and not model("ouro", 0.5, 0).config.eos
    assert references[0].new_tokens == whole[:3] and all(v.ok for v in check(drawn))


def test_decoders_that_are_not_lossless_are_refused():
    drawn = Case(-1, "huginn", 0.5, 0, Wavefront(1, slots=2), 4, ((1, 2),), (4,), (0,))
    with pytest.raises(SettingError, match="approximate: its tokens need not be"):
        check(drawn)
    with pytest.raises(SettingError, match="rejection sampling gives other tokens"):
        verify_generation(Wavefront(1), model("huginn", 0.5, 0), [1, 2], 4, 4, sampling=Sampling(method="rejection"))


def test_a_chaotic_draw_stays_in_and_its_tolerance_is_its_own():
    """Rounding grows along 32 recurrences; tokens, K/V and calls still hold, by what the row count does to plain decoding itself."""
    drawn = Case(-1, "huginn", 1.5, 0, Wavefront(2), 32, ((1, 2, 3), (4, 5)), (10, 6), (0, 0))
    verdicts = check(drawn)
    assert all(v.ok and v.tokens_equal for v in verdicts)
    assert max(v.cache_tolerance for v in verdicts) > 1e-11 and max(v.cache_gap for v in verdicts) > 1e-13


def test_margins_are_in_logits_of_the_choice_that_was_made():
    core = model("ouro", 0.5, 0)
    for sampling in (None, Sampling(1.3), Sampling(0.7, top_p=0.5)):
        reference = follow(core, [1, 2, 3], 8, 4, seed=5, sampling=sampling)
        margins = [reference.margin(3, token) for token in range(VOCAB)]
        chosen = reference.new_tokens[3]
        assert margins[chosen] == 0 and all(m > 0 for token, m in enumerate(margins) if token != chosen)
        if sampling is None:
            assert margins[7] == pytest.approx(float(reference.logits[3, chosen] - reference.logits[3, 7]))
        elif sampling.top_p is not None:
            assert margins.count(float("inf")) > 0  # what the nucleus cut is never a near tie


def verdict_with(**changes) -> Verdict:
    held = verify_generation(Autoregressive(), model("ouro", 0.5, 0), [1, 2], 6, 4)
    return dataclasses.replace(held, **changes)


def test_a_difference_is_explained_only_by_a_margin_below_the_measured_deviation():
    assert verdict_with().ok
    near = {"tokens_equal": False, "first_difference": 2, "deviation": 1e-9}
    assert verdict_with(**near, margin=5e-10).explained and verdict_with(**near, margin=5e-10).ok
    for margin in (2e-9, 1.0, float("inf")):
        assert not verdict_with(**near, margin=margin).explained and not verdict_with(**near, margin=margin).ok
    assert not verdict_with(**near, margin=0.0).explained, "an exact tie is decided by index"
    assert not verdict_with(**(near | {"deviation": 1.0}), margin=10 * CEILING).explained, "no float64 rounding is that large"
    assert "near tie" in str(verdict_with(**near, margin=5e-10)) and "DIFFER at new token 2" in str(verdict_with(**near, margin=1.0))


def test_what_else_can_be_wrong_makes_a_verdict_fail():
    held = verdict_with()
    assert not verdict_with(cache_gap=1e-6).ok and not verdict_with(drafts_match=False).ok
    assert "DRAFTS" in str(verdict_with(drafts_match=False))
    assert not verdict_with(predicted=held.counted._replace(readout=99)).ok and not verdict_with(forced=held.counted.recur + 1).ok
    assert verdict_with(predicted=held.counted._replace(rows=10**6), bound=True).ok
    assert not verdict_with(predicted=held.counted._replace(rows=0), bound=True).ok


@pytest.mark.parametrize("number", [241, 870, 1825, 2187])
def test_cases_that_a_full_certificate_once_failed_on(number):
    """Early stops while several positions join at once; a stop text among the accepted of a block, and plain steps around it."""
    verdicts = list(check(case(number)))
    assert verdicts and all(verdict.ok for verdict in verdicts), [str(v) for v in verdicts]
