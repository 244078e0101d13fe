"""What is measured at forced acceptance on models of published sizes: real calls, counted bytes, random weights made from a seed."""

import pytest
import torch

from decoders import Autoregressive, DraftThenVerify, Wavefront
from decoders.forced import Forced
from decoders.forced_speed import behind
from decoders.roofline import bandwidth, traffic
from loopscope.errors import SettingError
from loopscope.full_size import SIZES, full_size, laid_out


def test_published_sizes_have_the_published_number_of_parameters():
    for name, expected in (("Ouro-1.4B", 1434652673), ("Ouro-2.6B", 2667974657), ("Huginn-3.5B", 3564976800)):
        core = laid_out(name)
        assert core.family == SIZES[name][0] and sum(p.numel() for p in core.parameters()) == expected


def test_weights_are_a_function_of_the_seed():
    a, b, c = (full_size("Huginn-3.5B", toy=True, seed=s, context=64).wte.weight for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(SettingError, match="did you mean 'Huginn-3.5B'"):
        full_size("Huginn-3B")


@pytest.mark.parametrize("name", SIZES)
def test_a_token_reads_the_weights_of_its_calls_and_its_context(name):
    """Counted by hand: every parameter but the embedding once, the core T times; K and V of every layer and depth."""
    core = full_size(name, toy=True, dtype=torch.float32, context=64)
    c = core.config
    blocks = sum(p.numel() for n, p in core.named_parameters() if n.startswith(("blocks.", "adapter.", "norm.", "gate.", "exit")))
    outer = sum(p.numel() for n, p in core.named_parameters() if n.startswith(("prelude.", "coda.")))
    head = c.vocab_size * c.d_model
    total = sum(p.numel() for p in core.parameters())
    assert blocks + outer + head * (1 if c.tied else 2) == total
    found = traffic(core, 10)
    assert (found.core, found.outer) == (4 * blocks, 4 * (outer + head))
    assert found.kv == 10 * 2 * c.n_kv_heads * c.d_head * 4 * (c.n_prelude + c.n_coda + c.depth * c.n_core)
    assert found.token(c.depth) == c.depth * found.core + found.outer + found.kv
    assert found.decode(3 * c.depth, 3, c.depth) == pytest.approx(3 * found.token(c.depth))


@pytest.mark.parametrize("decoder", [Autoregressive(), Forced(Wavefront(1), 0.7)], ids=lambda d: d.label)
def test_a_decode_behind_a_given_prefix_is_one_behind_a_read_prompt_but_for_the_prefill(decoder):
    core = full_size("Huginn-3.5B", toy=True, dtype=torch.float32, context=64)
    got, inside = behind(core, decoder, 20, 12, seed=3)
    prompt = torch.randint(0, core.config.vocab_size, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    read = decoder.generate(core, prompt, 12, seed=3)
    assert len(got.tokens) == 12 and got.prompt_length == 20
    if not isinstance(decoder, Autoregressive):  # what coins decide does not depend on the prefix
        assert got.calls == read.calls and got.accepted == read.accepted
    else:
        assert got.calls.recur == 11 * 32
    assert set(inside) == {"recur", "embed", "read"} and 0 < sum(inside.values()) < got.seconds.decode
    assert not any(name in vars(core) for name in inside)  # the watch is taken off again


def test_bandwidth_is_bytes_over_seconds(monkeypatch):
    monkeypatch.setattr("decoders.roofline._READ", 64 * 4096)
    ticks = iter(range(1000))
    monkeypatch.setattr("decoders.roofline.time.perf_counter", lambda: 0.5 * next(ticks))
    assert bandwidth("cpu") == 4096 * 4 / 0.5


def test_a_static_decode_behind_a_prefix_is_the_same_but_for_its_clock():
    core = full_size("Huginn-3.5B", toy=True, dtype=torch.float64, context=64)
    decoder = Forced(Wavefront(1), 0.7)
    (static, inside), (eager, _) = behind(core, decoder, 20, 12, static=True), behind(core, decoder, 20, 12)
    assert not inside and (static.tokens, static.calls, static.accepted) == (eager.tokens, eager.calls, eager.accepted)
    assert behind(core, DraftThenVerify(1, 4), 20, 6, static=True)[1]  # it has no static turn
