"""Loads the made-up tables: in importlib mode a test module cannot import its neighbour by name."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    module, others = _load("synthetic"), [_load("synthetic_inside"), _load("synthetic_drafts")]
    for other in others:
        for name, made in vars(other).items():
            if getattr(made, "__module__", None) == other.__name__ and not hasattr(module, name):
                setattr(module, name, made)
    parts = [module.tables, *(other.tables for other in others)]
    module.tables = lambda *args, **options: {k: t for part in parts for k, t in part(*args, **options).items()}
    return module


def _load(name):
    spec = importlib.util.spec_from_file_location(f"figures_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
