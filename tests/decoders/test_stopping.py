"""Where a text ends: EOS ids, stop strings, the limit and the context, to the token, under every decoder."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from loopscope.errors import ContextError, SettingError
from loopscope.random_models import make_random_core

DECODERS = [DraftThenVerify(1, 4), DraftThenVerify(1, 8, "deep_kv"), Wavefront(1), Wavefront(1, redraft=1), LoopSpec(1, 2),
            DASWave(6, 1), DASWave(3, 1, bonus=False), PromptLookup(6, 1)]
PROMPT, LIMIT = [3, 1, 3, 1], 18


class Pairs:
    """Two letters per token, so that stop strings begin and end inside tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join("abc"[i % 3] + "xyz"[i // 3 % 3] for i in ids)


def model(gain: float):
    core = make_random_core("huginn", gain=gain, seed=5, n_prelude=1, n_core=1, n_coda=1, vocab_size=9, context=64)
    core.tokenizer = Pairs()
    return core


MODELS = {gain: model(gain) for gain in (0.0, 0.1, 0.5)}  # every draft right, most of them, few
ACCEPTED: list[tuple[int, int]] = []


def with_eos(core, eos):
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(eos))
    return other


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(gain=st.sampled_from(sorted(MODELS)), decoder=st.sampled_from(DECODERS), seed=st.integers(0, 20), limit=st.integers(1, LIMIT),
       eos=st.lists(st.integers(0, 8), max_size=2), cut=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 7)), max_size=2),
       drawn=st.booleans())
def test_every_decoder_stops_at_the_very_token_where_the_whole_text_says(gain, decoder, seed, limit, eos, cut, drawn):
    """The oracle knows no stopping: it decodes without EOS, stop string or limit, and cuts what comes."""
    core = MODELS[gain]
    options = {"seed": seed, "sampling": Sampling(1.2) if drawn else None}
    tokens = Autoregressive().generate(core, PROMPT, LIMIT, **options).tokens
    whole = core.tokenizer.decode(tokens)
    stop = [whole[start : start + length] for start, length in cut if whole[start : start + length]]
    said = [core.tokenizer.decode(tokens[:n]) for n in range(LIMIT + 1)]
    end = next(n for n in range(1, LIMIT + 1) if n == limit or tokens[n - 1] in eos or any(s in said[n] for s in stop))
    text = said[end]
    got = decoder.generate(with_eos(core, eos), PROMPT, limit, stop=stop, **options)
    assert got.tokens == tokens[:end]
    assert got.text == text[: min((text.index(s) for s in stop if s in text), default=len(text))]
    assert [e.token for e in got.trace if e.event == "commit"] == got.tokens, "nothing behind the end is committed"
    ACCEPTED.append((got.accepted, got.proposed))


def test_the_draws_above_ended_inside_blocks_that_were_accepted_and_rejected():
    if len(ACCEPTED) < 50:
        pytest.skip("needs the draws of the test above, in the same process")
    assert sum(a > 1 for a, _ in ACCEPTED) > 5 and sum(a < p for a, p in ACCEPTED) > 5


@pytest.mark.parametrize("decoder", [Autoregressive(), *DECODERS], ids=lambda d: d.label)
def test_a_text_beyond_the_context_is_refused_before_anything_runs(decoder):
    core, ran = MODELS[0.1], []
    hooks = [("hook_embed", lambda x, hook: ran.append(1))]
    for make in (decoder.generate, decoder.stream, lambda m, p, n, **o: decoder.generate_batch(m, [[1], p], n, **o)):
        with pytest.raises(ContextError, match="at most 5 new tokens"):
            make(core, [1] * 60, 6, fwd_hooks=hooks)
    assert not ran
    assert len(decoder.generate(core, [1] * 60, 5, fwd_hooks=hooks).tokens) == 5 and ran


@pytest.mark.parametrize("stop", ["", ["a", ""], [None], 5, [b"a"]])
def test_stop_strings_that_are_none_are_refused(stop):
    with pytest.raises(SettingError, match="stop must be"):
        Wavefront(1).generate(MODELS[0.1], PROMPT, 4, stop=stop)
