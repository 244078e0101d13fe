from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def spoil():
    """The module spoil.py beside this file: mutations, and `ours`, which lets nothing through but our own errors."""
    spec = importlib.util.spec_from_file_location("loopscope_tests_spoil", Path(__file__).with_name("spoil.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
