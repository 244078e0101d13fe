"""Writing checkpoints: config.json, safetensors and tokenizer files under official names, each there only when complete."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopscope.errors import CheckpointError, RunFolderError, SettingError
from loopscope.models.loading import split_sizes
from loopscope.models.tensors import INDEX

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

SHARD_SIZE = "5GB"


def official_state(core: LoopedCore) -> dict[str, torch.Tensor]:
    """The model's tensors under their official names."""
    own = dict(core.named_parameters())
    out: dict[str, torch.Tensor] = {}
    for ours, group in core.official_names(core.config).items():
        tensor = core.to_official(ours, own[ours].detach(), core.config)
        sizes = split_sizes(core, ours, tensor) if len(group) > 1 else [tensor.shape[0]]
        out |= dict(zip(group, (t.contiguous() for t in tensor.split(sizes))))
    return out


def save_checkpoint(core: LoopedCore, folder: str | os.PathLike, max_shard_size: int | str = SHARD_SIZE) -> Path:
    """Write config.json, model.safetensors (or shards and their index) and the tokenizer's files.

    A new folder appears only when all of it is complete; in one that exists each file does, and a checkpoint of the same
    file names is replaced. Raises CheckpointError where other weights lie there, SettingError for a size that is none.
    """
    folder = Path(folder).expanduser()
    if core.quantised:
        raise SettingError(f"{core.source} holds {core.quantised} weights, which are not the checkpoint's and have no official form; "
                           "save a model that was loaded without them")
    state = official_state(core)
    raw = dict(core.config.raw)
    for key in ("torch_dtype", "dtype"):  # where the config says one, it must be that of the weights beside it
        if isinstance(raw.get(key), str):
            raw[key] = str(core.dtype).removeprefix("torch.")
    files = {**core.text_files.raw, "config.json": (json.dumps(raw, indent=1) + "\n").encode()}
    if core.tokenizer is not None:
        files["tokenizer.json"] = core.tokenizer.to_str(pretty=True).encode()
    with new_folder(folder, replace=True) as part:
        write_tensors(part, {name: t.nbytes for name, t in state.items()}, state.__getitem__, max_shard_size)
        for name, content in files.items():
            (part / name).write_bytes(content)
    return folder


def write_tensors(folder: Path, sizes: Mapping[str, int], tensor: Callable[[str], torch.Tensor],
                  max_shard_size: int | str = SHARD_SIZE) -> None:
    """model.safetensors, or shards of at most max_shard_size with an index. sizes: bytes by name; only one shard is held at a time."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    number = re.match(r"\s*\d+(\.\d+)?", str(max_shard_size))
    try:
        if number is None or float(number[0]) <= 0:
            raise ValueError("it must be more than 0")
        # The planner reads nothing but sizes, so these stand in for the tensors.
        plan = split_state_dict_into_shards_factory(dict(sizes), get_storage_size=int, max_shard_size=max_shard_size,
                                                    filename_pattern="model{suffix}.safetensors")
    except (ValueError, TypeError) as error:
        raise SettingError(f"the largest size of a shard is a number of bytes, or text such as '5GB', got {max_shard_size!r}: "
                           f"{error}") from error
    for file, names in plan.filename_to_tensors.items():
        try:
            save_file({name: tensor(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors wraps the system's error in its own
            raise RunFolderError(f"{folder / file} could not be written: {error}; free some space or write elsewhere") from error
        umask = os.umask(0)
        os.umask(umask)
        (folder / file).chmod(0o666 & ~umask)  # safetensors writes for its owner alone; like the files beside it otherwise
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, whose files come under that name at the end, or vanish if anything goes wrong.

    Raises CheckpointError where `folder` is no folder, or holds anything (with `replace`: weights of other names).
    """
    folder = Path(os.path.abspath(folder))
    _check_free(folder, replace)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(f".{folder.name}.part-{secrets.token_hex(4)}")
        part.mkdir()
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{str(folder)!r} cannot be made: {why}; choose another folder") from error
    try:
        yield part
        _check_free(folder, replace)  # somebody may have written there meanwhile
        if not folder.exists() or not any(folder.iterdir()):
            os.replace(part, folder)
            return
        new = {path.name for path in part.iterdir()}
        if stale := sorted(p.name for p in _weights(folder) if p.name not in new):
            raise CheckpointError(f"{folder} holds other weights ({', '.join(stale[:4])}), which would be read in place of the new ones; "
                                  "choose an empty folder")
        for name in sorted(new, key=lambda n: (n == "config.json", n == INDEX, n)):  # a folder with config.json is complete
            os.replace(part / name, folder / name)
    finally:
        if part.exists():
            shutil.rmtree(part, ignore_errors=True)


def _weights(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob(INDEX)]


def _check_free(folder: Path, replace: bool) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, or a link to nowhere; choose another folder")
    if not replace and folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty; choose another folder")
