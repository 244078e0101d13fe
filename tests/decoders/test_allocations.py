"""A decode tick makes nothing as large as a prefix: what it reads of the K/V cache it reads in place."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.calls import Recur, advance
from decoders.graphs import Eager, Tapes
from decoders.plain_loop import PlainLoop, _Loop
from decoders.static import Turn, release, run_static

PROMPT = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(0)).tolist()
DECODERS = [Autoregressive(), Wavefront(1), Wavefront(3), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"),
            DASWave(4, 1, read="deep_kv")]


class Large(TorchDispatchMode):
    """Names of the operators that returned memory of their own of at least `size` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, list((kwargs or {}).values())))}
        self.found += [str(func) for t in _tensors(out) if t.numel() >= self.size and t.untyped_storage().data_ptr() not in known]
        return out


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def large(decoder, core, new_tokens=24) -> list[str]:
    """What a decode made that is as large as one layer's keys of the prompt, once it is under way."""
    session = decoder._open(core, PROMPT, new_tokens)
    ticks = advance(session, decoder._steps(session))
    with torch.no_grad():  # not inference mode: there an operator's own parts would not be seen
        for _ in range(3):  # prefill; then what is made once for a sequence, such as its square mask
            next(ticks)
        with Large(core.config.n_kv_heads * len(PROMPT) * core.config.d_head) as watch:
            for _ in ticks:
                pass
    assert session.finished and len(session.new_tokens) == new_tokens
    return watch.found


@pytest.mark.parametrize("family", ["huginn", "ouro", "raven", "parcae", "dory"])  # raven, dory: several query heads to a key head
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.label)
def test_no_tick_copies_a_prefix(random_core, family, decoder):
    core = random_core(family, gain=0.3, depth=4, n_core=2, context=1024, dtype=torch.float32)
    assert large(decoder, core) == []


def test_a_loop_that_copies_its_prefix_is_seen(random_core):
    """The plain loop does so at every token, keys and values of every layer and depth: this test can fail."""
    core = random_core("huginn", gain=0.3, depth=4, n_core=2, n_prelude=1, n_coda=1, context=1024, dtype=torch.float32)
    loop = _Loop(core, 4)
    with torch.no_grad():
        loop.step(torch.tensor([PROMPT]), 0, 0, None)
        with Large(core.config.n_kv_heads * len(PROMPT) * core.config.d_head) as watch:
            loop.step(torch.tensor([[5]]), len(PROMPT), 0, None)
    assert watch.found == ["aten.cat.default"] * 2 * (2 * 4 + 2)
    assert PlainLoop().generate(core, PROMPT, max_new_tokens=2, depth=4).calls.recur == 4


def test_only_an_irregular_wave_gathers(random_core):
    """Lanes that a re-draft left at uneven depths cannot be one strided view (docs/design.md)."""
    core = random_core("huginn", gain=0.6, depth=9, n_core=1, n_prelude=0, n_coda=0, context=1024, dtype=torch.float32)
    assert set(large(Wavefront(1, redraft=2), core)) == {"aten.index_select.default"}


@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1), DASWave(4, 1)], ids=lambda d: d.label)
@pytest.mark.parametrize("runner", [Eager, Tapes])
def test_no_static_turn_copies_a_prefix(random_core, monkeypatch, decoder, runner):
    core = random_core("raven", gain=0.3, depth=4, n_core=1, context=1024, dtype=torch.float32)
    size, opened, watch = core.config.n_kv_heads * len(PROMPT) * core.config.d_head, Turn.open, []

    def open_then_watch(self, session):
        opened(self, session)
        session.cache.causal(0, 1)  # its square mask, made once for a sequence
        watch.append(Large(size))
        watch[0].__enter__()

    monkeypatch.setattr(Turn, "open", open_then_watch)
    session = decoder._open(core, PROMPT, 12)
    with torch.no_grad():
        try:
            run_static(decoder, session, lambda: deque(advance(session, session.prefill()), maxlen=0), runner())
        finally:
            watch[0].__exit__(None, None, None)
    assert session.finished and watch[0].found == []
    release(core)


class Counted(TorchDispatchMode):
    """How many operators ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("decoder", [Wavefront(1), DraftThenVerify(1, 5), DASWave(4, 1)], ids=lambda d: d.label)
def test_a_tick_runs_as_many_operators_whatever_its_rows(random_core, monkeypatch, decoder):
    """No loop over rows, neither in Python nor in launches: only one row alone attends in a way of its own."""
    core = random_core("huginn", gain=0.1, depth=8, n_core=1, n_prelude=1, n_coda=1, dtype=torch.float32)
    seen: dict[int, set[int]] = {}
    run, watch = Recur.run, Counted()

    def counted(self):
        before = watch.count
        out = run(self)
        if self.session.cache.length:  # the prompt is there
            seen.setdefault(self.rows.count, set()).add(watch.count - before)
        return out

    monkeypatch.setattr(Recur, "run", counted)
    with torch.no_grad(), watch:
        decoder._run(decoder._open(core, PROMPT[:9], 24))
    fewest = {n: min(counts) for n, counts in seen.items() if n > 1}  # without what a sequence or a token makes once: masks, angles
    # A view or two may come free; a loop would add some for each of up to 8 rows.
    assert len(fewest) > 2 and max(fewest.values()) - min(fewest.values()) <= 2, seen


def test_a_static_turn_runs_as_many_operators_whatever_its_rows(random_core):
    core = random_core("huginn", gain=0.1, depth=16, n_core=1, n_prelude=1, n_coda=1)
    tapes, decoder = Tapes(128), Wavefront(1)
    with torch.inference_mode():
        decoder._run(decoder._open(core, PROMPT[:9], 24), static=True, runner=tapes, lag=0)
    steps = {rows: len(tape.steps) for (rows, _), tape in tapes.made.items()}
    assert {2, 4, 8} <= set(steps) and steps[2] == steps[4] == steps[8], steps
    release(core)
