"""Reading checkpoints: config.json and safetensors only, nothing that came with them is executed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopscope.errors import CheckpointError, SettingError, UnknownModelError, closest
from loopscope.models.layers import rotary_angles
from loopscope.models.registry import config_from_dict, family_class, family_of
from loopscope.models.tensors import FLOATS, Stored, open_tensors, read_json
from loopscope.models.unfilled import unfilled

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

SHIPPED = Path(__file__).resolve().parent.parent / "tiny" / "weights"


def shipped_models() -> list[str]:
    """Names of the models that come with the project."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def find_checkpoint(source: str | os.PathLike, revision: str | None = None) -> Path:
    """A shipped model's name, a local folder or a Hub id, tried in this order -> the folder.

    Of a Hub id the files are fetched first. Raises UnknownModelError or CheckpointError, and SettingError for a revision of
    anything but a Hub id.
    """
    folder = find_local(source)
    if folder is not None:
        if revision is not None:
            kind = "shipped model" if folder.parent == SHIPPED else "local folder"
            raise SettingError(f"revision={revision!r} is for Hub ids, and {str(source)!r} is a {kind}; leave it out")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder")
        return folder
    from loopscope.models.hub import fetch_checkpoint

    return fetch_checkpoint(str(source), revision)


def find_local(source: str | os.PathLike) -> Path | None:
    """The folder of a shipped model's name or of a path; None for what can only be a Hub id. Raises UnknownModelError."""
    from loopscope.models.hub import is_repo_id

    shipped = shipped_models()
    if not isinstance(source, (str, os.PathLike)):
        raise UnknownModelError(f"a model is a shipped model's name, a folder or a Hub id, got {source!r}")
    if str(source) in shipped:
        return SHIPPED / str(source)
    try:
        folder = Path(source).expanduser()
        found = folder.is_dir()
    except (RuntimeError, OSError, ValueError):  # the home of a user who is not there; a name too long, or that no folder can have
        found = False
    if found:
        return folder
    if is_repo_id(source):
        return None
    hint = closest(str(source), shipped)
    raise UnknownModelError(f"{str(source)!r} is neither a shipped model ({', '.join(shipped) or 'none'}) nor a folder nor a Hub id "
                            "('organisation/name')" + (f"; did you mean {hint}?" if hint else ""))


@torch.inference_mode(False)  # a model loaded inside inference mode must still be able to give gradients later
def load_core(source: str | os.PathLike, device: str | torch.device | None = None,
              dtype: torch.dtype | None = None, revision: str | None = None, device_map: str | Mapping[str, Any] | None = None,
              max_memory: Mapping[int | str, int | str] | None = None) -> LoopedCore:
    """A LoopedCore in evaluation mode, with its tokenizer where the folder holds one. Default: float32, on the CPU.

    device_map, max_memory: see loopscope.models.placement.plan_placement. Raises UnknownModelError or CheckpointError for the
    source, SettingError for a device or dtype that no model can have.
    """
    from loopscope.models.hub import commit_of
    from loopscope.models.placement import device_of, dispatch, plan_placement
    from loopscope.models.special_tokens import settle
    from loopscope.text import load_tokenizer, read_text_files

    dtype = torch.float32 if dtype is None else dtype
    main = None if device is None else usable_device(device)
    if max_memory is not None and device_map is None:
        raise SettingError("max_memory is for device_map='auto'; give both or neither")
    if dtype not in FLOATS:
        raise SettingError(f"dtype must be one of {', '.join(map(str, FLOATS))}; {dtype!r} was given")
    folder = find_checkpoint(source, revision)
    raw = read_json(folder / "config.json")
    stored = open_tensors(folder, pickled=family_of(raw) == "parcae")
    tokenizer, texts = load_tokenizer(folder), read_text_files(folder)
    config = settle(config_from_dict(raw, stored.keys()), tokenizer, texts, str(source))
    with unfilled():
        core = family_class(config.family)(config)
    if device_map is None:
        _fill(core, stored, lambda name: main or torch.device("cpu"), dtype)
    else:
        placement, main = plan_placement(core, device_map, main, dtype, max_memory)
        _fill(core, stored, lambda name: device_of(name, placement, main), dtype)
        dispatch(core, placement, main)
    core.tokenizer, core.text_files = tokenizer, texts
    core.source, core.revision = str(source), commit_of(folder)
    return core.eval().requires_grad_(False)


def usable_device(device: str | int | torch.device) -> torch.device:
    """The device, after one number was put there and read back. Raises SettingError."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch built without CUDA
        first = "it holds no values" if str(device) == "meta" else (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingError(f"the device {str(device)!r} cannot be used here: {first}") from error
    return found


def _fill(core: LoopedCore, stored: dict[str, Stored], where: Callable[[str], torch.device], dtype: torch.dtype) -> None:
    """Put tensors into a model built on the meta device: each parameter is made once, where it stays, and filled piece by piece."""
    names = core.official_names(core.config)
    check_tensors(core, stored)
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters()}
    for ours, group in names.items():
        parts = [stored[theirs] for theirs in group]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape
        tensor, row = torch.empty(shape, device=where(ours), dtype=dtype), 0
        for part in parts:
            part.load_into(tensor.narrow(0, row, part.shape[0]) if len(parts) > 1 else tensor)
            row += part.shape[0] if len(parts) > 1 else 0
        module, _, leaf = ours.rpartition(".")
        setattr(core.get_submodule(module), leaf, torch.nn.Parameter(tensor.reshape(shapes[ours]), requires_grad=False))


def check_tensors(core: LoopedCore, stored: dict[str, Stored]) -> None:
    """Raises CheckpointError unless these tensors, by name and shape, are those of the model's config. No weight is read."""
    check_names(core, stored)
    if "freqs_cis" in stored:
        _check_rotary(core, stored["freqs_cis"])
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters()}
    for ours, group in core.official_names(core.config).items():
        _check_shape(core, ours, [stored[theirs] for theirs in group], shapes[ours])


def check_names(core: LoopedCore, stored: dict[str, Stored]) -> None:
    """Raises CheckpointError unless these are the tensors that the model's config asks for."""
    wanted = [theirs for group in core.official_names(core.config).values() for theirs in group]
    missing = [name for name in wanted if name not in stored]
    extra = sorted(set(stored) - set(wanted) - set(core.optional_names(core.config)))
    files = sorted({tensor.path for tensor in stored.values()})
    label = files[0] if len(files) == 1 else files[0].parent

    def some(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    if missing:
        hint = closest(missing[0], extra)
        raise CheckpointError(f"{label} lacks {len(missing)} of {len(wanted)} tensors of a {core.family} model: {some(missing)}"
                              + (f" (it has {hint})" if hint else ""))
    if extra:
        raise CheckpointError(f"{label} has {len(extra)} tensor{'s' * (len(extra) > 1)} that a {core.family} model of this config does not "
                              f"have: {some(extra)}")


def _check_rotary(core: LoopedCore, stored: Stored) -> None:
    """The official code rotates by this stored table, ours by one computed from the config: they must be the same."""
    config = core.config
    expected = (1, config.context, 1, config.d_head // 2, 2)
    if stored.shape != expected:
        raise CheckpointError(f"{stored.path}: tensor {stored.name} should be {list(expected)}, as config.json has it, "
                              f"found {list(stored.shape)}")
    if config.context < 2:
        return
    angles = rotary_angles(config.d_head, config.rope_theta, 2, config.rope_scaling)[1]
    table = stored.load(torch.device("cpu"), torch.float32)[0, 1, 0]
    if not torch.allclose(table, torch.stack((angles.cos(), angles.sin()), -1).float(), atol=1e-2):  # it may be stored in bfloat16
        raise CheckpointError(f"{stored.path}: tensor {stored.name} was made with other rotary frequencies than config.json's "
                              f"(theta {config.rope_theta:g}, scaling {config.rope_scaling}); one of the two is wrong")


def _check_shape(core: LoopedCore, ours: str, group: list[Stored], shape: tuple[int, ...]) -> None:
    """Raises CheckpointError unless the official tensors make up our parameter, each with the size that it should have."""
    probe = torch.empty(shape, device="meta")
    official = core.to_official(ours, probe, core.config)
    sizes = split_sizes(core, ours, official) if len(group) > 1 else [official.shape[0]]
    for tensor, expected in zip(group, official.split(sizes)):
        if tensor.shape != tuple(expected.shape):
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} should be {list(expected.shape)}, as config.json has it, "
                                  f"found {list(tensor.shape)}")


def split_sizes(core: LoopedCore, name: str, tensor: torch.Tensor) -> list[int]:
    """Rows of each official tensor of a parameter that packs several."""
    config = core.config
    if name.endswith("attn.qkv.weight"):
        return [config.n_heads * config.d_head, config.n_kv_heads * config.d_head, config.n_kv_heads * config.d_head]
    parts = 4 if name.endswith("attn.gqkv.weight") else 2
    return [tensor.shape[0] // parts] * parts
