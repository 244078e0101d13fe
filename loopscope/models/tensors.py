"""Where a checkpoint's tensors lie: safetensors headers first, tensors piece by piece. Nothing that is read is executed.

A file is opened anew for every piece, of at most PIECE bytes: what has been read of a mapped file counts as this
process's memory until the file is let go. So loading needs the model's own size and one piece, whatever the tensors'.

The one pickle that is ever opened is the file Parcae is released as, through torch.load(weights_only=True), which
builds tensors and plain containers and refuses everything else; a warning says so.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from loopscope.errors import CheckpointError

INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PIECE = 32 * 2**20  # bytes
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint file, not read yet. nbytes: its size in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    nbytes: int
    _read: Callable[[int, int], torch.Tensor]  # rows start..stop along dim 0; a scalar whole

    def load(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor. Raises CheckpointError as load_into does."""
        out = torch.empty(self.shape, device=device, dtype=dtype)
        self.load_into(out)
        return out

    def load_into(self, out: torch.Tensor) -> None:
        """Fill `out`, of this shape and any device and float dtype, piece by piece.

        Raises CheckpointError where the tensor cannot be read, is no floating-point tensor, or does not fit into out's dtype.
        """
        if not out.ndim:
            return self._copy(out, self.read())
        rows = max(1, PIECE * self.shape[0] // max(1, self.nbytes))
        for start in range(0, self.shape[0], rows):
            stop = min(start + rows, self.shape[0])
            self._copy(out[start:stop], self.read(start, stop))

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start..stop along dim 0 as they are stored, on the CPU; nothing is copied before it is used."""
        try:
            return self._read(start, stop if stop is not None else self.shape[0] if self.shape else 0)
        except Exception as error:  # safetensors and torch raise many kinds for one cause: the file is not what its header says
            raise CheckpointError(f"{self.path}: tensor {self.name} cannot be read (truncated or corrupt file?): {error}") from error

    def _copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        if piece.dtype not in FLOATS:
            raise CheckpointError(f"{self.path}: tensor {self.name} should hold floating-point weights, found {_short(piece.dtype)}; "
                                  "quantised checkpoints are not supported")
        out.copy_(piece)
        # Extremes show NaN and infinity, and need no copy as large as the piece.
        if out.numel() and not all(math.isfinite(float(end)) for end in torch.aminmax(out)):
            largest = float(piece.abs().max())
            if not math.isfinite(largest):  # attention on a CPU may swallow NaN scores: nothing downstream would notice
                raise CheckpointError(f"{self.path}: tensor {self.name} holds NaN or infinite values, expected finite weights; the file is "
                                      "damaged, or training diverged")
            raise CheckpointError(f"{self.path}: tensor {self.name} does not fit into {_short(out.dtype)}: its largest value is "
                                  f"{largest:.4g}, expected at most {torch.finfo(out.dtype).max:.4g}; load it as bfloat16 or float32")


def read_json(path: Path) -> dict:
    """A JSON object. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(data).__name__}")
    return data


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_tensors(folder: Path) -> bool:
    """Whether a folder has safetensors files, or an index of them."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def open_tensors(folder: Path, pickled: bool = False) -> dict[str, Stored]:
    """Tensor name -> Stored, of every weight file of a checkpoint folder. `pickled`: a pytorch_model.bin may stand in.

    An index, if there is one, is held to its word: every shard there, every tensor in the shard that it names.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    weights = weight_files([f.name for f in folder.glob("*.safetensors")])
    if len(weights) == 1:
        return _headers(folder / weights[0])
    if weights:
        raise CheckpointError(f"{folder} has {len(weights)} safetensors files ({', '.join(weights[:4])}"
                              f"{' ...' if len(weights) > 4 else ''}) and no {INDEX} to order them")
    if pickled and (folder / PICKLE).is_file():
        return _unpickled(folder / PICKLE)
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
    raise CheckpointError(f"{folder} has no *.safetensors file (found: {found}); pickled weights are never loaded"
                          + (" in other files" if pickled else ""))


def weight_files(names: Iterable[str]) -> list[str]:
    """Of a folder's safetensors files, those that are the model, where no index says so."""
    names = sorted(names)
    return [name for name in names if name in ("model.safetensors", "weights.safetensors")] or names


def _headers(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.exists() else "missing"
        raise CheckpointError(f"{path} ({size}) is not a readable safetensors file (truncated or corrupt?): {error}") from error
    if not found:
        raise CheckpointError(f"{path} holds no tensors")

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(name)
            return part[start:stop] if part.get_shape() else part[...]

    return {name: Stored(path, name, shape, math.prod(shape) * element_bytes(kind), partial(read, name))
            for name, (shape, kind) in found.items()}


def element_bytes(kind: str) -> int:
    """Bytes of one element of a safetensors dtype, "BF16" or "F8_E4M3": the digits before any underscore are bits."""
    bits = re.match(r"[A-Z]+(\d+)", kind)
    return max(1, int(bits[1]) // 8) if bits else 1


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file, as an index has it. Raises CheckpointError, also for files anywhere but beside it."""
    where: Any = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
        raise CheckpointError(f"{index} should have a weight_map from tensor names to files, found {type(where).__name__} "
                              f"{str(where)[:60]}")
    for shard in sorted(set(where.values())):
        if PurePosixPath(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {shard!r}; expected the name of a *.safetensors file in the same folder")
    return where


def shards_of(index: Path) -> list[str]:
    """The files that an index names. Raises CheckpointError."""
    return sorted(set(_weight_map(index).values()))


def _indexed(folder: Path, index: Path) -> dict[str, Stored]:
    where = _weight_map(index)
    shards = sorted(set(where.values()))
    if missing := [shard for shard in shards if not _is_file(folder / shard)]:
        lost = sorted(name for name, shard in where.items() if shard in missing)
        raise CheckpointError(f"{index} names {len(shards)} shards, of which {len(missing)} are missing: "
                              f"{', '.join(shard[:80] for shard in missing)} "
                              f"({len(lost)} tensors, the first {lost[0]}); download the checkpoint again")
    found: dict[str, Stored] = {}
    for shard in shards:
        for name, stored in _headers(folder / shard).items():
            if where.get(name) == shard:
                found[name] = stored
            elif name not in where:
                raise CheckpointError(f"{folder / shard} holds tensor {name}, which {INDEX} does not list")
    if lost := sorted(set(where) - set(found)):
        raise CheckpointError(f"{folder / where[lost[0]]} lacks tensor {lost[0]}, which {INDEX} says it holds ({len(lost)} in all)")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with characters, that no file can have
        return False


def _unpickled(path: Path) -> dict[str, Stored]:
    warnings.warn(f"{path} is a pickle, a format that can run code when it is opened; it is read with torch.load(weights_only=True), "
                  "which builds nothing but tensors. `loopscope convert` makes a safetensors checkpoint of it once and for all.",
                  UserWarning, stacklevel=5)
    state = _open_pickle(path)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        tensor = _open_pickle(path)[name]
        return tensor[start:stop] if tensor.ndim else tensor

    return {name: Stored(path, name, tuple(t.shape), t.nbytes, partial(read, name)) for name, t in state.items()}


def _open_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Its tensors by name, mapped and not read yet."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors, so it was not opened: {str(error).splitlines()[0]}") from error
    except Exception as error:  # a truncated archive shows as RuntimeError, EOFError, ValueError, ...
        raise CheckpointError(f"{path} is not a readable checkpoint (truncated or corrupt?): {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state.items()) or not state:
        raise CheckpointError(f"{path} should hold a dictionary of tensors by name, found {type(state).__name__}")
    return state
