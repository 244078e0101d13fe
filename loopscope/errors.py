"""One exception family: every message says what was wrong, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LoopscopeError(Exception):
    """Anything this project refuses to do. The command line prints it without a traceback."""


class CheckpointError(LoopscopeError):
    """A checkpoint folder cannot be used: file, tensor, expected and found are named."""


class UnknownModelError(LoopscopeError):
    """A model name or model_type that this project does not know."""


class PromptError(LoopscopeError):
    """A prompt that cannot be decoded: empty, out of vocabulary, or without a tokenizer to read it."""


class ContextError(LoopscopeError):
    """Positions beyond what the model or the cache holds."""


class DepthError(LoopscopeError):
    """A recurrence depth below 1 or beyond what the cache holds."""


class NumericsError(LoopscopeError):
    """NaN where a number is needed; nothing computed from it can be trusted."""


class HookError(LoopscopeError):
    """A hook or filter that matches nothing, or a hook where none can fire."""


class SettingError(LoopscopeError):
    """An argument, or a combination of arguments, that has no meaning."""


class RunFolderError(LoopscopeError):
    """A run folder that cannot be written or read."""


def closest(name: str, known: Iterable[str], n: int = 3) -> str:
    """`'a', 'b'`: the known names nearest to `name`, for the end of an error message."""
    return ", ".join(repr(match) for match in difflib.get_close_matches(name, list(known), n=n, cutoff=0.3))
