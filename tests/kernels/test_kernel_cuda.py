"""The compiled kernel on a GPU: as the reference in every number format and size, captured in a graph, and through the decoders."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from decoders import DASWave, LoopSpec, Wavefront
from decoders.ladder import model, runs_on
from loopscope.kernels import RowTables, mixed_depth_attention_twin, write_rows
from loopscope.kernels.mixed_depth import Workspace, mixed_depth_attention, place_rows
from loopscope.kernels.plan import use_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("d_head", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["none", "current", "cells"])
@pytest.mark.parametrize("shared, rows_per_group", [(1, 1), (1, 16), (4, 1), (4, 16)])
def test_the_compiled_kernel_computes_what_the_reference_does(calls, dtype, d_head, kind, shared, rows_per_group):
    for seed, (rows, length) in enumerate([(1, 1), (17, 700), (33, 2049)]):
        call = calls.Call(rows=rows, length=length, d_head=d_head, shared=shared, rows_per_group=rows_per_group, kind=kind, batch=2,
                          foreign=True, window=[None, 300][seed % 2], seed=seed, dtype=dtype)
        assert calls.deviation(call, mixed_depth_attention, "cuda") <= TOLERANCE[dtype], call


def test_a_captured_graph_reads_rewritten_tables():
    """One capture, many contexts: lengths and slots are read on the device."""
    rows, cells, heads, d = 8, 1024, 4, 96
    keys, values = (torch.randn(1, 8, heads, cells, d, device="cuda") for _ in range(2))
    q, k, v, out = (torch.randn(rows, heads, d, device="cuda") for _ in range(4))

    def wave(front: int) -> RowTables:
        at = range(front, front + rows)
        return RowTables.make(at, [p + 1 for p in at], [(front + i) % 8 for i in range(rows)], cell=at, device="cuda")

    tables, workspace = wave(5), Workspace.make(rows, heads, d, cells)

    def step() -> None:
        place_rows(keys, values, tables, k, v)
        mixed_depth_attention(q, keys, values, tables, out=out, workspace=workspace)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for front in (9, 400, 1000, 0):
        tables.copy_(wave(front))
        for tensor in (q, k, v):
            tensor.normal_()
        plain = [keys.clone(), values.clone()]
        graph.replay()
        write_rows(*plain, tables, k, v)
        assert torch.equal(keys, plain[0]) and torch.equal(values, plain[1])
        assert (out - mixed_depth_attention_twin(q, *plain, tables, accumulate=torch.float64)).abs().max() <= 1e-5


def test_cells_beyond_what_32_bits_can_count():
    """A long cache of many depths is longer than 2**31 numbers."""
    cells, d = 1 << 20, 64
    keys = torch.zeros(1, 34, 1, cells, d, device="cuda", dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    values[0, 33, 0, cells - 4 :] = 1.0
    keys[0, 33, 0, cells - 4 :] = 4.0
    q = torch.ones(2, 1, d, device="cuda", dtype=torch.bfloat16)
    ends = dict(position=[cells - 1] * 2, prefix_end=[cells] * 2, prefix_start=[cells - 8] * 2)
    for per_group in (1, 2):
        tables = RowTables.make(**ends, k_slot=[33] * 2, rows_per_group=per_group, device="cuda")
        assert torch.allclose(mixed_depth_attention(q, keys, values, tables), torch.ones_like(q))


@pytest.mark.parametrize("family", ["huginn", "ouro"])
@pytest.mark.parametrize("decoder", [Wavefront(1), DASWave(4, 1), LoopSpec(1, 3)], ids=lambda d: d.label)
def test_decoders_commit_the_same_tokens_by_the_kernel(family, decoder):
    """L1: float32, on today's path and by the kernel."""
    if not runs_on(decoder, family):
        pytest.skip("this family does not run on this decoder")
    core = deepcopy(model(family, 0.5, 0)).float().cuda()
    tokens = {}
    for kernel in ("torch", "triton"):
        with use_kernel(kernel):
            tokens[kernel] = decoder.generate(core, [3, 1, 2], 24, depth=4, seed=1).tokens
    assert tokens["triton"] == tokens["torch"]
