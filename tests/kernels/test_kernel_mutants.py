"""Each rule of the kernel and of its tables, broken on purpose: the comparisons with the reference and with today's plans must notice."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch

from loopscope.kernels import mixed_depth, mixed_depth_attention_twin, tables_of, write_rows
from loopscope.kernels.mixed_depth import mixed_depth_attention
from loopscope.planning import core_plan
from loopscope.random_models import make_random_core
from loopscope.rows import ALIGNED, Chain, Draft, ReadPolicy, Tree, Wave

pytest.importorskip("triton")

# (what is broken, what the source says, what the mutant says): each place where it is said is broken.
SOURCE = (
    ("the ancestor mask is ignored", "seen = tl.load(ancestors + row[:, None] * active + cell[None, :], mask=live[:, None] & inside[None, "
     ":], other=0) != 0", "seen = live[:, None] & inside[None, :]"),
    ("the ancestor mask is ignored, single rows", "seen = seen & (tl.load(ancestors + row * active + cell, mask=seen, other=0) != 0)",
     "seen = seen"),
    ("keys come from the values' slot", "tl.load(k_slots + leader)", "tl.load(v_slots + leader)"),
    ("keys come from the next slot, single rows", "tl.load(k_slots + row)", "(1 - tl.load(k_slots + row))"),
    ("values come from the keys' slot", "tl.load(v_slots + leader)", "tl.load(k_slots + leader)"),
    ("one more of the prefix is read", "(cell[None, :] < end[:, None])", "(cell[None, :] <= end[:, None])"),
    ("one less of the prefix is read, single rows", "tl.minimum(tl.load(prefix_end + row)", "tl.minimum(tl.load(prefix_end + row) - 1"),
    ("the window is ignored", "(cell[None, :] >= start[:, None])", "(cell[None, :] >= 0)"),
    ("the window is ignored, single rows", "tl.maximum(tl.load(prefix_start + row), split * SPAN)", "split * SPAN"),
    ("splits are not brought to one maximum", "rescale = tl.exp2(top - tl.where(highest == float(\"-inf\"), 0.0, highest))\n    norm = "
     "tl.reduce(total * rescale, 0, tl.standard._sum_combine)\n    out = ", "rescale = tl.where(written, 1.0, 0.0)\n    norm = "
     "tl.reduce(total * rescale, 0, tl.standard._sum_combine)\n    out = "),
    ("splits that nobody wrote are merged", "written = of_prefix | ((split >= splits) & (split < TOTAL))", "written = split < TOTAL"),
    ("the running sum is not rescaled", "total = total * keep + tl.reduce(", "total = total + tl.reduce("),
    ("nothing minus nothing is no number", "safe = tl.where(new_top == float(\"-inf\"), 0.0, new_top)", "safe = new_top"),
    ("query heads of a key head are taken for rows", "head = kv_head * SHARED + lane % SHARED", "head = kv_head * SHARED + lane % 1"),
    ("the sequence is ignored", "batch = tl.load(sequence + leader).to(tl.int64)", "batch = tl.load(sequence + leader).to(tl.int64) * 0"),
    ("cells are taken for columns", "cell = tl.load(cells + cell, mask=inside, other=0)", "cell = cell"),
)


def sets(calls):
    common = dict(length=200, slots=2, batch=2, foreign=True, window=150)
    for shared, per_group in ((1, 1), (2, 4)):
        for kind in ("none", "current", "cells"):
            yield calls.Call(rows=4, kv_heads=1, shared=shared, rows_per_group=per_group, kind=kind, seed=3, **common)


def deviations(calls):
    """Of a fixed set of calls, one after another; partial sums that nobody wrote are made visible."""
    for call in sets(calls):
        workspace = mixed_depth.Workspace.make(4, call.shared, 64, 200, call.kind != "none", 128, "cpu")
        for buffer in vars(workspace).values():
            buffer.fill_(7.0)
        yield calls.deviation(call, mixed_depth_attention, span=128, workspace=workspace)


def test_the_fixed_calls_agree(calls):
    assert max(deviations(calls)) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("says, mutant", [pytest.param(*m[1:], id=m[0]) for m in SOURCE])
def test_a_mutant_of_the_kernel_is_noticed(calls, monkeypatch, tmp_path, says, mutant):
    from loopscope.kernels import source

    text = inspect.getsource(source)
    assert text.count(says), "the source no longer says this; write the mutant anew"
    path = tmp_path / "mutated_source.py"
    path.write_text(text.replace(says, mutant))
    spec = importlib.util.spec_from_file_location("mutated_source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels = mixed_depth._Kernels(True, module)
    monkeypatch.setattr(mixed_depth, "_kernels", lambda device: kernels)
    assert any(off > 1e-3 for off in deviations(calls))


# ---- tables -------------------------------------------------------------------------------------------------------------

ROWS = ((Wave(3, (4, 3, 1)), ALIGNED), (Tree((3, 4, 4), (3, 4, 9), ((3,), (3, 4), (3, 9)), (3, 2, 2), 3), ALIGNED),
        (Chain(4, 3, 2), ReadPolicy(4, 4)), (Draft(3, 5, 1, 2), ReadPolicy(4, None)))
BROKEN = {
    "one more of the prefix": lambda t: replace(t, prefix_end=t.prefix_end + 1),
    "one less of the prefix": lambda t: replace(t, prefix_end=t.prefix_end - 1),
    "the next slot": lambda t: replace(t, k_slot=(t.k_slot + 1) % 4),
    "values at the depth of keys": lambda t: replace(t, v_slot=(t.v_slot + 1) % 4),
}
ACTIVE_ONLY = {
    "siblings are read": lambda t: replace(t, ancestors=torch.ones_like(t.ancestors)),
    "active cells at the policy's depth": lambda t: replace(t, k_own=(t.k_own + 1) % 4),
}


def differs(rows, policy, mutant) -> bool:
    core = make_random_core("raven", n_core=1)
    cache = core.make_cache(9, depth=4, spare=2)
    draw = torch.Generator().manual_seed(0)
    for buffer in cache.core[0]:
        buffer.copy_(torch.randn(buffer.shape, generator=draw))
    twin = [t.clone() for t in cache.core[0]]
    q, k, v = (torch.randn(1, rows.count, h, 12, generator=draw, dtype=cache.dtype) for h in (4, 2, 2))
    expected = core_plan(rows, cache, policy).attend(cache.core[0], q, k, v)
    tables = mutant(tables_of(rows, cache, policy))
    write_rows(*twin, tables, k[0], v[0])
    return not torch.allclose(mixed_depth_attention_twin(q[0], *twin, tables), expected[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*BROKEN, *ACTIVE_ONLY])
def test_a_mutant_of_the_tables_is_noticed(name):
    for rows, policy in ROWS:
        assert not differs(rows, policy, lambda t: t)
        if name in BROKEN or isinstance(rows, (Tree, Draft)):
            assert differs(rows, policy, (BROKEN | ACTIVE_ONLY)[name]), rows
