"""`loopscope.load`: any supported checkpoint, with TransformerLens hooks where transformer-lens is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from loopscope.models.loading import load_core

if TYPE_CHECKING:
    from loopscope.models.hooked import LoopedModel
    from loopscope.models.looped import LoopedCore


def load(source: str | os.PathLike, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
         revision: str | None = None, hooked: bool = True, device_map: str | Mapping[str, Any] | None = None,
         max_memory: Mapping[int | str, int | str] | None = None, int8: bool = False) -> LoopedModel | LoopedCore:
    """Load a looped model.

    source: a shipped model's name ('tiny-huginn', 'tiny-ouro'), a folder with config.json and safetensors files under
    official names, or a Hub id ('organisation/name'), of which config, safetensors and tokenizer files are fetched and
    nothing else (docs/families.md lists the families). dtype: float32 unless given. revision: branch, tag or commit of a
    Hub id; model.core.revision is the commit that it was. hooked: wrap it in a LoopedModel with hooks at every depth;
    False gives the LoopedCore, which decodes without importing transformer-lens.
    device_map: "auto" spreads the blocks, each with its K/V, over the GPUs there are (and what they cannot hold stays on
    the CPU and runs there); or devices by block or part, {"prelude": 0, "blocks": 1, "coda": 1}. max_memory: bytes or "40GB"
    by device, for "auto": leave room for K/V (`loopscope inspect` says how much a token takes).
    int8: quantise the matrices (loopscope/models/quantise.py; needs torchao). Lossy: the model's name then ends in " int8".
    Raises UnknownModelError, CheckpointError; SettingError for a device, dtype or revision that cannot be.
    """
    core = load_core(source, device, dtype, revision, device_map, max_memory)
    if int8:
        from loopscope.models.quantise import quantise

        quantise(core)
    if not hooked:
        return core
    from loopscope.models.hooked import LoopedModel

    return LoopedModel(core)
