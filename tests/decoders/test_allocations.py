"""A decode tick makes nothing as large as a prefix: what it reads of the K/V cache it reads in place."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.calls import advance
from decoders.plain_loop import PlainLoop, _Loop

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
