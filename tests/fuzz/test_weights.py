"""Weight files, spoiled in header, length and data: read, or refused in our own words, never more taken than the file holds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loopscope.models.loading import check_tensors, load_core
from loopscope.models.tensors import INDEX, open_tensors
from loopscope.random_models import make_random_core

SEEDS = st.integers(0, 2**48)
CPU = torch.device("cpu")


def small_file() -> tuple[dict, bytes]:
    """(header, data) of a safetensors file with four tensors."""
    tensors = {"a.weight": ("F32", [2, 3]), "b.weight": ("BF16", [4]), "c": ("F16", [1, 2, 2]), "scale": ("F64", [])}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (kind, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}[kind] * torch.Size(shape).numel()
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, bytes(range(at))


def packed(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def read_all(folder: Path) -> int:
    """Open a folder and load every tensor; how many there are."""
    stored = open_tensors(folder)
    for tensor in stored.values():
        assert tensor.nbytes <= 10**9
        tensor.load(CPU, torch.float32)
    return len(stored)


def test_spoiled_headers_are_read_or_refused_in_our_words(spoil, tmp_path):
    header, data = small_file()
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(json.dumps(header).encode(), data))
    assert read_all(tmp_path) == 4
    told = {int: 0}

    @spoil.drawn(1500)
    @given(SEEDS)
    def check(seed):
        text = json.dumps(spoil.spoiled_json(header, seed)).encode(errors="surrogatepass")
        path.write_bytes(packed(text + b" " * (-len(text) % 8), data))
        found = spoil.ours(lambda: read_all(tmp_path))
        told[type(found)] = told.get(type(found), 0) + 1

    check()
    assert len(told) > 1 and told[int] > 20, told


def test_spoiled_files_are_read_or_refused_in_our_words(spoil, tmp_path):
    header, data = small_file()
    whole = packed(json.dumps(header).encode(), data)
    path = tmp_path / "model.safetensors"

    @spoil.drawn(1000)
    @given(SEEDS)
    @example(0)
    def check(seed):
        path.write_bytes(spoil.spoiled_bytes(whole, seed))
        spoil.ours(lambda: read_all(tmp_path))

    check()


def test_spoiled_indices_are_read_or_refused_in_our_words(spoil, tmp_path):
    header, data = small_file()
    for name, kept in (("one.safetensors", ("a.weight", "b.weight")), ("two.safetensors", ("c", "scale"))):
        begin = header[kept[0]]["data_offsets"][0]
        own = {k: header[k] | {"data_offsets": [x - begin for x in header[k]["data_offsets"]]} for k in kept}
        (tmp_path / name).write_bytes(packed(json.dumps(own).encode(), data[begin : header[kept[1]]["data_offsets"][1]]))
    index = {"metadata": {"total_size": len(data)}, "weight_map": {"a.weight": "one.safetensors", "b.weight": "one.safetensors",
                                                                   "c": "two.safetensors", "scale": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert read_all(tmp_path) == 4

    @spoil.drawn(500)
    @given(SEEDS, st.booleans())
    @example(0, False)
    def check(seed, as_bytes):
        raw = json.dumps(index).encode() if as_bytes else json.dumps(spoil.spoiled_json(index, seed)).encode()
        (tmp_path / INDEX).write_bytes(spoil.spoiled_bytes(raw, seed) if as_bytes else raw)
        spoil.ours(lambda: read_all(tmp_path))

    check()


def test_a_spoiled_header_of_a_model_is_refused_before_a_weight_is_read(spoil, tmp_path):
    core = make_random_core("ouro")
    core.save_pretrained(tmp_path / "m")
    path = next((tmp_path / "m").glob("*.safetensors"))
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    kept = [0]

    @spoil.drawn(150)
    @given(SEEDS)
    def check(seed):
        path.write_bytes(packed(json.dumps(spoil.spoiled_json(header, seed)).encode(errors="surrogatepass"), data))
        found = spoil.ours(lambda: check_tensors(core, open_tensors(tmp_path / "m")))
        if found is None:
            kept[0] += 1
            assert spoil.ours(lambda: load_core(tmp_path / "m")) is not None

    check()
    assert kept[0] < 100
