"""What several tests of decoders watch a run with."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.is_nonzero", "aten._unique2")


class HostReads(TorchDispatchMode):
    """What made the host wait for a number, call by call: methods of a tensor that give it, operators whose shape depends on it."""

    def __init__(self, patch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.on = False
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._watched(name, getattr(torch.Tensor, name)))

    def _watched(self, name, method):
        def watched(tensor, *args, **kwargs):
            if not self.on:
                return method(tensor, *args, **kwargs)
            self.found.append(name)
            before = len(self.found)
            out = method(tensor, *args, **kwargs)
            del self.found[before:]  # what it is made of
            return out
        return watched

    def __enter__(self):
        self.on = True
        return super().__enter__()

    def __exit__(self, *error):
        self.on = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).rsplit(".", 1)[0] in OPERATORS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_reads(monkeypatch):
    """A mode under which `found` lists what the host waited for."""
    return HostReads(monkeypatch)
