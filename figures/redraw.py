"""Every figure of a finished run again, from its tables alone: no model, no GPU, no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.errors import LoopscopeError, RunFolderError
from loopscope.records import read_table

if TYPE_CHECKING:
    import pandas as pd


def read_tables(run_dir: str | os.PathLike) -> dict[str, pd.DataFrame]:
    """RUN/tables/*.parquet by name. Raises RunFolderError for a folder without tables, or with a broken one."""
    folder = Path(run_dir) / "tables"
    files = sorted(folder.glob("*.parquet"))
    if not files:
        state = "is not a folder" if not Path(run_dir).is_dir() else "has no tables/*.parquet"
        raise RunFolderError(
            f"{run_dir} {state}: nothing to draw. Give the folder that `loopscope report` wrote (it holds tables/ and report.html)"
        )
    return {file.stem: read_table(file)[0] for file in files}


def redraw(run_dir: str | os.PathLike, out: str | os.PathLike | None = None) -> list[Path]:
    """Draw every figure of a run folder into `out` (default: RUN/figures) and return the files written.

    Tables this version has no figure for are left alone. Raises RunFolderError for a missing or broken table, naming it.
    """
    from figures import save
    from figures.gallery import plates

    tables, target = read_tables(run_dir), Path(out) if out is not None else Path(run_dir) / "figures"
    written = []
    for plate in plates(tables):
        try:
            figure = plate.draw()
        except LoopscopeError as error:
            raise RunFolderError(f"{Path(run_dir) / 'tables'}: the figure {plate.name} cannot be drawn: {error}") from error
        written += save(figure, plate.frame, target, plate.name)
    return written
