"""Loads the made-up tables: in importlib mode a test module cannot import its neighbour by name."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    module, inside = _load("synthetic"), _load("synthetic_inside")
    for name, made in vars(inside).items():
        if getattr(made, "__module__", None) == inside.__name__ and not hasattr(module, name):
            setattr(module, name, made)
    rest = module.tables
    module.tables = lambda *args, **options: rest(*args, **options) | inside.tables(*args, **options)
    return module


def _load(name):
    spec = importlib.util.spec_from_file_location(f"figures_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
