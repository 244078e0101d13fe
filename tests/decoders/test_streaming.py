"""Streaming: pieces are committed text only, together the text of `generate`; a stream can be left and gone on from anywhere."""

from __future__ import annotations

import codecs
import dataclasses
import random
import sys
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, Decoder, DraftThenVerify, Sampling, Wavefront
from loopscope.errors import ContextError, HookError, PromptError, SettingError
from loopscope.models.hooked import LoopedModel
from loopscope.random_models import make_random_core
from loopscope.rows import Chain

DECODERS = [Autoregressive(), DraftThenVerify(1, 4), DraftThenVerify(2, 3, "deep_kv"), Wavefront(1), Wavefront(1, redraft=1), DASWave(4, 1)]
PROMPT, LIMIT = [1, 2, 3], 24


class Words:
    """Tokens that are pieces of characters, letters and whole words: id i decodes to TABLE[i % len(TABLE)]."""

    TABLE = ["a".encode(), b"b", b"ab", b" ", "é".encode()[:1], "é".encode()[1:], "\U0001f600".encode()[:2], "\U0001f600".encode()[2:],
             b"the end", b"\n", b"bab", "€".encode()]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.TABLE[i % len(self.TABLE)] for i in ids).decode(errors="replace")


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def core(request):
    core = make_random_core(request.param, gain=0.15, seed=4, n_core=1)
    core.tokenizer = Words()
    return core


def with_eos(core, *eos):
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=eos)
    return other


@pytest.mark.parametrize("sampling", [None, Sampling(1.2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_the_pieces_are_the_text(core, decoder, sampling):
    plain = Autoregressive().generate(core, PROMPT, LIMIT, sampling=sampling)
    for options in ({}, {"stop": plain.text[4:7]}, {"stop": (plain.text[9:14], plain.text[6:8])}, {"stop": "never said"}):
        want = decoder.generate(core, PROMPT, LIMIT, sampling=sampling, **options)
        stream = decoder.stream(core, PROMPT, LIMIT, sampling=sampling, **options)
        pieces = list(stream)
        assert "".join(pieces) == want.text and all(pieces) and stream.tokens == want.tokens
        got = stream.result()
        assert dataclasses.replace(got, seconds=want.seconds).__dict__ == want.__dict__, "the Generation of `generate`, but for the clock"
    assert len(pieces) > 1


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_an_eos_ends_the_stream_where_it_ends_the_text(core, decoder):
    plain = Autoregressive().generate(core, PROMPT, LIMIT).tokens
    ended = with_eos(core, plain[11], plain[7])
    want = Autoregressive().generate(ended, PROMPT, LIMIT)
    stream = decoder.stream(ended, PROMPT, LIMIT)
    assert "".join(stream) == want.text and stream.tokens == want.tokens and len(want.tokens) < LIMIT and stream.finished


# ---- which text is given, whatever the tokens -------------------------------------------------------------------


class Script(Decoder):
    """Commits given blocks of tokens, as a decoder does whose drafts were accepted."""

    label = "script"

    def __init__(self, blocks: list[list[int]]) -> None:
        self.blocks = blocks

    def _check(self, core, depth):
        pass

    def _decode(self, session):
        raise AssertionError("never reached")

    def _steps(self, session):
        for block in self.blocks:
            yield session.embed([0], Chain(0, 1))
            for token in block:
                if not session.commit(token):
                    return
        session.finished = True


@lru_cache(maxsize=1)
def speaker():
    core = make_random_core("ouro", n_core=1, context=512)
    core.tokenizer = Words()
    return core


said = st.lists(st.lists(st.integers(0, len(Words.TABLE) - 1), min_size=1, max_size=4), min_size=1, max_size=8)
stops = st.lists(st.sampled_from(["ab", "aba", "bab b", "the", "d\n", "é€", "\U0001f600a", "end", " ", "e endt", "bba"]), max_size=3)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(blocks=said, stop=stops)
def test_no_broken_character_and_nothing_of_a_stop_string_is_ever_given(blocks, stop):
    core, table = speaker(), Words.TABLE
    stream = Script(blocks).stream(core, [1], 100, stop=stop)
    given, committed = "", []
    for piece in stream:
        given, committed = given + piece, stream.tokens
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(table[t] for t in committed))
        if not stream.finished:  # whole characters only, and no end of them that could be the beginning of a stop string
            open_end = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            assert text[: len(text) - open_end].startswith(given)
    told = [t for block in blocks for t in block]
    n = next((n for n in range(1, len(told) + 1) if any(s in core.to_text(told[:n]) for s in stop)), len(told))
    text = core.to_text(told[:n])
    assert stream.tokens == told[:n]
    assert given == text[: min((text.index(s) for s in stop if s in text), default=len(text))]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_text_that_is_decided_is_not_held_back(stop):
    blocks = [[0, 1], [8, 3], [9], [4, 5], [11]]
    pieces = ["ab", "the end ", "\n", "é", "€"]
    assert list(Script(blocks).stream(speaker(), [1], 100, stop=stop)) == pieces
    assert list(Script([[4], [5], [6], [7, 0]]).stream(speaker(), [1], 100)) == ["é", "\U0001f600a"]
    assert list(Script([[2], [0], [9]]).stream(speaker(), [1], 100, stop="bab")) == ["a", "ba\n"]


# ---- left in the middle -----------------------------------------------------------------------------------------


@torch.inference_mode()
def finished(decoder, core):
    session = decoder._open(core, PROMPT, LIMIT)
    decoder._run(session)
    return session


def assert_usable(stream, core, reference) -> None:
    """Tokens are a prefix of plain decoding's, K/V its K/V, and going on by hand gives its next token."""
    tokens, cache = stream.tokens, stream.cache
    assert tokens == reference.new_tokens[: len(tokens)] and cache.length == len(PROMPT) + len(tokens) - 1
    theirs = reference.cache.materialised()
    for name, kept in cache.materialised().items():
        torch.testing.assert_close(kept, theirs[name][..., : cache.length, :], rtol=0, atol=1e-9)
    if len(tokens) < LIMIT:
        logits = core(torch.tensor(tokens[-1:]), cache=cache.clone())  # outside inference mode, as a user would
        assert int(logits[0, -1].argmax()) == reference.new_tokens[len(tokens)]


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_a_stream_may_be_left_at_any_piece_and_gone_on_from(core, decoder):
    reference = finished(Autoregressive(), core)
    stream, text, whole = decoder.stream(core, PROMPT, LIMIT), "", finished(decoder, core).counts["readout"]
    with pytest.raises(SettingError, match="take a piece"):
        stream.result()
    for piece in stream:
        text += piece
        assert_usable(stream, core, reference)
        so_far = stream.result()
        assert so_far.tokens == stream.tokens and so_far.calls.readout <= whole
        if type(decoder) is Autoregressive:
            n = len(so_far.tokens) - 1
            assert so_far.calls == (n * core.config.depth, n, n)
    assert text == core.to_text(reference.new_tokens) and stream.finished
    left = decoder.stream(core, PROMPT, LIMIT)
    first = next(left)
    left.close()
    assert list(left) == [] and text.startswith(first) and not left.finished
    assert_usable(left, core, reference)


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Broken])
@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_an_interrupt_in_the_middle_of_a_call_leaves_what_was_committed(core, decoder, error):
    reference, calls = finished(Autoregressive(), core), [0, 0]

    def break_off(tensor, hook):
        calls[0] += 1
        if calls[0] == calls[1]:
            raise error

    hooks = [(lambda name: name.endswith("hook_v"), break_off)]
    list(decoder.stream(LoopedModel(core), PROMPT, LIMIT, fwd_hooks=hooks))
    for at in {1, calls[0] // 2, calls[0] - 1}:
        calls[:] = 0, at
        stream = decoder.stream(LoopedModel(core), PROMPT, LIMIT, fwd_hooks=hooks)
        with pytest.raises(error):
            list(stream)
        assert list(stream) == [] and not stream.finished
        if stream.tokens:
            assert_usable(stream, core, reference)
        assert at == 1 or len(stream.tokens) > 1


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_an_interrupt_between_any_two_lines_leaves_tokens_and_keys_and_values_that_agree(decoder):
    core = make_random_core("ouro", gain=0.15, seed=4, n_core=1)
    core.tokenizer = Words()
    reference, lines, stop_at, between = finished(Autoregressive(), core), 0, 0, []

    def trace(frame, event, argument):
        nonlocal lines
        if "/decoders/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename \
                or frame.f_code.co_filename.endswith("streaming.py"):
            return None
        if event == "line":
            lines += 1
            if not stop_at and stream.cache.length != len(PROMPT) + len(stream.tokens) - 1 > len(PROMPT):
                between.append(lines)  # a token is committed and its K/V are not, or the other way round
            if lines == stop_at:
                raise KeyboardInterrupt
        return trace

    def run() -> None:
        nonlocal lines
        lines, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            list(stream)
        finally:
            sys.settrace(before)

    stream = decoder.stream(core, PROMPT, LIMIT)
    run()
    draw = random.Random(0)
    for stop_at in draw.sample(range(1, lines), 10) + draw.sample(between, 10):
        stream = decoder.stream(core, PROMPT, LIMIT)
        with pytest.raises(KeyboardInterrupt):
            run()
        if stream.tokens:
            assert_usable(stream, core, reference)


def test_hooks_act_only_while_a_piece_is_made(core):
    model, seen = LoopedModel(core), []
    stream = Wavefront(1).stream(model, PROMPT, LIMIT, fwd_hooks=[("depth.1.blocks.0.attn.hook_v", lambda v, hook: seen.append(1))])
    assert not seen
    next(stream)
    count = len(seen)
    assert count
    model(torch.tensor([PROMPT]))
    core(torch.tensor([PROMPT]))
    assert len(seen) == count
    next(stream)
    assert len(seen) > count


def test_what_is_wrong_is_said_before_the_first_piece(core):
    decoder = Wavefront(1)
    for call, error, message in [
            (lambda: decoder.stream(core, [], 4), PromptError, "empty"),
            (lambda: decoder.stream(core, [1], 10**6), ContextError, "context"),
            (lambda: decoder.stream(core, [1], 4, stop=[""]), SettingError, "stop"),
            (lambda: decoder.stream(core, [1], 4, fwd_hooks=[("nowhere", print)]), HookError, "nowhere"),
            (lambda: decoder.stream(make_random_core("ouro"), [1], 4), SettingError, "tokenizer"),
            (lambda: decoder.stream(core, [1], 4, sampling="hot"), SettingError, "Sampling")]:
        with pytest.raises(error, match=message):
            call()


def test_the_first_of_several_stop_strings_in_one_token_cuts_the_text():
    assert list(Script([[0], [8], [1]]).stream(speaker(), [1], 100, stop=("end", "the"))) == ["a"]
