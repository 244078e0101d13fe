"""Loads the made-up tables: in importlib mode a test module cannot import its neighbour by name."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    spec = importlib.util.spec_from_file_location("figures_synthetic", Path(__file__).with_name("synthetic.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
