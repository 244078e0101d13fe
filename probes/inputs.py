"""What every probe and intervention checks first: the model, the prompts, the start state's name."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopscope.errors import NumericsError, PromptError, SettingError

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore


def core_of(model: Any) -> LoopedCore:
    """The LoopedCore itself or the one inside a LoopedModel."""
    core = getattr(model, "core", None)
    if core is None:
        raise SettingError(f"a looped model is needed (loopscope.load(...)), got {type(model).__name__}")
    return core


def name_of(core: LoopedCore, model_name: str | None) -> str:
    """What the `model` column says: the given name, else where the model was loaded from, else its family."""
    return model_name or core.source or core.family


def start_label(core: LoopedCore, start_state: str | Tensor | None) -> str:
    """The `start` column: "embedding" (no start state), "zero", "keyed" (drawn per position) or "given" (a tensor)."""
    if not core.has_start_state:
        return "embedding"
    if isinstance(start_state, Tensor):
        return "given"
    return "zero" if start_state == "zero" or core.config.state_std == 0 else "keyed"


def read_prompts(core: LoopedCore, prompts: str | Iterable[Any], least: int, why: str) -> list[Tensor]:
    """Token ids [n] of each prompt (text, list of ids or 1-d tensor).

    Raises PromptError if there is none, or if one has fewer than `least` tokens, which `why` explains.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise PromptError("no prompts were given; pass a list with at least one")
    tokens = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, int):
            raise PromptError("prompts is a list of prompts; put a single list of token ids into a list of its own")
        ids = core.prompt_tokens(prompt)
        if len(ids) < least:
            raise PromptError(f"prompt {index} has {len(ids)} token{'s' if len(ids) > 1 else ''}, but {why} needs at least {least}; "
                              "give a longer prompt")
        tokens.append(ids)
    return tokens


def chosen(prompts: Sequence[Any], only: Container[int] | None) -> list[int]:
    """The indices of the prompts to measure: all, or those in `only`."""
    return [index for index in range(len(prompts)) if only is None or index in only]


def check_names(given: Iterable[str], known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The given names as a tuple. Raises SettingError for an unknown one."""
    given = (given,) if isinstance(given, str) else tuple(given)
    for name in given:
        if name not in known:
            raise SettingError(f"{what} {name!r} is unknown; use some of {', '.join(map(repr, known))}")
    return given


def check_finite(tensor: Tensor, what: str) -> None:
    """Raises NumericsError if anything in `tensor` is NaN or infinite."""
    if not bool(torch.isfinite(tensor).all()):
        raise NumericsError(f"{what} holds NaN or infinite numbers, so nothing measured from it could be trusted; "
                            "try float32 or a smaller depth")
