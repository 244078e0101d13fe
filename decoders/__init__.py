"""Decoders: one file each, all through `recur` and one DepthCache, all lossless unless their label says otherwise.

    from decoders import Wavefront

Imported on first use, so that `import decoders` costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopscope.lazy import lazy

_LAZY = {
    "Autoregressive": "decoders.autoregressive",
    "BatchGeneration": "decoders.generation",
    "Calls": "decoders.generation",
    "DASWave": "decoders.das_wave",
    "Decoder": "decoders.decoder",
    "Findings": "decoders.findings",
    "DraftThenVerify": "decoders.draft_then_verify",
    "Generation": "decoders.generation",
    "LoopSpec": "decoders.loopspec",
    "Plan": "decoders.plan",
    "PromptLookup": "decoders.prompt_lookup",
    "Sampling": "decoders.sampling",
    "Seconds": "decoders.generation",
    "Stream": "decoders.streaming",
    "Wavefront": "decoders.wavefront",
    "plan": "decoders.plan",
}

if TYPE_CHECKING:
    from decoders.autoregressive import Autoregressive
    from decoders.das_wave import DASWave
    from decoders.decoder import Decoder
    from decoders.draft_then_verify import DraftThenVerify
    from decoders.findings import Findings
    from decoders.generation import BatchGeneration, Calls, Generation, Seconds
    from decoders.loopspec import LoopSpec
    from decoders.plan import Plan, plan
    from decoders.prompt_lookup import PromptLookup
    from decoders.sampling import Sampling
    from decoders.streaming import Stream
    from decoders.wavefront import Wavefront

__all__ = ["Autoregressive", "BatchGeneration", "Calls", "DASWave", "Decoder", "DraftThenVerify", "Findings", "Generation",
           "LoopSpec", "Plan", "PromptLookup", "Sampling", "Seconds", "Stream", "Wavefront", "plan"]

__getattr__, __dir__ = lazy(__name__, _LAZY)
