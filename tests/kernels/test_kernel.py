"""The Triton kernel, run by Triton's interpreter, computes what the plain reference does, over everything that a row may read."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import Wavefront
from loopscope.errors import SettingError
from loopscope.kernels import RowTables, mixed_depth, write_rows
from loopscope.kernels.mixed_depth import Workspace, mixed_depth_attention, place_rows
from loopscope.kernels.plan import use_kernel
from loopscope.random_models import make_random_core

pytest.importorskip("triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
draws = {
    "rows": st.integers(1, 33), "length": st.integers(1, 257), "d_head": st.sampled_from([64, 96, 128, 256]), "kv_heads": st.integers(1, 2),
    "shared": st.sampled_from([1, 1, 2, 3, 4]), "slots": st.integers(1, 5), "batch": st.integers(1, 2),
    "kind": st.sampled_from(["none", "current", "cells"]), "active": st.integers(1, 40), "foreign": st.booleans(),
    "window": st.one_of(st.none(), st.none(), st.integers(1, 100)), "rows_per_group": st.sampled_from([None, None, 1, 4]),
    "seed": st.integers(0, 2**31)}
spans = st.sampled_from([64, 128, 192, 320])  # cells per split: 1 to 5 splits
quiet = dict(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def held(calls, dtype, span, drawn):
    call = calls.Call(dtype=dtype, **drawn)
    off = calls.deviation(call, mixed_depth_attention, span=span)
    assert off <= TOLERANCE[dtype], f"{call} in splits of {span}: off by {off:.2g}"


@settings(max_examples=24, **quiet)
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), span=spans, drawn=st.fixed_dictionaries(draws))
def test_the_kernel_computes_what_the_reference_does(calls, dtype, span, drawn):
    held(calls, dtype, span, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_kernel_computes_what_the_reference_does_in_many_draws(calls, dtype):
    @settings(max_examples=200, **quiet)
    @given(span=spans, drawn=st.fixed_dictionaries(draws))
    def run(span, drawn):
        held(calls, dtype, span, drawn)

    run()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shared, rows_per_group", [(1, 1), (2, 4)])
@pytest.mark.parametrize("kind", ["none", "current", "cells"])
def test_both_kernels_in_every_number_format(calls, dtype, shared, rows_per_group, kind):
    held(calls, dtype, 64, dict(rows=3, length=130, kv_heads=1, shared=shared, rows_per_group=rows_per_group, kind=kind, foreign=True))


@pytest.mark.parametrize("shared", [1, 2])
def test_a_row_that_reads_nothing_gives_zeros_and_disturbs_nobody(shared):
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 1, 70, 64, generator=draw) for _ in range(2))
    q = torch.randn(3, shared, 64, generator=draw)
    tables = RowTables.make([0, 5, 0], [0, 6, 0], [1, 1, 0], ancestors=torch.zeros(3, 4, dtype=torch.bool), cells=[0, 1, 2, 3])
    z = mixed_depth_attention(q, keys, values, tables)
    assert z[[0, 2]].eq(0).all() and z[1].ne(0).all()
    bare = RowTables.make([0, 5, 0], [0, 6, 0], [1, 1, 0])
    for bound, span in ((70, None), (70, 64)):  # one split, and two
        assert mixed_depth_attention(q, keys, values, bare, bound=bound, span=span)[[0, 2]].eq(0).all()


@pytest.mark.parametrize("rows_per_group, shared", [(1, 1), (4, 1), (1, 2)])
def test_a_rows_numbers_do_not_depend_on_its_neighbours(calls, rows_per_group, shared):
    """What makes tokens equal in bf16 between a decoder and autoregressive decoding padded to its rows."""
    call = calls.Call(rows=6, length=150, slots=1, kv_heads=1, shared=shared, rows_per_group=rows_per_group, dtype=torch.bfloat16)
    made = calls.numbers(call)
    whole = mixed_depth_attention(made.q, made.keys, made.values, made.tables, span=64)
    for row in range(6):
        end = [int(made.tables.prefix_end[row])]
        alone = RowTables.make(end, end, [0], rows_per_group=rows_per_group)
        assert torch.equal(whole[row], mixed_depth_attention(made.q[row : row + 1], made.keys, made.values, alone, span=64)[0])


def test_placing_rows_is_writing_them():
    draw = torch.Generator().manual_seed(0)
    caches = [[torch.zeros(2, 3, 2, 9, 12) for _ in range(2)] for _ in range(2)]
    k, v = (torch.randn(4, 5, 12, generator=draw)[:, 1:3] for _ in range(2))
    tables = RowTables.make([3, 4, 5, 3], [4, 5, 6, 4], [0, 1, 2, 1], [2, 1, 0, 1], sequence=[0, 0, 1, 1], k_own=[1, 1, 2, 0],
                            v_own=[0, 2, 2, 1], cell=[3, 8, 5, 0])
    place_rows(*caches[0], tables, k, v)
    write_rows(*caches[1], tables, k, v)
    assert all(torch.equal(a, b) for a, b in zip(*caches))
    assert torch.equal(caches[0][0][1, 2, :, 5], k[2]) and torch.equal(caches[0][1][1, 1, :, 0], v[3])
    assert sum(int(c.ne(0).sum()) for c in caches[0]) == 2 * 4 * 2 * 12
    unwritten = [torch.zeros(2, 3, 2, 9, 12) for _ in range(2)]
    place_rows(*unwritten, RowTables.make([3], [4], [0]), k, v)
    assert not any(c.any() for c in unwritten)


class _Watched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["none", "current", "cells"])
def test_a_call_with_its_buffers_given_allocates_nothing_and_looks_at_no_number(calls, monkeypatch, kind):
    """So that it can be captured in a graph: all that is left for torch to do is views."""
    made = calls.numbers(calls.Call(rows=4, length=200, kind=kind))
    launched = []

    class Recorded:
        def __getattr__(self, name):
            return self

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append(grid)

    monkeypatch.setattr(mixed_depth, "_kernels", lambda device: Recorded())
    workspace = Workspace.make(4, 2, 64, 200, kind != "none", device="cpu")
    out = torch.empty_like(made.q)
    with _Watched() as watched:
        z = mixed_depth_attention(made.q, made.keys, made.values, made.tables, *made.current, out=out, workspace=workspace)
    assert z is out
    assert {str(f).split(".")[1] for f in watched.ran} <= {"view", "detach", "transpose", "unsqueeze", "as_strided"}, watched.ran
    lines = made.tables.groups.shape[0]
    assert launched == [(lines, 2, 2)] + [(lines, 2, 1)] * (kind != "none") + [(4, 2)]


@pytest.mark.parametrize("change, says", [
    (dict(q=torch.zeros(2, 2, 8, dtype=torch.float64)), "LOOPSCOPE_KERNEL=torch"),
    (dict(q=torch.zeros(2, 3, 8)), "multiple of kv_heads"),
    (dict(q=torch.zeros(3, 2, 8)), "row tables of 2"),
    (dict(q=torch.zeros(2, 8, 2).transpose(1, 2)), "next to each other"),
    (dict(k_active=torch.zeros(1, 2, 8)), "k_active must hold as many, got 1 rows"),
    (dict(v_active=None), "v_active must hold as many, got none"),
    (dict(v_active=torch.zeros(3, 2, 9)), r"\[3, 2, 8\]"),
    (dict(workspace=Workspace.make(2, 2, 8, 300, False, device="cpu")), "Workspace.make"),
])
def test_what_does_not_fit_is_refused(change, says):
    tables = RowTables.make([1, 2], [2, 3], [0, 0], ancestors=torch.ones(2, 3, dtype=torch.bool))
    cache = torch.zeros(1, 1, 2, 9, 8)
    fitting = dict(q=torch.zeros(2, 2, 8), keys=cache, values=cache, tables=tables, k_active=torch.zeros(3, 2, 8),
                   v_active=torch.zeros(3, 2, 8))
    assert mixed_depth_attention(*fitting.values()).shape == (2, 2, 8)
    given = {**fitting, **change}
    with pytest.raises(SettingError, match=says):
        mixed_depth_attention(given.pop("q"), **given)


def test_a_wavefront_commits_the_same_tokens_by_the_kernel(monkeypatch):
    """float32, prelude, core and coda through the interpreted kernel, the wave's rows in their own slots."""
    core = make_random_core("raven", gain=0.3, dtype=torch.float32, n_prelude=1, n_core=1, n_coda=1)
    plain = Wavefront(1).generate(core, [3, 1, 2], 6, depth=3, seed=1).tokens
    launches = []

    def counted(q, *args, **more):
        launches.append(len(q))
        return mixed_depth_attention(q, *args, **more)

    monkeypatch.setattr("loopscope.kernels.plan.mixed_depth_attention", counted)
    with use_kernel("interpret"):
        assert Wavefront(1).generate(core, [3, 1, 2], 6, depth=3, seed=1).tokens == plain
    assert max(launches) > 1 and len(launches) > 10


def test_everything_but_the_kernel_runs_without_triton(tmp_path):
    """A machine without triton decodes; asking for the kernel there says what is missing."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from decoders import Wavefront
        from loopscope.errors import SettingError
        from loopscope.kernels.plan import use_kernel
        from loopscope.random_models import make_random_core
        core = make_random_core("ouro", dtype=torch.float32, n_core=1)
        print(len(Wavefront(1).generate(core, [1, 2], 3, depth=2).tokens))
        with use_kernel("interpret"):
            try:
                Wavefront(1).generate(core, [1, 2], 3, depth=2)
            except SettingError as error:
                print(error)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("3\nthe mixed-depth kernel needs triton, which cannot be imported here")
