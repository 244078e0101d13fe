"""Similarity of depths: linear CKA from the unbiased HSIC."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from loopscope.errors import PromptError
from probes import DepthSimilarityResult, depth_similarity
from probes.similarity import cka


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_cka_is_the_sum_over_all_quadruples_of_different_positions():
    """Unbiased HSIC by its definition: mean over quadruples of K_ij (L_ij + L_kl - 2 L_ik)."""
    x, y = normal(6, 3), normal(6, 3, seed=1) + normal(6, 3)

    def hsic(a, b):
        k, m = a @ a.T, b @ b.T
        quads = list(itertools.permutations(range(6), 4))
        return float(sum(k[i, j] * (m[i, j] + m[p, q] - 2 * m[i, p]) for i, j, p, q in quads)) / len(quads)

    expected = hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))
    assert float(cka(torch.stack((x, y)))[0, 1]) == pytest.approx(expected)


def test_cka_sees_neither_rotation_nor_scale_nor_shift_and_finds_unrelated_states_unrelated():
    x, turn = normal(40, 64), torch.linalg.qr(normal(64, 64, seed=1)).Q
    values = cka(torch.stack((x, 3 * x @ turn + normal(64, seed=2), normal(40, 64, seed=3))))
    assert torch.allclose(values.diagonal(), torch.ones(3, dtype=torch.float64)) and torch.allclose(values, values.T)
    assert float(values[0, 1]) == pytest.approx(1) and abs(float(values[0, 2])) < 0.2
    assert cka(torch.ones(2, 5, 3, dtype=torch.float64)).isnan().all()


def test_the_table_is_that_of_the_states_of_the_run(huginn, tmp_path):
    ids = [3, 141, 59, 26, 5, 7, 1, 2, 9]
    result = depth_similarity(huginn, [ids, ids[:4]], depth=3, progress=False)
    frame = result.frame
    assert len(frame) == 18 and frame.groupby("prompt").n_positions.first().tolist() == [9, 4]
    x = huginn.embed(torch.tensor([ids]))
    states = [huginn.start(x)]
    for _ in range(3):
        states.append(huginn.recur(states[-1], x))
    row = frame[(frame.prompt == 0) & (frame.depth == 1) & (frame.other_depth == 3)].iloc[0]
    assert row.cka == pytest.approx(float(cka(torch.cat([states[1], states[3]]))[0, 1]), abs=1e-10)
    with pytest.raises(PromptError, match="needs at least 4"):
        depth_similarity(huginn, [[1, 2, 3]], progress=False)
    result.save(tmp_path)
    assert DepthSimilarityResult.load(tmp_path).frame.equals(frame)
