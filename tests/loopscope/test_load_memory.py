"""Loading needs the tensors' own size in the dtype asked for, and little more: 1.15x is the promise."""

from __future__ import annotations

import sys

import pytest

from loopscope.models.load_memory import CASES, LIMIT, measure_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


def held_to_the_limit(rows) -> None:
    for row in rows:
        assert row.growth > 0.9 * row.tensors  # the weights are really there: nothing was left lazily mapped
        assert row.ratio < LIMIT, row


def test_loading_a_small_checkpoint_needs_little_more_than_its_tensors(tmp_path):
    """Its embeddings are a third of it each: read whole before they are converted, they alone would double the memory."""
    rows = measure_all(320_000_000, CASES[:2], str(tmp_path))
    assert [(row.stored, row.loaded) for row in rows] == [("float32", "float32"), ("float32", "bfloat16")]
    assert rows[0].tensors == 2 * rows[1].tensors > 2e8
    held_to_the_limit(rows)
    assert not list(tmp_path.iterdir())  # the checkpoint was removed


@pytest.mark.slow
def test_loading_a_gigabyte_needs_little_more_than_its_tensors(tmp_path):
    rows = measure_all(1_200_000_000, folder=str(tmp_path))
    assert rows[0].tensors > 1e9 and len(rows) == len(CASES)
    held_to_the_limit(rows)
