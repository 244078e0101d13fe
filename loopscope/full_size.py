"""Models of published sizes with random weights, made where they will run: what a decoder costs does not depend on what weights say.

    core = full_size("Huginn-3.5B", "cuda", torch.bfloat16)       # nothing is read or carried; the same seed gives the same numbers
    core = full_size("Huginn-3.5B", "cpu", toy=True)              # the same wiring and depth, two layers of width 64

Sizes are the published configs' (docs/families.md); contexts may be longer than a released model was trained for, as nothing is read
off the text.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from loopscope.errors import SettingError, closest
from loopscope.models.looped import LoopedCore
from loopscope.models.registry import config_from_dict, family_class
from loopscope.models.unfilled import unfilled
from loopscope.random_models import random_config

_HUGINN = {"d_model": 5280, "n_heads": 55, "d_mlp": 17920, "vocab_size": 65536, "n_prelude": 2, "n_core": 4, "n_coda": 2, "depth": 32,
           "tied": True, "qk_bias": True}
_OURO = {"d_model": 2048, "n_heads": 16, "d_mlp": 5632, "vocab_size": 49152, "n_core": 24, "depth": 4, "tied": False}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Ouro-1.4B": ("ouro", _OURO), "Ouro-2.6B": ("ouro", _OURO | {"n_core": 48}), "Huginn-3.5B": ("huginn", _HUGINN)}
_TOY = {"d_model": 64, "n_heads": 2, "d_mlp": 96, "vocab_size": 128, "n_core": 2}
_TOY_OUTER = {"n_prelude": 1, "n_coda": 1}


@torch.inference_mode(False)
def full_size(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, *, context: int = 8192, seed: int = 0,
              toy: bool = False) -> LoopedCore:
    """A LoopedCore of a published size, matrices N(0, 1 / fan_in) drawn on the device, norms 1. No token ends a text.

    toy: narrow and thin, at the published depth. Raises SettingError for an unknown name.
    """
    core = laid_out(name, context, toy).to(dtype).to_empty(device=device)
    draw = torch.Generator(device=torch.device(device)).manual_seed(seed)
    for at, p in core.named_parameters():
        p.requires_grad_(False)
        if "norm" in at:
            p.fill_(1.0)
        else:
            p.normal_(0.0, 1 / math.sqrt(p.shape[-1]) if p.ndim > 1 else 0.02, generator=draw)
    core.source = f"{name} (random{', toy' if toy else ''})"
    return core.eval().requires_grad_(False)


def laid_out(name: str, context: int = 8192, toy: bool = False) -> LoopedCore:
    """The same without values, on the meta device."""
    if name not in SIZES:
        near = closest(name, SIZES)
        raise SettingError(f"no published size is called {name!r}{f' (did you mean {near}?)' if near else ''}; known: {', '.join(SIZES)}")
    family, sizes = SIZES[name]
    if toy:
        sizes = sizes | _TOY | (_TOY_OUTER if "n_prelude" in sizes else {})
    config = config_from_dict(random_config(family, context=context, **sizes))
    with unfilled():
        return family_class(family)(config)
