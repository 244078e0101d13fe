"""Memory is predicted before it is taken, exactly for keys and values; what does not fit is refused, with what would."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from decoders import Autoregressive
from decoders.calls import advance
from loopscope import memory
from loopscope.cli.app import app
from loopscope.errors import OutOfMemoryError, SettingError
from loopscope.memory import check_room, kv_bytes, memory_needed
from loopscope.random_models import FAMILIES, make_random_core


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [None, 1, 2])
def test_keys_and_values_take_what_was_predicted(family, slots):
    core = make_random_core(family, depth=3, dtype=torch.float32)
    cache = core.make_cache(17, 3, batch=2, slots=slots)
    taken = sum(b.nbytes for part in (cache.prelude, cache.core, cache.coda) for pair in part for b in pair)
    assert taken == kv_bytes(core.config, 17, batch=2, slots=slots, depth=3, dtype=torch.float32)
    assert memory_needed(core.config, 17, 10, batch=2, slots=slots, depth=3, dtype=torch.float32).kv == taken


def test_what_does_not_fit_is_refused_before_it_is_taken(monkeypatch):
    core = make_random_core("huginn", depth=8, dtype=torch.float32, context=2048)
    each = kv_bytes(core.config, 1, dtype=torch.float32)
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "available", lambda device: 1000 * each)
    monkeypatch.setattr(torch, "zeros", None)  # nothing may be allocated
    with pytest.raises(OutOfMemoryError, match=r"2,000 positions.*1,000 positions; all 2,000 with \d shared.*; all 2,000 in bfloat16$"):
        core.make_cache(2000)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "available", lambda device: 1000 * each)
    assert core.make_cache(1000).capacity == 1000
    with pytest.raises(OutOfMemoryError, match="a batch of 3"):
        core.make_cache(300, batch=4)
    with pytest.raises(OutOfMemoryError):
        Autoregressive().generate(core, list(range(200)), max_new_tokens=900)


def test_what_the_message_says_would_fit_does_fit():
    config = make_random_core("ouro", depth=4).config
    room = 50.5 * kv_bytes(config, 1, dtype=torch.float32)
    with pytest.raises(OutOfMemoryError) as raised:
        check_room(config, 120, dtype=torch.float32, room=room)
    assert "would fit: 50 positions; all 120 with 1 shared slot (slots=1, approximate)" in str(raised.value)
    check_room(config, 50, dtype=torch.float32, room=room)
    check_room(config, 120, slots=1, dtype=torch.float32, room=room)
    with pytest.raises(OutOfMemoryError):
        check_room(config, 51, dtype=torch.float32, room=room)


def test_caches_that_fit_one_by_one_but_not_together_are_refused(monkeypatch):
    core = make_random_core("huginn", depth=4, dtype=torch.float32)
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "available", lambda device: 50 * kv_bytes(core.config, 1, dtype=torch.float32))
    assert len(Autoregressive().generate_batch(core, [[1] * 20, [2] * 20], 5)) == 2
    with pytest.raises(OutOfMemoryError, match="72 positions"):
        Autoregressive().generate_batch(core, [[1] * 20, [2] * 20, [3] * 20], 5)


@pytest.mark.parametrize("positions, room", [(0, 10), (5, float("nan")), (5, -1)])
def test_what_is_no_number_of_positions_or_bytes_is_refused(positions, room):
    with pytest.raises(SettingError, match="positions must be at least 1 and room a number of bytes"):
        check_room(make_random_core("ouro").config, positions, room=room)


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() == memory._free() or memory.available() > 2**20


@pytest.mark.parametrize("positions", [400, 3000])
def test_what_calls_make_is_near_what_was_predicted(positions):
    """Live tensors while a prompt is read, followed operator by operator."""
    core = make_random_core("huginn", dtype=torch.float32, d_model=96, n_heads=3, d_mlp=256, n_core=1, depth=2, context=4096)
    session = Autoregressive()._open(core, list(range(256)) * (positions // 256) + list(range(positions % 256)), 2)
    with torch.no_grad(), Live() as live:
        for _ in advance(session, session.prefill()):
            pass
    predicted = memory_needed(core.config, positions, dtype=torch.float32).working
    assert 0.5 < live.peak / predicted < 1.2


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and nobody has let go yet, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}  # views are nobody's
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.seen | given:
                storage = t.untyped_storage()
                self.seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return out

    def _gone(self, pointer: int, nbytes: int) -> None:
        self.seen.discard(pointer)
        self.now -= nbytes


def test_inspect_says_what_a_context_takes():
    result = CliRunner().invoke(app, ["inspect", "tiny-huginn", "--context", "512", "--dtype", "float32"])
    assert result.exit_code == 0, result.stderr
    assert "memory at 512 positions, float32" in result.stdout and "4 shared slots, approximate" in result.stdout
    assert "34,816 bytes per token in float32" in result.stdout and "0.00" not in result.stdout
    beyond = CliRunner().invoke(app, ["inspect", "tiny-huginn", "--context", "99999999"])
    assert beyond.exit_code == 2 and "this model's context is" in beyond.stderr
