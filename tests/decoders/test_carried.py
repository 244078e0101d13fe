"""DAS-Wave replayed from its own rounds: what it says is what the decoder then counts."""

import pytest

from decoders import DASWave
from decoders.carried import Refinements
from decoders.replay import replay
from loopscope.errors import SettingError
from loopscope.random_models import make_random_core

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
DECODERS = [DASWave(3, 1), DASWave(6, 1), DASWave(2, 2), DASWave(4, 1, growth=2), DASWave(4, 1, capacity=4, initial_width=1),
            DASWave(4, 1, read="deep_v"), DASWave(4, 1, carry=False)]


@pytest.mark.parametrize("family, gain", [("huginn", 0.05), ("huginn", 0.3), ("raven", 0.3), ("parcae", 0.3), ("ouro", 0.2),
                                          ("nanbeige", 0.2)])
def test_calls_accepts_and_rows_are_those_of_the_decoder(family, gain):
    core = make_random_core(family, gain=gain, seed=1, vocab_size=64)
    table = replay(core, PROMPTS, 24, depth=5, progress=False)
    made = Refinements(core, PROMPTS, table, rounds=6)
    accepted = 0
    for index, prompt in enumerate(PROMPTS):
        for decoder in DECODERS:
            said, got = made.outcome(index, decoder), decoder.generate(core, prompt, 24, 5)
            label = f"{decoder.label} on {prompt}"
            assert (said.accepted, said.proposed) == (got.accepted, got.proposed), label
            if said.exact:
                assert said.recur == got.calls.recur, label
                assert (said.prelude, said.readout, said.rows) == (*got.calls[1:], got.rows), label
                assert sum(w * n for w, n in said.widths.items()) == got.rows and sum(said.widths.values()) == got.calls.recur, label
            else:
                assert said.recur >= got.calls.recur and family in ("ouro", "nanbeige"), label
            accepted += got.accepted
    assert accepted > 20


def test_texts_that_end_early_and_prompts_that_do_not_fit():
    core = make_random_core("huginn", gain=0.1, seed=2, vocab_size=64)
    plain = replay(core, PROMPTS, 24, depth=5, progress=False)
    ending = plain.passes[0].tokens[10]
    ended = make_random_core("huginn", gain=0.1, seed=2, vocab_size=64, eos=[ending])
    table = replay(ended, PROMPTS, 24, depth=5, progress=False)
    assert len(table.passes[0].tokens) < 24
    decoder = DASWave(4, 1)
    said, got = Refinements(ended, PROMPTS, table).outcome(0, decoder), decoder.generate(ended, PROMPTS[0], 24, 5)
    assert (said.recur, said.accepted, said.proposed) == (got.calls.recur, got.accepted, got.proposed) and not said.rows_exact
    assert Refinements(ended, PROMPTS, table, rounds=3).outcome(0, decoder) is None
    with pytest.raises(SettingError, match="2 texts and there are 1 prompts"):
        Refinements(ended, PROMPTS[:1], table)
