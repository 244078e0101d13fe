"""Reading and writing checkpoints: config.json and safetensors only, nothing that came with them is executed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopscope.errors import CheckpointError, UnknownModelError, closest
from loopscope.models.registry import config_from_dict, family_class

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

SHIPPED = Path(__file__).resolve().parent.parent / "tiny" / "weights"


def shipped_models() -> list[str]:
    """Names of the models that come with the project."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def find_checkpoint(source: str | os.PathLike) -> Path:
    """A shipped model's name or a local folder -> the folder. Raises UnknownModelError or CheckpointError."""
    shipped = shipped_models()
    if str(source) in shipped:
        return SHIPPED / str(source)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder")
        return folder
    hint = closest(str(source), shipped)
    raise UnknownModelError(f"{str(source)!r} is neither a shipped model ({', '.join(shipped) or 'none'}) nor a folder"
                            + (f"; did you mean {hint}?" if hint else ""))


def read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(data).__name__}")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; an index, if there is one, is checked for missing shards."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing or not shards:
            raise CheckpointError(f"{index} names {len(shards)} shards; missing: {', '.join(missing) or 'all'}")
        return [folder / name for name in shards]
    files = sorted(folder.glob("*.safetensors"))
    weights = [f for f in files if f.name in ("model.safetensors", "weights.safetensors")] or files
    if not weights:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise CheckpointError(f"{folder} has no *.safetensors file (found: {found}); pickled weights are never loaded")
    if len(weights) > 1:
        raise CheckpointError(f"{folder} has {len(weights)} safetensors files and no model.safetensors.index.json to order them")
    return weights


def load_core(source: str | os.PathLike, device: str | torch.device | None = None,
              dtype: torch.dtype | None = None) -> LoopedCore:
    """A LoopedCore in evaluation mode, with its tokenizer where the folder holds one. Default dtype: float32."""
    from loopscope.text import load_tokenizer

    folder = find_checkpoint(source)
    config = config_from_dict(read_json(folder / "config.json"))
    with torch.device("meta"):
        core = family_class(config.family)(config)
    _fill(core, weight_files(folder), torch.device(device or "cpu"), dtype or torch.float32)
    core.tokenizer = load_tokenizer(folder)
    core.source = str(source)
    return core.eval().requires_grad_(False)


def _fill(core: LoopedCore, files: list[Path], device: torch.device, dtype: torch.dtype) -> None:
    """Stream tensors from safetensors files into a model built on the meta device."""
    from safetensors import SafetensorError, safe_open

    names = core.official_names(core.config)
    optional = core.optional_names(core.config)
    wanted = {theirs for group in names.values() for theirs in group}
    handles, where = [], {}
    try:
        for path in files:
            handle = safe_open(path, framework="pt")
            handles.append(handle)
            where |= {name: (path, handle) for name in handle.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file (truncated or corrupt?): {error}") from error
    missing, extra = sorted(wanted - set(where)), sorted(set(where) - wanted - set(optional))
    label = files[0] if len(files) == 1 else files[0].parent
    if missing:
        hint = closest(missing[0], extra)
        raise CheckpointError(f"{label} lacks {len(missing)} of {len(wanted)} tensors of a {core.family} model: "
                              f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}" + (f" (it has {hint})" if hint else ""))
    if extra:
        raise CheckpointError(f"{label} has {len(extra)} tensors a {core.family} model does not have: "
                              f"{', '.join(extra[:4])}{' ...' if len(extra) > 4 else ''}")
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters()}
    for ours, group in names.items():
        parts = []
        for theirs in group:
            path, handle = where[theirs]
            try:
                parts.append(handle.get_tensor(theirs).to(device=device, dtype=dtype))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(f"{path}: tensor {theirs} cannot be read: {error}") from error
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if tensor.numel() != torch.Size(shapes[ours]).numel() or (tensor.ndim == len(shapes[ours]) and tuple(tensor.shape) != shapes[ours]):
            found = " + ".join(str(list(p.shape)) for p in parts)
            raise CheckpointError(f"{path}: {' + '.join(group)} should make {list(shapes[ours])}, found {found}")
        module, _, leaf = ours.rpartition(".")
        setattr(core.get_submodule(module), leaf, torch.nn.Parameter(tensor.reshape(shapes[ours]), requires_grad=False))


def official_state(core: LoopedCore) -> dict[str, torch.Tensor]:
    """The model's tensors under their official names."""
    own = dict(core.named_parameters())
    to_official = getattr(core, "to_official", lambda name, tensor, config: tensor)
    out = {}
    for ours, group in core.official_names(core.config).items():
        tensor = to_official(ours, own[ours].detach(), core.config)
        sizes = _split_sizes(core, ours, tensor) if len(group) > 1 else [tensor.shape[0]]
        out |= dict(zip(group, (t.contiguous() for t in tensor.split(sizes))))
    return out


def _split_sizes(core: LoopedCore, name: str, tensor: torch.Tensor) -> list[int]:
    config = core.config
    if name.endswith("attn.qkv.weight"):
        return [config.n_heads * config.d_head, config.n_kv_heads * config.d_head, config.n_kv_heads * config.d_head]
    return [tensor.shape[0] // 2] * 2


def save_checkpoint(core: LoopedCore, folder: str | os.PathLike) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; each appears under its name only when complete."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        save_file(official_state(core), Path(part) / "model.safetensors", metadata={"format": "pt"})
        (Path(part) / "config.json").write_text(json.dumps(dict(core.config.raw), indent=1) + "\n", encoding="utf-8")
        if core.tokenizer is not None:
            core.tokenizer.save(str(Path(part) / "tokenizer.json"))
        for name in sorted(os.listdir(part), reverse=True):  # weights before config: a folder with config.json is complete
            os.replace(Path(part) / name, folder / name)
    return folder
