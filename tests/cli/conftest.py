from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from typer.testing import CliRunner

from loopscope.cli.app import app
from loopscope.random_models import make_random_core


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder("huginn")`: a checkpoint folder of a tiny random model that reads text."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(family: str = "huginn") -> Path:
        if family not in made:
            outer = {"n_prelude": 1, "n_coda": 1} if family == "huginn" else {}
            core = make_random_core(family, gain=0.1, depth=4, n_core=1, context=512, **outer)
            core.tokenizer = byte_tokenizer()
            core.save_pretrained(root / f"random-{family}")
            made[family] = root / f"random-{family}"
        return made[family]

    return make


@pytest.fixture
def loopscope():
    """Run a command in this process: `loopscope("decode", folder, "text")` -> result with exit_code, stdout, stderr."""

    def run(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="loopscope")

    return run
