"""Every figure of a finished run again, from its tables alone: no model, no GPU, no network."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.errors import LoopscopeError, RunFolderError
from loopscope.records import read_table

if TYPE_CHECKING:
    import pandas as pd


# the columns of docs/tables.md that hold words; all others hold numbers or truth values
_WORDS = {"model", "task", "start", "null", "channel", "metric", "policy", "control", "decoder", "basis", "part", "shape", "event", "token",
          "fidelity", "sampling", "reference", "cause", "note", "target", "against", "branch", "top_text",
          "lens", "property", "labels", "site", "corrupted_token"}
_UNDRAWABLE = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


def read_tables(run_dir: str | os.PathLike) -> dict[str, pd.DataFrame]:
    """RUN/tables/*.parquet by name. Raises RunFolderError for a folder without tables, with a broken one, or with text for a number."""
    from figures.gallery import TABLES

    folder = Path(run_dir) / "tables"
    files = sorted(folder.glob("*.parquet"))
    if not files:
        state = "is not a folder" if not Path(run_dir).is_dir() else "has no tables/*.parquet"
        raise RunFolderError(
            f"{run_dir} {state}: nothing to draw. Give the folder that `loopscope report` wrote (it holds tables/ and report.html)"
        )
    tables = {file.stem: read_table(file)[0] for file in files}
    for file in files:
        if file.stem in TABLES:
            _check_numbers(tables[file.stem], file)
    return tables


def _check_numbers(frame: pd.DataFrame, file: Path) -> None:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    for name, column in frame.items():
        if name in _WORDS or is_numeric_dtype(column) or is_bool_dtype(column):
            continue
        wrong = next((value for value in column if value is not None and not isinstance(value, Number)), None)
        if wrong is not None:
            raise RunFolderError(f"{file} should have numbers in the column {name}, found {str(wrong)[:60]!r}")


@contextmanager
def drawing(run_dir: str | os.PathLike) -> Iterator[None]:
    """What a table with impossible values does to a figure, as one RunFolderError: tables are read from files that anyone may edit."""
    try:
        yield
    except RunFolderError:
        raise
    except (LoopscopeError, *_UNDRAWABLE) as error:
        what = str(error) if isinstance(error, LoopscopeError) else f"{type(error).__name__}: {error}"
        raise RunFolderError(f"{Path(run_dir) / 'tables'} cannot be drawn: {what}") from error


@contextmanager
def staged(folder: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty folder; at the end, and only if nothing went wrong, its files take their places in `folder`."""
    folder, there = Path(folder), Path(folder).is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".redraw-", dir=folder))
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be drawn into: {error.strerror or error}") from error
    try:
        yield part
        try:
            for file in sorted(path for path in part.rglob("*") if path.is_file()):  # figures before the report that shows them
                target = folder / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be drawn into: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if not there:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if nothing was drawn into it


def redraw(run_dir: str | os.PathLike, out: str | os.PathLike | None = None) -> list[Path]:
    """Draw every figure of a run folder into `out` (default: RUN/figures) and return the files written.

    Tables this version has no figure for are left alone. Raises RunFolderError for a missing or broken table, naming it; no
    figure is replaced before all are drawn.
    """
    from figures import save
    from figures.gallery import plates

    tables, target = read_tables(run_dir), Path(out) if out is not None else Path(run_dir) / "figures"
    written = []
    with staged(target) as part, drawing(run_dir):
        for plate in plates(tables):
            written += save(plate.draw(), plate.frame, part, plate.name)
    return [target / file.name for file in written]
