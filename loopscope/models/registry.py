"""Which class runs which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loopscope.errors import UnknownModelError
from loopscope.models.config import LoopedConfig

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

MODEL_TYPES = {"huginn_raven": "huginn", "ouro": "ouro"}


def family_class(family: str) -> type[LoopedCore]:
    """The LoopedCore subclass of a family. Imported on first use, so that a family costs nothing to the others."""
    from loopscope.models.huginn import HuginnCore
    from loopscope.models.ouro import OuroCore

    classes = {cls.family: cls for cls in (HuginnCore, OuroCore)}
    if family not in classes:
        raise UnknownModelError(f"no family {family!r}; known: {', '.join(sorted(classes))}")
    return classes[family]


def config_from_dict(raw: Mapping[str, Any]) -> LoopedConfig:
    """A LoopedConfig from an official config.json. Raises UnknownModelError for a model_type we do not run."""
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnknownModelError(f"config.json says model_type {model_type!r}, which is not supported; "
                                f"supported: {', '.join(sorted(MODEL_TYPES))}")
    return family_class(MODEL_TYPES[model_type]).read_config(raw)
