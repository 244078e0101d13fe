"""loopscope: look inside looped (weight-shared, depth-recurrent) language models, and decode them fast and losslessly.

Everything here is imported on first use: `import loopscope` costs no torch and no transformer-lens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopscope.lazy import lazy

__version__ = "0.1.0"

_LAZY = {
    "load": "loopscope.models.loader",
    "from_bridge": "loopscope.bridge",
    "LoopedCore": "loopscope.models.looped",
    "LoopedModel": "loopscope.models.hooked",
    "LoopedConfig": "loopscope.models.config",
    "DepthCache": "loopscope.cache",
    "ReadPolicy": "loopscope.rows",
    "LoopscopeError": "loopscope.errors",
    "prompts": "loopscope.tiny.prompts",
}

if TYPE_CHECKING:
    from loopscope.bridge import from_bridge
    from loopscope.cache import DepthCache
    from loopscope.errors import LoopscopeError
    from loopscope.models.loader import load
    from loopscope.models.config import LoopedConfig
    from loopscope.models.hooked import LoopedModel
    from loopscope.models.looped import LoopedCore
    from loopscope.rows import ReadPolicy
    from loopscope.tiny.prompts import prompts

__all__ = [*_LAZY]

__getattr__, __dir__ = lazy(__name__, _LAZY)
