"""Decoders: one file each, all through `recur` and one DepthCache, all lossless unless their label says otherwise."""

from __future__ import annotations

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.draft_then_verify import DraftThenVerify
from decoders.generation import Calls, Decoder, Generation, Seconds
from decoders.wavefront import Wavefront

__all__ = ["Autoregressive", "Calls", "DASWave", "Decoder", "DraftThenVerify", "Generation", "Seconds", "Wavefront"]
