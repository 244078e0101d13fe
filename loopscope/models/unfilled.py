"""Models whose tensors have shapes and no values yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules made within lie on the meta device, and nothing is drawn for their parameters.

    A draw on the meta device gives no values, but torch traces it, and for that it imports its compiler: two seconds before the
    first token.
    """
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """torch.nn.init returns its tensor as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
