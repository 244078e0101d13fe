"""One exception family: every message says what was wrong, what was found, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType


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


class OutOfMemoryError(LoopscopeError):
    """Keys and values that would not fit; nothing was taken, and the message says what would fit."""


class NumericsError(LoopscopeError):
    """NaN where a number is needed; nothing computed from it can be trusted."""


class HookError(LoopscopeError):
    """A hook or filter that matches nothing, or a hook where none can fire."""


class SettingError(LoopscopeError):
    """An argument, or a combination of arguments, that has no meaning."""


class RunFolderError(LoopscopeError):
    """A run folder that cannot be written or read."""


class DepthWarning(UserWarning):
    """More recurrences than a model that is fed nothing but its own state was trained for."""


_BETWEEN = {"loopscope", "decoders", "interventions", "probes", "figures", "torch", "transformer_lens"}


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's own code, whatever of ours lies in between: Python shows a warning once per line."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class SpecialTokenNotice(UserWarning):
    """A checkpoint's config.json names special tokens that its own tokenizer contradicts; what is used instead is said."""


def closest(name: str, known: Iterable[str], n: int = 3) -> str:
    """`'a', 'b'`: the known names nearest to `name`, for the end of an error message."""
    return ", ".join(repr(match) for match in difflib.get_close_matches(name, list(known), n=n, cutoff=0.3))
