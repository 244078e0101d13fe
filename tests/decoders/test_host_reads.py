"""The host waits for the device once per tick at most: where it asks which tokens were chosen."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Sampling, Wavefront
from decoders.calls import Recur
from decoders.session import Session

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DECODERS = [Autoregressive(), Autoregressive(exit="state-change:0.01"), Wavefront(1), Wavefront(2, redraft=1), DraftThenVerify(1, 4),
            DraftThenVerify(2, 3, "deep_kv"), DASWave(4, 1), DASWave(3, 2, read="aligned"), DASWave(4, 1, stable=1), LoopSpec(1, 3),
            LoopSpec(1, 2, gate=0.1), PromptLookup(4)]
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.is_nonzero", "aten.unique")


class HostReads(TorchDispatchMode):
    """What made the host wait for a number, call by call: methods of a tensor that give it, operators whose shape depends on it."""

    def __init__(self, patch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._watched(name, getattr(torch.Tensor, name)))

    def _watched(self, name, method):
        def watched(tensor, *args, **kwargs):
            self.found.append(name)
            before = len(self.found)
            out = method(tensor, *args, **kwargs)
            del self.found[before:]  # what it is made of
            return out
        return watched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).rsplit(".", 1)[0] in OPERATORS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def reads_per_tick(decoder, core, monkeypatch, sampling=None, batch=1) -> Counter:
    """How many reads of the host were made in how many ticks, the one before the first included."""
    ticks: list[int] = []
    watch = HostReads(monkeypatch)
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
def test_the_host_reads_once_per_tick_at_most(random_core, monkeypatch, decoder, sampling):
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    found = reads_per_tick(decoder, core, monkeypatch, sampling)
    most = 2 if isinstance(decoder, Autoregressive) and decoder.exit else 1  # a token that leaves is read only when it has left
    assert max(found) == most and found[1], found


def test_a_block_of_guesses_is_read_when_it_is_whole(random_core, monkeypatch):
    """Nothing on the host depends on the guesses of the rounds before the last."""
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    session = DASWave(6, 1)._open(core, PROMPT, 24)
    watch = HostReads(monkeypatch)
    with torch.no_grad(), watch:
        DASWave(6, 1)._run(session)
    blocks = len(session.rounds)
    plain = session.counts["readout"] - blocks * 7
    assert len(watch.found) == 1 + 2 * blocks + plain  # the prefill's, then guesses and targets of every block


def test_a_second_read_is_seen(random_core, monkeypatch):
    """This test can fail: a choice that asks by itself whether the logits are NaN."""
    choose = Session.choose

    def asks(self, logits, read):
        assert not logits.isnan().any()
        return choose(self, logits, read)

    monkeypatch.setattr(Session, "choose", asks)
    core = random_core("huginn", gain=0.3, depth=4, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    assert max(reads_per_tick(Wavefront(1), core, monkeypatch)) == 2
