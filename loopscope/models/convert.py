"""`loopscope convert`: any supported checkpoint as safetensors, tensor by tensor, under the names that it has.

What it is for: Parcae's release is a pickle, and every load of one is another time that a pickle is opened. The model is
never built: tensors go from file to file, bit for bit unless another dtype is asked for, and only one shard is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from loopscope.errors import SettingError
from loopscope.models.loading import check_tensors, find_checkpoint
from loopscope.models.registry import config_from_dict, family_class, family_of
from loopscope.models.saving import SHARD_SIZE, new_folder, write_tensors
from loopscope.models.tensors import FLOATS, Stored, open_tensors, read_json
from loopscope.models.unfilled import unfilled
from loopscope.text import TEXT_FILES

# What the command line calls them.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


@dataclass(frozen=True)
class Converted:
    """folder: the new checkpoint's. nbytes: of its tensors. files: what was written."""

    folder: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...]


def convert(source: str | os.PathLike, out: str | os.PathLike, dtype: torch.dtype | None = None, revision: str | None = None,
            max_shard_size: int | str = SHARD_SIZE) -> Converted:
    """Write the checkpoint `source` (all that loopscope.load takes) to the folder `out`, which appears when it is complete.

    dtype: None keeps every tensor as it is stored. max_shard_size: bytes, or text such as "5GB"; more than that becomes
    several files and an index. Raises as load does, SettingError for a dtype or size that cannot be, and CheckpointError
    where `out` holds anything already.
    """
    if dtype is not None and dtype not in FLOATS:
        raise SettingError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    out = Path(out).expanduser()
    with new_folder(out) as part:
        folder = find_checkpoint(source, revision)
        raw = read_json(folder / "config.json")
        stored = open_tensors(folder, pickled=family_of(raw) == "parcae")
        config = config_from_dict(raw, stored.keys())
        with unfilled():
            core = family_class(config.family)(config)
        check_tensors(core, stored)

        def tensor(name: str) -> torch.Tensor:
            whole = stored[name].read()
            if dtype is None or not whole.is_floating_point():
                return whole.clone()  # tied weights may be one tensor in a pickle, which safetensors does not have
            return stored[name].load(torch.device("cpu"), dtype)

        sizes = {name: _size(found, dtype) for name, found in stored.items()}
        write_tensors(part, sizes, tensor, max_shard_size)
        if dtype is None:
            shutil.copyfile(folder / "config.json", part / "config.json")
        else:
            named = {key: str(dtype).removeprefix("torch.") for key in ("torch_dtype", "dtype") if key in raw}
            (part / "config.json").write_text(json.dumps(raw | named, indent=1) + "\n", encoding="utf-8")
        for name in TEXT_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, part / name)
        files = tuple(sorted(path.name for path in part.iterdir()))
    return Converted(out, len(sizes), sum(sizes.values()), files)


def _size(stored: Stored, dtype: torch.dtype | None) -> int:
    return stored.nbytes if dtype is None else dtype.itemsize * torch.Size(stored.shape).numel()
