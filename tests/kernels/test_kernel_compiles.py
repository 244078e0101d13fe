"""The kernel compiles for a GPU where there is none: Triton brings an assembler, and it needs no device to say what it thinks."""

from __future__ import annotations

import pytest
import torch

from loopscope.kernels import mixed_depth
from loopscope.kernels.mixed_depth import mixed_depth_attention, place_rows

triton = pytest.importorskip("triton")
HOPPER, SHARED_MEMORY = ("cuda", 90, 32), 227 * 1024  # bytes that one program may use there
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.uint8: "*u8"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """(kernel, arguments, keywords) of every launch, which is not made."""
    made = []

    class Recorded:
        def __init__(self, name=""):
            self.name = name

        def __getattr__(self, name):
            return Recorded(name)

        def __getitem__(self, grid):
            return lambda *args, **kwargs: made.append((self.name, args, kwargs))

    monkeypatch.setattr(mixed_depth, "_kernels", lambda device: Recorded())
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return made


def compiled(name, args, kwargs):
    """What the launch would compile, as Triton's launcher reads its arguments, for a Hopper GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loopscope.kernels import source

    kernel = triton.JITFunction(getattr(source, name))
    given = dict(zip(kernel.arg_names, args)) | {key: value for key, value in kwargs.items() if key not in OPTIONS}
    if "WIDEN" in given:
        given["WIDEN"] = False  # for the interpreter only
    constant = {p.name for p in kernel.params if p.is_constexpr}
    signature, divisible = {}, {}
    for i, parameter in enumerate(kernel.arg_names):
        value = given[parameter]
        if parameter in constant:
            signature[parameter] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[parameter], divisible[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value and value % 16 == 0:
                divisible[(i,)] = [["tt.divisibility", 16]]
    built = ASTSource(kernel, signature, {p: given[p] for p in constant}, divisible)
    return triton.compile(built, target=GPUTarget(*HOPPER), options={key: kwargs[key] for key in OPTIONS if key in kwargs})


def check(launches):
    for launch in launches:
        made = compiled(*launch)
        assert made.asm["cubin"] and made.metadata.shared <= SHARED_MEMORY, (launch[0], launch[2])
    return [name for name, _, _ in launches]


def test_a_wave_and_a_tree_compile(calls, launches):
    wave = calls.numbers(calls.Call(rows=4, length=300, d_head=96, rows_per_group=1, dtype=torch.bfloat16))
    mixed_depth_attention(wave.q, wave.keys, wave.values, wave.tables)
    tree = calls.numbers(calls.Call(rows=4, length=300, d_head=128, shared=4, kind="cells", dtype=torch.bfloat16))
    mixed_depth_attention(tree.q, tree.keys, tree.values, tree.tables)
    written = calls.numbers(calls.Call(rows=2, length=9)).tables
    written = type(written)(**vars(written) | {"cell": written.position})
    place_rows(wave.keys, wave.values, written, wave.q, wave.q)
    assert check(launches) == ["attend_split_alone", "merge_splits", "attend_split", "attend_split", "merge_splits", "place_rows"]


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared, rows_per_group", [(1, 1), (1, 16), (4, 1), (4, 16), (8, 16)])
def test_every_size_and_number_format_compiles(calls, launches, dtype, d_head, shared, rows_per_group):
    made = calls.numbers(calls.Call(rows=16, length=300, d_head=d_head, kv_heads=1, shared=shared, rows_per_group=rows_per_group, slots=1,
                                    kind="current", dtype=dtype))
    mixed_depth_attention(made.q, made.keys, made.values, made.tables, *made.current)
    check(launches)
