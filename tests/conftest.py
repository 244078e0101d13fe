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


@pytest.fixture(scope="session")
def timing():
    """`timing(recur=1.0, prelude=0.0, readout=0.0, per_row=0.0)`: a made-up Calibration, the same for all row shapes."""
    import pandas as pd

    from decoders.calibrate import Calibration

    def make(recur: float = 1.0, prelude: float = 0.0, readout: float = 0.0, per_row: float = 0.0, depth: int = 32) -> Calibration:
        rows = [("made-up", part, shape, n, 64, cost + (per_row * (n - 1) if part == "recur" else 0.0), 0)
                for part, cost in (("recur", recur), ("prelude", prelude), ("readout", readout))
                for shape in ("chain", "wave") for n in (1, 2, 4, 8, 16, 32)]
        return Calibration(pd.DataFrame(rows, columns=list(Calibration.columns)), {"depth": depth, "injects": True})

    return make
