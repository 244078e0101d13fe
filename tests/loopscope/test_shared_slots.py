"""Shared K/V slots and rows that stop early, against caches that are dictionaries: every write and lookup spelled out."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from loopscope.cache import DepthCache
from loopscope.errors import ContextError, DepthError, SettingError
from loopscope.random_models import make_random_core
from loopscope.rows import Chain, Wave

FAMILIES = ("huginn", "ouro", "raven", "parcae", "dory", "hrm_text")
DEPTH, PROMPT, LENGTH = 5, 6, 10


class Cells:
    """The core's K/V of one sequence: per layer, {(class of depth, position): (k, v)}; the last write stays.

    A reader looks up its own class of every position, or, where that was never written, the nearest one below it
    (Huginn's lookup strategy "latest").
    """

    def __init__(self, slots: int, layers: int) -> None:
        self.core, self.slots = [{} for _ in range(layers)], slots
        self.prelude = self.coda = None
        self.length = 0

    def key(self, depth: int) -> int:
        return (depth - 1) % self.slots


class PlainPlan:
    """Rows of one sequence at any positions and depths: all are written, then each reads what lies at and before it."""

    def __init__(self, rows, cells: Cells) -> None:
        self.at, self.depths, self.cells, self.window = rows.positions, rows.depths, cells, None

    def rotary(self, table):
        return table[self.at]

    def windowed(self, window):
        other = copy.copy(self)
        other.window = window
        return other

    def attend(self, written, q, k, v, pattern=None):
        keys = [self.cells.key(r) for r in self.depths]
        for i, (key, position) in enumerate(zip(keys, self.at)):
            written[key, position] = k[0, i], v[0, i]
        out = []
        for i, (key, position) in enumerate(zip(keys, self.at)):
            first = 0 if self.window is None else max(0, position - self.window + 1)
            seen = [written[next(c for c in range(key, -1, -1) if (c, p) in written), p] for p in range(first, position + 1)]
            ks, vs = (torch.stack([pair[j] for pair in seen]).repeat_interleave(q.shape[2] // k.shape[2], 1) for j in (0, 1))
            weights = (torch.einsum("hd,phd->hp", q[0, i], ks) / q.shape[-1] ** 0.5).softmax(-1)
            out.append(torch.einsum("hp,phd->hd", weights, vs))
        return torch.stack(out)[None]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """A pass that is given Cells as its cache runs PlainPlans, in whatever way its family wires its layers."""
    for name in ("looped", "parcae", "hrm_text"):
        module = importlib.import_module(f"loopscope.models.{name}")
        real = module.core_plan
        monkeypatch.setattr(module, "core_plan", lambda rows, cache, *rest, real=real:
                            PlainPlan(rows, cache) if isinstance(cache, Cells) else real(rows, cache, *rest))


def spelled_out(core, tokens, prompt: int, depths: list[int], slots: int):
    """Logits [n, vocab] of a prompt in one chunk, computed unshared, then of one position at a time, depths[p] recurrences at p."""
    x = core.embed(tokens[None])
    start = core.start(x)
    layers = core.config.n_core * (1 + core.config.inner_cycles)
    cells, states = Cells(slots, layers), []
    unshared = Cells(max(depths), layers)
    state = start[:, :prompt]
    for r in range(1, depths[0] + 1):
        state = core.recur(state, x[:, :prompt], Chain(0, prompt, r), unshared)
        for layer in range(layers):  # of each class the deepest recurrence stays
            for p in range(prompt):
                cells.core[layer][cells.key(r), p] = unshared.core[layer][unshared.key(r), p]
    states.append(state)
    for p in range(prompt, len(tokens)):
        state = start[:, p : p + 1]
        for r in range(1, depths[p] + 1):
            state = core.recur(state, x[:, p : p + 1], Chain(p, 1, r), cells)
        states.append(state)
    return core.read(torch.cat(states, 1))[0], cells


def cached(core, tokens, prompt: int, depths: list[int], slots: int | None):
    """The same through a DepthCache."""
    cache = core.make_cache(len(tokens), max(depths), slots=slots)
    out = [core(tokens[:prompt], depth=depths[0], cache=cache)]
    cache.fill_deeper(range(prompt), depths[0])
    for p in range(prompt, len(tokens)):
        out.append(core(tokens[p : p + 1], depth=depths[p], cache=cache))
        cache.fill_deeper([p], depths[p])
    return torch.cat(out, 1)[0], cache


def same_cells(cache: DepthCache, cells: Cells, depths) -> None:
    for layer, written in enumerate(cells.core):
        for r in depths:
            for p in range(cache.length):
                k, v = written[next(c for c in range(cells.key(r), -1, -1) if (c, p) in written), p]
                close(cache.keys(layer, r)[0, :, p], k)
                close(cache.values(layer, r)[0, :, p], v)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def core(request):
    return make_random_core(request.param, gain=0.5, seed=2)


TOKENS = torch.arange(20, 20 + LENGTH)


# ---- depths that share slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, DEPTH])
@torch.inference_mode()
def test_a_prompt_in_one_chunk_is_computed_unshared_and_each_slot_keeps_its_deepest_recurrence(core, slots):
    depths = [DEPTH] * LENGTH
    want, cells = spelled_out(core, TOKENS, PROMPT, depths, slots)
    got, cache = cached(core, TOKENS, PROMPT, depths, slots)
    close(got, want)
    close(got[:PROMPT], core(TOKENS[:PROMPT], depth=DEPTH)[0])
    same_cells(cache, cells, range(1, DEPTH + 1))
    assert cache.core[0][0].shape[1] == slots
    unshared = core(TOKENS, depth=DEPTH)[0]
    assert torch.allclose(got, unshared, atol=1e-9) == (slots == DEPTH)


@torch.inference_mode()
def test_without_a_number_of_slots_the_model_decides(core):
    assert core.make_cache(4, DEPTH).slots == DEPTH
    last_loop = make_random_core("dory", kv_slots=1)
    assert last_loop.make_cache(4, DEPTH).slots == 1 and last_loop.make_cache(4, DEPTH, slots=2).slots == 2


@pytest.mark.parametrize("slots", [0, -1, DEPTH + 1, True, 1.0])
def test_a_number_of_slots_that_cannot_be_is_refused(core, slots):
    with pytest.raises(SettingError, match=rf"slots must be a whole number from 1.* to the cache's depth of {DEPTH}.*{slots}"):
        core.make_cache(4, DEPTH, slots=slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("depths", [(6, 5, 4, 3), (6, 4, 2, 1), (6, 3), (5, 2), (4, 3, 2), (6, 5, 3, 3, 1), (2, 2), (1, 4)])
@torch.inference_mode()
def test_rows_of_a_wave_that_share_a_slot_read_each_others_latest_write(depths, slots):
    core = make_random_core("huginn", gain=0.5, seed=3, n_kv_heads=2)
    tokens, n = torch.arange(PROMPT + len(depths)), len(depths)
    cache, cells = core.make_cache(PROMPT + n, 6, slots=slots), Cells(slots, core.config.n_core)
    x = core.embed(tokens[None])
    state = start = core.start(x)
    for r in range(1, 7):  # every cell holds something, as behind rejected drafts
        state = core.recur(state, x, Chain(0, PROMPT + n, r), cache)
    for layer, (k, v) in enumerate(cache.core):
        cells.core[layer] = {((-slot - 1) % slots, p): (k[0, slot, :, p].clone(), v[0, slot, :, p].clone())
                             for slot in range(slots) for p in range(PROMPT + n)}
    state = start[:, PROMPT:]
    for tick in range(2):  # in the second tick rows also read what others wrote in the first
        rows = Wave(PROMPT, tuple(min(6, r + tick) for r in depths))
        ours, theirs = core.recur(state, x[:, PROMPT:], rows, cache), core.recur(state, x[:, PROMPT:], rows, cells)
        close(ours, theirs)
        state = ours


# ---- rows that stop early ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 1, 2, 3])
@torch.inference_mode()
def test_a_row_that_stopped_early_is_read_at_the_latest_depth_it_has(core, slots):
    depths = [3] * PROMPT + [5, 1, 2, 4]
    want, cells = spelled_out(core, TOKENS, PROMPT, depths, slots or DEPTH)
    got, cache = cached(core, TOKENS, PROMPT, depths, slots)
    close(got, want)
    same_cells(cache, cells, range(1, DEPTH + 1))


@torch.inference_mode()
def test_rows_of_a_batch_may_stop_at_depths_of_their_own(core):
    tokens = torch.stack((TOKENS, TOKENS + 50))
    cache = core.make_cache(LENGTH, DEPTH, batch=2)
    core(tokens, depth=DEPTH, cache=cache)
    before = cache.clone()
    stops = torch.tensor([[2, 5, 1], [4, 3, 5]])
    cache.fill_deeper([1, 4, 8], stops)
    for layer in range(len(cache.core)):
        for r in range(1, DEPTH + 1):
            for b in range(2):
                for p in range(LENGTH):
                    own = min(r, int(stops[b, [1, 4, 8].index(p)])) if p in (1, 4, 8) else r
                    assert torch.equal(cache.keys(layer, r)[b, :, p], before.keys(layer, own)[b, :, p])
                    assert torch.equal(cache.values(layer, r)[b, :, p], before.values(layer, own)[b, :, p])


def test_positions_and_depths_outside_the_cache_are_refused(core):
    cache = core.make_cache(4, 3)
    with pytest.raises(DepthError, match="depth 4 is outside the cache, which holds depths 1 to 3"):
        cache.fill_deeper([0], 4)
    with pytest.raises(DepthError, match="depth 0"):
        cache.fill_deeper([0, 1], torch.tensor([[2, 0]]))
    with pytest.raises(ContextError, match="position 4 is beyond the cache"):
        cache.fill_deeper([1, 4], 2)
