"""Names that are imported on first use (PEP 562), so that importing a room costs neither torch nor pandas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]]]:
    """`__getattr__` and `__dir__` for a package's __init__. where: public name -> the module that defines it."""

    def getattribute(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without asking here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return getattribute, names
