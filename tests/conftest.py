"""Shared fixtures. One thread: the models are tiny, and two contended threads make them many times slower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopscope.models.loading import load_core
from loopscope.random_models import make_random_core

torch.set_num_threads(1)
GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of the goldens, one folder per family."""
    return GOLDENS


@pytest.fixture(scope="session")
def huginn():
    """The golden Huginn model in float64. Shared by the session: do not change it."""
    return load_core(GOLDENS / "huginn", dtype=torch.float64)


@pytest.fixture(scope="session")
def ouro():
    """The golden Ouro model in float64. Shared by the session: do not change it."""
    return load_core(GOLDENS / "ouro", dtype=torch.float64)


@pytest.fixture(scope="session")
def random_core():
    """`random_core(family, gain=..., seed=...)`: loopscope.random_models.make_random_core."""
    return make_random_core
