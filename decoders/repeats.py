"""Repeats of one decode are one observation: they do the very same work, so that what differs between them is the machine's.

Beside a metronome (decoders/metronome.py) seconds are told at its median pace, and the median repeat counts. Without one the fastest
does, since what disturbs a decode only ever adds to its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_SECONDS = ("prefill_seconds", "decode_seconds")


def has_beat(frame: pd.DataFrame) -> bool:
    """Whether every row says how fast the machine was around it (column beat)."""
    return "beat" in frame and len(frame) > 0 and bool(frame["beat"].notna().all())


def at_one_pace(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with their seconds at the metronome's median pace, that of each model; as they are where there was none."""
    if not has_beat(frame):
        return frame
    usual = frame.groupby("model")["beat"].transform("median") if "model" in frame else frame["beat"].median()
    pace = frame["beat"] / usual
    return frame.assign(**{name: frame[name] / pace for name in _SECONDS if name in frame})


def together(frame: pd.DataFrame, by: Sequence[str], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """One row for all repeats of each group: the median of what `at_one_pace` gave, or the fastest. columns: default, all numbers."""
    cells = frame.groupby(list(by), observed=True)
    cells = cells if columns is None else cells[list(columns)]
    return (cells.median if has_beat(frame) else cells.min)(numeric_only=True)
