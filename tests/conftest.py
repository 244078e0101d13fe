"""Shared fixtures. One thread: the models are tiny, and two contended threads make them many times slower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopscope.errors import SettingError
from loopscope.models.loading import load_core
from loopscope.random_models import make_random_core
from loopscope.support import FILE, Record

torch.set_num_threads(1)
TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"


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


# ---- the support file (loopscope/support.py) --------------------------------------------------------------------

RECORD, COLLECTED, WHOLE = pytest.StashKey[Record](), pytest.StashKey[set](), pytest.StashKey[bool]()
_FAMILY = {"retrofit_llama": "raven", "retrofit_olmo": "raven", "raven_olmo": "raven"}


def shown(item: pytest.Item) -> set[tuple[str, str]]:
    """(family, check) pairs that a test stands for: of its support markers, for the marker's `family` or the test's own."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    pairs = set()
    for mark in item.iter_markers("support"):
        families = mark.kwargs.get("family") or params.get("family") or params["golden"]
        families = (families,) if isinstance(families, str) else families
        pairs |= {(_FAMILY.get(family, family), check) for family in families for check in mark.args}
    return pairs


def pytest_addoption(parser):
    parser.addoption("--write-support", action="store_true", help=f"write {FILE.name}, if all tests marked `support` ran and passed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):  # first: before -m and -k leave any out
    marked = {path for path in TESTS.rglob("test_*.py") if "mark.support(" in path.read_text(encoding="utf-8")}
    config.stash[RECORD] = Record()
    config.stash[COLLECTED] = set().union(*map(shown, items))
    config.stash[WHOLE] = marked <= {item.path for item in items}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" or not report.passed:
        for family, check in shown(item):
            item.config.stash[RECORD].add([family], check, report.passed)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if session.config.getoption("--write-support"):
        if session.config.getoption("numprocesses", None):
            raise pytest.UsageError("--write-support sees one process only: run it without -n")
        if not session.config.stash[WHOLE]:
            raise pytest.UsageError("--write-support needs the whole suite: pytest --write-support -m support")
        try:
            session.config.stash[RECORD].write(session.config.stash[COLLECTED])
        except SettingError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.fixture
def support_of_the_suite(request) -> tuple[set[tuple[str, str]], bool]:
    """(every (family, check) that the collected tests stand for, whether those are all that the suite has)."""
    return request.config.stash[COLLECTED], request.config.stash[WHOLE]
