"""Interventions: what happens if a shallow draft reads the verified prefix at another depth, or one activation is another run's.

    from interventions import prefix_channels, depth_grid, activation_patching

Imported on first use, so that `import interventions` costs no torch and no pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopscope.lazy import lazy

_LAZY = {
    "prefix_channels": "interventions.prefix",
    "PrefixChannelsResult": "interventions.prefix",
    "activation_patching": "interventions.patching",
    "Patch": "interventions.patching",
    "PatchingResult": "interventions.patching",
    "sum_pairs": "interventions.pairs",
    "depth_grid": "interventions.grid",
    "DepthGridResult": "interventions.grid",
    "paired_effects": "interventions.effects",
    "EffectsResult": "interventions.effects",
    "mature_v_verdict": "interventions.verdict",
    "Verdict": "interventions.verdict",
}

if TYPE_CHECKING:
    from interventions.effects import EffectsResult, paired_effects
    from interventions.grid import DepthGridResult, depth_grid
    from interventions.pairs import sum_pairs
    from interventions.patching import Patch, PatchingResult, activation_patching
    from interventions.prefix import PrefixChannelsResult, prefix_channels
    from interventions.verdict import Verdict, mature_v_verdict

__all__ = ["prefix_channels", "PrefixChannelsResult", "depth_grid", "DepthGridResult", "paired_effects", "EffectsResult",
           "mature_v_verdict", "Verdict", "activation_patching", "Patch", "PatchingResult", "sum_pairs"]

__getattr__, __dir__ = lazy(__name__, _LAZY)
