"""The figures of a run drawn and saved, on several cores where there are many: each is a pure function of its own rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from figures import save

if TYPE_CHECKING:
    from figures.gallery import Plate
    from figures.style import Note

_FEW = 12  # figures; a second process takes seconds to begin
_MOST = 4  # processes; each holds the plotting libraries


@dataclass(frozen=True)
class Drawn:
    """A saved figure: its files, its words, and its size in inches."""

    files: list[Path]
    note: Note
    size: tuple[float, float]


def drawn(plates: Iterable[Plate], folder: Path, published: bool = False, workers: int = 1) -> Iterator[Drawn]:
    """Draw every plate into FOLDER, in their order. published: with the papers' values; workers: processes, where there are enough plates.

    Raises what drawing and saving raise.
    """
    plates = list(plates)
    workers = min(workers, _MOST, len(plates) // (_FEW // 2))
    if workers < 2:
        yield from (_one(plate, folder, published) for plate in plates)
        return
    with _processes(workers) as pool:
        yield from pool.map(_one, plates, [folder] * len(plates), [published] * len(plates))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one(plate: Plate, folder: Path, published: bool) -> Drawn:
    figure = plate.draw(published)
    width, height = figure.get_size_inches()
    return Drawn(save(figure, plate.frame, folder, plate.name), figure.note, (float(width), float(height)))


@contextmanager
def _processes(workers: int):
    """Fresh processes (a fork of one that runs threads may hang), which leave Ctrl-C to their parent."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
