"""Blocks on several devices, for models that one card does not hold: `loopscope.load(..., device_map="auto")`.

Blocks are placed, each whole and with its K/V; all else (embedding, norms, adapter, head) stays together on the main device, where
states and logits are between calls, so that decoders and taps see one device. accelerate plans the map and carries each
block's inputs to its device; what leaves the last block of a part goes back to the main one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

PARTS = ("prelude", "low", "blocks", "coda")  # in the order in which they run; `low` is HRM-Text's fast stack
Placement = dict[str, torch.device]


def block_names(core: LoopedCore) -> list[str]:
    """'prelude.0', 'blocks.0', ...: what can be placed, in the order in which they run."""
    return [f"{part}.{i}" for part in PARTS for i in range(len(getattr(core, part, ())))]


def plan_placement(core: LoopedCore, device_map: str | Mapping[str, Any], main: torch.device | None, dtype: torch.dtype,
                   max_memory: Mapping[int | str, int | str] | None = None) -> tuple[Placement, torch.device]:
    """(device of every block, main device) for a model on the meta device.

    device_map: "auto", or a device by name of a block ('blocks.3'), of a part ('prelude', 'blocks', 'coda', 'low') or '' for
    all; what is named more exactly wins. main: None is the first GPU ("auto"), the map's '' or its first block's device.
    Raises SettingError for a name or device that cannot be, or a block without a device.
    """
    from loopscope.models.loading import usable_device

    names = block_names(core)
    if not isinstance(device_map, (str, Mapping)):
        raise SettingError(f"device_map is 'auto' or names devices of blocks, such as {{'blocks': 1}}, got {device_map!r}")
    if isinstance(device_map, str):
        if device_map != "auto":
            raise SettingError("device_map must be 'auto' or name devices of blocks, such as {'prelude': 0, 'blocks': 1, 'coda': 1}, "
                               f"got {device_map!r}")
        main = main or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        device_map = _auto(core, main, dtype, max_memory)
    elif max_memory is not None:
        raise SettingError("max_memory is for device_map='auto'; a map that names devices needs none")
    known = {"", *names, *(name.partition(".")[0] for name in names), *(name for name, _ in core.named_children())}
    for name in device_map:
        if name not in known:
            raise SettingError(f"device_map names {name!r}, which is no block or part of this model; known: "
                               f"{closest(str(name), known) or ', '.join(sorted(known - {''}))}. Blocks are placed whole")
    placement = {}
    for name in names:
        given = next((key for key in (name, name.partition(".")[0], "") if key in device_map), None)
        if given is None:
            raise SettingError(f"device_map gives {name!r} no device; name it, its part {name.partition('.')[0]!r}, or '' for all")
        if str(device_map[given]) == "disk":
            raise SettingError(f"device_map puts {name!r} on 'disk'; blocks are kept on devices (GPUs, or 'cpu'): a looped block is read "
                               "again at every recurrence, which a disk is too slow for. Use more devices or a smaller dtype")
        placement[name] = usable_device(device_map[given])
    main = main or usable_device(device_map.get("", next(iter(placement.values()))))
    for name, device in device_map.items():
        if name and name not in placement and name.partition(".")[0] not in PARTS and usable_device(device) != main:
            raise SettingError(f"device_map puts {name!r} on {device}, but all that is no block stays together on {main}")
    return placement, main


def _auto(core: LoopedCore, main: torch.device, dtype: torch.dtype, max_memory: Mapping[int | str, int | str] | None) -> dict[str, Any]:
    """accelerate's balanced map of the blocks over what memory there is, where all that is no block is on `main` already."""
    from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map

    shell = nn.ModuleDict({part: getattr(core, part) for part in PARTS if len(getattr(core, part, ()))})
    blocks = sum(p.numel() for p in shell.parameters())
    rest = (sum(p.numel() for p in core.parameters()) - blocks) * dtype.itemsize
    try:
        room = get_max_memory(dict(max_memory) if max_memory is not None else None)
    except (ValueError, TypeError) as error:
        raise SettingError(f"max_memory is the room of each device, such as {{0: '20GiB', 'cpu': '60GiB'}}, got {max_memory!r}: "
                           f"{error}") from error
    key = main.index or 0 if main.type != "cpu" else "cpu"
    room[key] = room.get(key, 0) - rest
    if room[key] < 0:
        raise SettingError(f"{main} has no room for embedding, norms and head, {rest / 1e9:.2f} GB of {dtype}; use a larger max_memory, "
                           "another device or a smaller dtype")
    classes = sorted({type(core.get_submodule(name)).__name__ for name in block_names(core)})
    options = {"no_split_module_classes": classes, "dtype": dtype}
    # Balancing leaves the first card room for activations; it needs several cards to balance.
    if sum(isinstance(device, int) for device in room) > 1:
        room = get_balanced_memory(shell, room, **options)
    found = infer_auto_device_map(shell, room, **options)
    return dict(found)


def dispatch(core: LoopedCore, placement: Placement, main: torch.device) -> None:
    """Let every block find its inputs on its own device. The parameters are where they belong already; one device needs nothing."""
    core.placement = placement
    if set(placement.values()) <= {main}:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, device in placement.items():
        block = core.get_submodule(name)
        add_hook_to_module(block, AlignDevicesHook(execution_device=device))
    for part in PARTS:
        if len(getattr(core, part, ())):
            getattr(core, part)[-1].register_forward_hook(partial(_bring_to, main))


def _bring_to(device: torch.device, module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
    return out.to(device)


def device_of(parameter: str, placement: Placement, main: torch.device) -> torch.device:
    """Where a parameter belongs: 'blocks.3.attn.out.weight' with its block."""
    return placement.get(".".join(parameter.split(".")[:2]), main)
