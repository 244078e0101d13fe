"""How much memory decoding takes, said before it is taken.

    memory_needed(config, 32768, slots=4)                  -> Memory; what a decode of so many positions holds
    check_room(config, 32768, room=24e9)                   raises OutOfMemoryError, which says what would fit

A looped model keeps keys and values for every depth, so its cache is T times that of a model of its layers: 32,768 positions of Huginn
take 91 GB. On a CPU zeros cost nothing until they are written, so a cache that is too large would be given, and the process killed much
later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopscope.errors import OutOfMemoryError, SettingError

if TYPE_CHECKING:
    from loopscope.models.config import LoopedConfig

PREFILL = 2048  # positions that a prompt is read in at a time
SQUARE_MASK_LIMIT = 4096  # positions of a cache up to which the causal mask is made once, as a square
_SMALL = 64 * 2**20  # caches below this are made without asking how much memory is free
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes. weights: as loaded. kv: keys and values of all positions. working: what one call makes, at most, while a prompt is read."""

    weights: int
    kv: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.working


def kv_bytes(config: LoopedConfig, positions: int, *, batch: int = 1, slots: int | None = None, depth: int | None = None,
             dtype: torch.dtype = torch.bfloat16) -> int:
    """What a DepthCache of so many positions takes. slots: K/V slots that depths share; default: the model's own, or one per depth."""
    each = slots or config.kv_slots or depth or config.depth
    layers = config.n_prelude + config.n_coda + each * config.n_core * (1 + config.inner_cycles)
    return 2 * layers * config.n_kv_heads * config.d_head * batch * positions * dtype.itemsize


def memory_needed(config: LoopedConfig, positions: int, parameters: int = 0, *, batch: int = 1, slots: int | None = None,
                  depth: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Memory:
    """What decoding needs whose prompt and new tokens are `positions` long. parameters: the model's count."""
    whole = (slots or config.kv_slots or depth or config.depth) < (depth or config.depth)  # shared slots: a prompt is one call
    rows = batch * (positions if whole else min(positions, PREFILL))
    # At its widest a call holds x, the state, a residual stream, its norm and a branch, and the MLP's halves, gate and product or q, k, v.
    width = 6 * config.d_model + max(4 * config.d_mlp, 4 * config.n_heads * config.d_head)
    # A short cache keeps one square mask; behind a long one each call makes its own, beside the last call's.
    masks = positions**2 if positions <= SQUARE_MASK_LIMIT else 0 if whole else 2 * rows * positions
    return Memory(parameters * dtype.itemsize, kv_bytes(config, positions, batch=batch, slots=slots, depth=depth, dtype=dtype),
                  (rows * width + masks + batch * config.vocab_size) * dtype.itemsize)


def available(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be taken on a device; None where the system does not say. A container's limit counts as well."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min((n for n in (_free(), _below_limit()) if n is not None), default=None)


def check_room(config: LoopedConfig, positions: int, *, batch: int = 1, slots: int | None = None, depth: int | None = None,
               dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", room: float | None = None) -> None:
    """Raises OutOfMemoryError where a cache of so many positions does not fit, saying what would. room: bytes; default: what is free.

    Raises SettingError for positions below 1 and a room that is no number of bytes.
    """
    if positions < 1 or (room is not None and not 0 <= room < float("inf")):
        raise SettingError(f"positions must be at least 1 and room a number of bytes, got {positions!r} and {room!r}")
    needed = kv_bytes(config, positions, batch=batch, slots=slots, depth=depth, dtype=dtype)
    if needed < _SMALL and room is None:
        return
    room = available(device) if room is None else room
    if room is None or needed <= room:
        return
    each = needed // positions
    kept = slots or config.kv_slots or depth or config.depth
    fits = [f"{int(room // each):,} positions" if room >= each else "not one position"]
    fewer = next((s for s in (16, 8, 4, 2, 1) if s < kept and
                  kv_bytes(config, positions, batch=batch, slots=s, depth=depth, dtype=dtype) <= room), None)
    if fewer is not None:
        fits.append(f"all {positions:,} with {fewer} shared slot{'s' if fewer > 1 else ''} (slots={fewer}, approximate)")
    if dtype.itemsize > 2 and needed * 2 / dtype.itemsize <= room:
        fits.append(f"all {positions:,} in bfloat16")
    if batch > 1 and needed // batch <= room:
        fits.append(f"a batch of {int(room // (needed // batch))}")
    raise OutOfMemoryError(f"keys and values of {positions:,} positions need {sized(needed)} ({sized(each)} each, "
                           f"{str(dtype).removeprefix('torch.')}, {kept} slot{'s' if kept > 1 else ''}), and {sized(room)} are free on "
                           f"{device}; what would fit: {'; '.join(fits)}")


def sized(n: float) -> str:
    """'88.6 GB', '2.7 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{int(n)} bytes"


def _free() -> int | None:
    """MemAvailable of Linux, or what the system calls free elsewhere."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _below_limit() -> int | None:
    """What a container may still take: its limit less its use, of control groups of either version."""
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            return max(0, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):  # "max", or no such group
            continue
    return None
