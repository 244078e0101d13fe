"""Distances are what their formulas say, exactly where exactness is promised."""

from __future__ import annotations

import pytest
import torch

from probes.distance import cosine, entropy_nats, kl_nats, log_probabilities, relative_l2


def test_a_vector_is_at_cosine_exactly_one_and_distance_exactly_zero_from_itself():
    x = torch.randn(500, 37, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 500)[:, None]
    assert (cosine(x, x) == 1).all() and (relative_l2(x, x) == 0).all()


def test_cosine_and_relative_l2_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert cosine(a, b).item() == pytest.approx(24 / 25)
    assert relative_l2(a, b).item() == pytest.approx(2**0.5 / 5)
    assert relative_l2(a, 2 * b).item() != relative_l2(2 * b, a).item(), "the second argument is the reference"


def test_zero_vectors_have_a_defined_cosine():
    zero, one = torch.zeros(3), torch.ones(3)
    assert cosine(zero, one).item() == 0 and cosine(zero, zero).item() == 1 and relative_l2(zero, zero).item() == 0


def test_distribution_distances_by_hand_and_in_float32_at_least():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    assert kl_nats(p.log(), q.log()).item() == pytest.approx(0.25 * 0.6931472, rel=1e-5)
    assert entropy_nats(p.log()).item() == pytest.approx(1.5 * 0.6931472, rel=1e-5)
    assert kl_nats(p.log(), p.log()).item() == 0
    assert log_probabilities(torch.zeros(4, dtype=torch.bfloat16)).dtype == torch.float32
    assert log_probabilities(torch.zeros(4, dtype=torch.float64)).dtype == torch.float64
