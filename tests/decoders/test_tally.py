"""Every call of a decode, by its kind and its rows: what the replay says is what the calls themselves tell."""

import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Wavefront
from decoders.carried import Refinements
from decoders.replay import replay, replayed
from decoders.tally import observed

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
CHAINS = [Autoregressive(), DraftThenVerify(1, 4), DraftThenVerify(2, 3), DraftThenVerify(1, 4, "deep_kv"),
          DraftThenVerify(2, 4, "deep_v"), DASWave(3, 1), DASWave(3, 2, growth=2), DASWave(4, 1, capacity=3, bonus=False),
          PromptLookup(4, 2)]
WAVES = [Wavefront(1), Wavefront(2), Wavefront(3), Wavefront(1, redraft=1), Wavefront(2, redraft=2), LoopSpec(1, 2), LoopSpec(2, 4),
         LoopSpec(1, 3, gate=0.1), LoopSpec(2, 3, gate=0.5)]


@pytest.mark.parametrize("family, gain", [("huginn", 0.1), ("huginn", 0.4), ("ouro", 0.3), ("parcae", 0.3)])
def test_the_rows_of_every_call_are_foretold(random_core, family, gain):
    core = random_core(family, gain=gain, depth=5, n_core=1, vocab_size=48)
    table = replay(core, PROMPTS, 20, progress=False)
    drafting, several = Refinements(core, PROMPTS, table), set()
    for index, prompt in enumerate(PROMPTS):
        for decoder in (*CHAINS, *WAVES):
            said = replayed(table.passes[index], decoder) or drafting.outcome(index, decoder)
            made, g = observed(decoder, decoder._open(core, prompt, 20)), decoder.generate(core, prompt, 20)
            where = f"{decoder.label} on {prompt}"
            assert (made.recur, made.prelude, made.readout, made.rows) == (*g.calls, g.rows) and made.runs == g.accept_lengths, where
            assert (made.proposed, made.accepted) == (g.proposed, g.accepted), where
            assert sum(made.embedded.values()) == g.calls.prelude and sum(made.read.values()) == g.calls.readout, where
            if said.rows_exact:
                assert (said.widths, said.embedded, said.read) == (made.widths, made.embedded, made.read), where
                assert (said.branched, said.checks, said.unread) == (made.branched, made.checks, made.unread), where
                several |= {(name, n > 1) for name in ("embedded", "read") for n in getattr(said, name)}
            if decoder in CHAINS:
                assert said.fresh == made.fresh, where
    assert several == {(name, many) for name in ("embedded", "read") for many in (False, True)}


def test_a_decode_that_ends_with_its_first_token_made_no_call(random_core):
    core = random_core("ouro", depth=4, n_core=1, vocab_size=48)
    made = observed(Wavefront(1), Wavefront(1)._open(core, [1, 2, 3], 1))
    assert (made.recur, made.widths, made.read) == (0, {}, {})
