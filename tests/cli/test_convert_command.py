"""`loopscope convert`: what it writes, says and refuses."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from loopscope.models.loading import SHIPPED


def test_convert_writes_a_checkpoint_and_says_what_it_holds(loopscope, tmp_path):
    result = loopscope("convert", "tiny-ouro", tmp_path / "out", "--max-shard-size", "1MB")
    assert result.exit_code == 0, result.stderr
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert result.stdout.startswith(f"{tmp_path / 'out'}: ") and all(name in result.stdout for name in files)
    assert "model.safetensors.index.json" in files and "tokenizer.json" in files
    stored = load_file(SHIPPED / "tiny-ouro" / "model.safetensors")
    written = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)


def test_convert_refuses_in_one_line(loopscope, tmp_path):
    for options, message in (
            (("--dtype", "int3"), "--dtype 'int3' is unknown; use one of float64, float32, bfloat16, float16"),
            (("--max-shard-size", "much"), "the largest size of a shard"),
            (("--revision", "main"), "revision='main' is for Hub ids")):
        result = loopscope("convert", "tiny-ouro", tmp_path / "out", *options)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
