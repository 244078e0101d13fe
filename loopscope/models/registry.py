"""Which class runs which checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopscope.errors import UnknownModelError
from loopscope.models.config import LoopedConfig

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

# Family -> (module, class). Imported on first use, so that a family costs nothing to the others.
CLASSES = {
    "dory": ("loopscope.models.dory", "DoryCore"),
    "hrm_text": ("loopscope.models.hrm_text", "HrmTextCore"),
    "huginn": ("loopscope.models.huginn", "HuginnCore"),
    "nanbeige": ("loopscope.models.nanbeige", "NanbeigeCore"),
    "ouro": ("loopscope.models.ouro", "OuroCore"),
    "parcae": ("loopscope.models.parcae", "ParcaeCore"),
    "raven": ("loopscope.models.raven", "RavenCore"),
}
# model_type (Parcae's config.json has a class name instead) -> family. Retrofits share Huginn's: see family_of.
MODEL_TYPES = {"dory": "dory", "hrm_text": "hrm_text", "huginn_raven": "huginn", "nanbeige": "nanbeige", "ouro": "ouro",
               "ParcaeConfig": "parcae"}
# What people may well try, and why it does not run here.
REFUSED = {
    "inkling": "it is multimodal, a mixture of experts with short convolutions, and every pass restarts from the state before the loop "
               "with gated messages from the pass before: there is no state that one block takes from depth to depth",
}


def family_class(family: str) -> type[LoopedCore]:
    """The LoopedCore subclass of a family. Raises UnknownModelError."""
    if family not in CLASSES:
        raise UnknownModelError(f"no family {family!r}; known: {', '.join(sorted(CLASSES))}")
    module, name = CLASSES[family]
    return getattr(import_module(module), name)


def family_of(raw: Mapping[str, Any], names: Collection[str] | None = None) -> str:
    """The family of a checkpoint, from its config.json and, if given, its tensor names. Raises UnknownModelError."""
    raw = serialised(raw)
    model_type = raw.get("model_type") or raw.get("_class_name")
    if isinstance(model_type, str) and model_type in MODEL_TYPES:
        family = MODEL_TYPES[model_type]
        if family == "huginn":
            from loopscope.models.raven import is_retrofit

            return "raven" if is_retrofit(raw, names) else family
        return family
    why = next((reason for start, reason in REFUSED.items() if str(model_type).lower().startswith(start)), None)
    if why:
        raise UnknownModelError(f"config.json says model_type {model_type!r}, which is not supported, because {why}")
    raise UnknownModelError(f"config.json says model_type {model_type!r}, which is not supported; "
                            f"supported: {', '.join(sorted(MODEL_TYPES))}")


def config_from_dict(raw: Mapping[str, Any], names: Collection[str] | None = None) -> LoopedConfig:
    """A LoopedConfig from an official config.json and, where that leaves the wiring open, the checkpoint's tensor names.

    Raises UnknownModelError for a model_type we do not run, CheckpointError for a config that makes no sense.
    """
    raw = serialised(raw)
    return family_class(family_of(raw, names)).config_of(raw, names)


def serialised(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config itself, where a file keeps it as `to_dict` beside the constructor's arguments, as our reference data does."""
    inner = raw.get("to_dict")
    return inner if "model_type" not in raw and isinstance(inner, Mapping) else raw
