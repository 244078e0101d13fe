"""What decoders did with one prompt, event by event, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoders.decoder import Decoder
from loopscope.records import Result


@dataclass(frozen=True, eq=False)
class TraceResult(Result):
    """One row per event; tick counts block calls from 1, depth is the one reached, token is text (ids without a tokenizer)."""

    kind = "trace"
    columns = ("model", "task", "decoder", "tick", "position", "depth", "event", "token")


def trace(model, prompt: Any, decoders: Sequence[Decoder], task: str = "", max_new_tokens: int = 32, seed: int = 0, *,
          model_name: str | None = None, **options: Any) -> TraceResult:
    """The trace of every decoder on one prompt. options: what `generate` takes. Raises what `generate` raises."""
    import pandas as pd

    core = model.core
    name, frames = model_name or core.source or core.family, []
    for decoder in decoders:
        frame = decoder.generate(core, prompt, max_new_tokens=max_new_tokens, seed=seed, **options).trace_frame(core.tokenizer)
        frame = frame.assign(model=name, task=task, decoder=decoder.label, token=frame["token"].astype(str))
        frames.append(frame[list(TraceResult.columns)])
    return TraceResult(pd.concat(frames, ignore_index=True), {"max_new_tokens": max_new_tokens, "seed": seed})
