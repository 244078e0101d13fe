"""Decoders with drafts of their own, replayed: what is said of DAS-Wave, deep reads and prompt lookup is what they then count."""

import dataclasses
from collections import Counter

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Wavefront
from decoders.carried import Refinements
from decoders.foreign import Chains
from decoders.replay import predict_from_replay, replay, replayed
from loopscope.errors import SettingError
from loopscope.random_models import make_random_core

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
BLOCKS = [DASWave(4, 1), DASWave(2, 2, growth=2), DASWave(4, 1, capacity=4, initial_width=1), DASWave(4, 1, read="aligned"),
          DASWave(3, 1, read="deep_v", carry=False), DASWave(6, 1, stable=1), DASWave(3, 2, bonus=False, capacity=4)]
DRAFTS = [DraftThenVerify(1, 3, "deep_kv"), DraftThenVerify(2, 6, "deep_v"), DraftThenVerify(1, 8, "deep_k"), PromptLookup(3, 2)]
RATES: list[float] = []


def model(family, gain, eos=(), seed=1):
    core = make_random_core(family, gain=gain, seed=seed, n_core=1, vocab_size=48)
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(eos))
    return other


def check(core, prompts, limit, depth, decoders=(*BLOCKS, *DRAFTS)):
    made = Refinements(core, prompts, replay(core, prompts, limit, depth=depth, progress=False))
    for index, prompt in enumerate(prompts):
        for decoder in decoders:
            said, got = made.outcome(index, decoder), decoder.generate(core, prompt, limit, depth)
            where = f"{core.family} {decoder.label} on {prompt}: {said}, counted {got.calls} {got.rows}"
            if said.exact:
                assert (said.recur, said.accepted, said.proposed) == (got.calls.recur, got.accepted, got.proposed), where
                assert said.runs == got.accept_lengths, where
            else:
                assert isinstance(decoder, DraftThenVerify) and core.config.eos, where
            if said.rows_exact:
                assert (said.prelude, said.readout, said.rows) == (*got.calls[1:], got.rows), where
            assert (sum(w * n for w, n in said.widths.items()), sum(said.widths.values())) == (said.rows, said.recur), where
            if isinstance(decoder, DraftThenVerify) and got.proposed:
                widths = Counter(Counter(e.tick for e in got.trace if e.event == "run").values())
                assert said.widths == dict(sorted(widths.items())) or not said.rows_exact, where
                RATES.append(got.alpha)


@pytest.mark.parametrize("family, gain", [("huginn", 0.05), ("huginn", 0.3), ("huginn", 0.6), ("parcae", 0.3), ("ouro", 0.5),
                                          ("nanbeige", 0.2)])
def test_what_is_said_is_what_is_counted(family, gain):
    """Models that carry, models whose rows freeze, and codas that attend; d and K that the limit cuts."""
    check(model(family, gain), PROMPTS, 18, 5)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_texts_that_end_early(family):
    core = model(family, 0.2)
    tokens = Autoregressive().generate(core, PROMPTS[0], 18, 5).tokens
    for place in (4, 9):
        check(model(family, 0.2, [tokens[place]]), PROMPTS[:1], 18, 5)


def test_the_drafts_above_were_accepted_and_rejected():
    if len(RATES) < 20:
        pytest.skip("needs the generations of the tests above, in the same process")
    assert min(RATES) < 0.5 and max(RATES) > 0.7


@torch.inference_mode()
def test_a_chain_of_drafts_ends_with_its_first_wrong_one():
    """The same whether it was made with all others or alone, and whatever was asked for before."""
    core = model("huginn", 0.3)
    made = Refinements(core, PROMPTS[:1], replay(core, PROMPTS[:1], 24, depth=5, progress=False))
    whole, ids = made._whole(0), made._ids[0]
    chains, again = Chains(whole.session, ids, 3), Chains(whole.session, ids, 3)
    lengths = set()
    for anchor in range(chains.lanes):
        long = chains.drafts("deep_kv", 1, anchor, 9)
        assert again.drafts("deep_kv", 1, anchor, 2) == long[:2]
        truth = ids[4 + anchor :]
        assert long[:-1] == truth[: len(long) - 1]
        assert long[-1] != truth[len(long) - 1] or len(long) == min(9, chains.lanes - anchor)
        lengths.add(len(long))
    assert len(lengths) > 3 and max(lengths) > 4


def test_what_is_not_replayed_here_is_said_so():
    core = model("huginn", 0.3)
    table = replay(core, PROMPTS, 12, depth=5, progress=False)
    made = Refinements(core, PROMPTS, table, rounds=3)
    assert made.outcome(0, DASWave(4, 1)) is None and made.outcome(0, DASWave(3, 1, capacity=64)) is None
    assert made.outcome(0, Wavefront(1)) is None
    frame = predict_from_replay(table, [DraftThenVerify(1, 4, "deep_v"), DASWave(4, 1)], made).frame.set_index("decoder")
    assert frame.exact["DtV d=1 K=4 deep_v"].all() and frame.note["DAS-Wave J=4 k=1 deep_kv"].str.contains("no replay").all()
    with pytest.raises(SettingError, match="2 texts and there are 1 prompts"):
        Refinements(core, PROMPTS[:1], table)


@pytest.mark.parametrize("family, gain", [("huginn", 0.3), ("ouro", 0.4)])
def test_a_tree_whose_cap_binds_is_tried(family, gain):
    """Which proposals a full tree refuses no pass over the text says: the estimate differs from what is counted, the trial does not."""
    core, capped, rows = model(family, gain), LoopSpec(1, 2, lanes=6), ("recur", "prelude", "readout")
    table = replay(core, PROMPTS, 24, depth=6, progress=False)
    made = Refinements(core, PROMPTS, table)
    got = [capped.generate(core, prompt, 24, 6) for prompt in PROMPTS]
    estimated = [replayed(text, capped) for text in table.passes]
    assert not any(o.exact for o in estimated) and [o.recur for o in estimated] != [g.calls.recur for g in got]
    for index, g in enumerate(got):
        said = made.tried(index, capped)
        assert said.exact and said.rows_exact and tuple(getattr(said, name) for name in rows) == tuple(g.calls)
        assert (said.rows, said.proposed, said.accepted, said.runs) == (g.rows, g.proposed, g.accepted, g.accept_lengths)
        assert (sum(w * n for w, n in said.widths.items()), sum(said.widths.values())) == (g.rows, g.calls.recur)
        assert 0 < sum(said.branched.values()) < g.calls.recur and max(said.widths) == 6
    assert made.tried(0, Wavefront(1)) is None
    frame = predict_from_replay(table, [capped], made).frame
    assert frame.exact.all() and frame.recur_calls.tolist() == [g.calls.recur for g in got]
    assert not predict_from_replay(table, [capped]).frame.exact.any()


def test_a_trial_that_gives_another_text_says_nothing():
    core = model("huginn", 0.3)
    table = replay(core, PROMPTS[:1], 12, depth=5, progress=False)
    made, again = Refinements(core, PROMPTS[:1], table), Refinements(core, PROMPTS[:1], table)
    assert made.tried(0, LoopSpec(1, 2)) is not None
    again.texts[0].tokens[-1] += 1  # as if rounding had decided a near-tie otherwise
    assert again.tried(0, LoopSpec(1, 2)) is None
