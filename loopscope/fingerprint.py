"""Short hashes by which two runs tell whether they measured the same thing: weights, prompts, code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from loopscope.records import manifest


def digest(*parts: Any) -> str:
    """sha256 in hex, 16 digits, of bytes, texts and tensors."""
    import torch

    seen = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        part = part if isinstance(part, bytes) else str(part).encode()
        seen.update(f"{len(part)} ".encode() + part)
    return seen.hexdigest()[:16]


def weights_hash(core, most: int = 4096) -> str:
    """Of every tensor's name, shape, type and up to `most` evenly spread values: a sample, which any further training changes."""
    parts: list[Any] = []
    for name, tensor in sorted(core.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        parts += [f"{name} {list(tensor.shape)} {tensor.dtype}", flat[:: max(1, -(-len(flat) // most))]]
    return digest(*parts)


def prompts_hash(core, prompts: Iterable[Any]) -> str:
    """Of the prompts' token ids."""
    return digest(*(core.prompt_tokens(p).tolist() for p in prompts))


@cache
def code_hash(*rooms: str) -> str:
    """Of the modules of these packages, the command line's left out, as they are when this process first asks."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(f for room in rooms for f in (root / room).rglob("*.py") if "cli" not in f.parts)
    return digest(*(part for file in files for part in (str(file.relative_to(root)), file.read_bytes())))


@cache
def machine() -> str:
    """The processor or card, and the number of cores."""
    hardware = manifest()["hardware"]
    return f"{hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores"
