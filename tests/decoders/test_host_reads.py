"""The host waits for the device once per tick at most: where it asks which tokens were chosen."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from decoders.calls import Recur
from decoders.session import Session

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DECODERS = [Autoregressive(), Autoregressive(exit="state-change:0.01"), Wavefront(1), Wavefront(2, redraft=1), DraftThenVerify(1, 4),
            DraftThenVerify(2, 3, "deep_kv"), DASWave(4, 1), DASWave(3, 2, read="aligned"), DASWave(4, 1, stable=1), LoopSpec(1, 3),
            LoopSpec(1, 2, gate=0.1), PromptLookup(4)]


def reads_per_tick(decoder, core, watch, monkeypatch, sampling=None) -> Counter:
    """How many reads of the host were made in how many ticks, the one before the first included."""
    ticks: list[int] = []
    run = Recur.run

    def noted(self):
        ticks.append(len(watch.found))
        return run(self)

    monkeypatch.setattr(Recur, "run", noted)
    session = decoder._open(core, PROMPT, 12, sampling=sampling)
    with torch.no_grad(), watch:
        decoder._run(session)
    assert session.finished and len(ticks) > 12
    return Counter(b - a for a, b in zip(ticks, [*ticks[1:], len(watch.found)]))


SAMPLED = [Sampling(0.8, top_p=0.9), Sampling(0.8, method="rejection")]


@pytest.mark.parametrize("decoder, sampling", [(d, None) for d in DECODERS] + [(DECODERS[i], s) for i in (2, 4, 6, 9) for s in SAMPLED],
                         ids=lambda v: v.label if hasattr(v, "label") else v and v.method)
def test_the_host_reads_once_per_tick_at_most(random_core, host_reads, monkeypatch, decoder, sampling):
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    found = reads_per_tick(decoder, core, host_reads, monkeypatch, sampling)
    most = 2 if isinstance(decoder, Autoregressive) and decoder.exit else 1  # a token that leaves is read only when it has left
    assert max(found) == most and found[1], found


def test_a_block_of_guesses_is_read_when_it_is_whole(random_core, host_reads):
    """Nothing on the host depends on the guesses of the rounds before the last."""
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    session = DASWave(6, 1)._open(core, PROMPT, 24)
    with torch.no_grad(), host_reads:
        DASWave(6, 1)._run(session)
    blocks = len(session.rounds)
    plain = session.counts["readout"] - blocks * 7
    assert len(host_reads.found) == 1 + 2 * blocks + plain  # the prefill's, then guesses and targets of every block


def test_a_second_read_is_seen(random_core, host_reads, monkeypatch):
    """This test can fail: a choice that asks by itself whether the logits are NaN."""
    choose = Session.choose

    def asks(self, logits, read):
        assert not logits.isnan().any()
        return choose(self, logits, read)

    monkeypatch.setattr(Session, "choose", asks)
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    assert max(reads_per_tick(Wavefront(1), core, host_reads, monkeypatch)) == 2
