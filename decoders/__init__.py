"""Decoders: one file each, all through `recur` and one DepthCache, all lossless unless their label says otherwise."""

from __future__ import annotations

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.generation import BatchGeneration, Calls, Generation, Seconds
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup
from decoders.sampling import Sampling
from decoders.streaming import Stream
from decoders.wavefront import Wavefront

__all__ = ["Autoregressive", "BatchGeneration", "Calls", "DASWave", "Decoder", "DraftThenVerify", "Generation", "LoopSpec",
           "PromptLookup", "Sampling", "Seconds", "Stream", "Wavefront"]
