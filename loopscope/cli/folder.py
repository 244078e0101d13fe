"""A run folder appears under its name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopscope.errors import RunFolderError


@contextmanager
def run_folder(out: str | os.PathLike) -> Iterator[Path]:
    """Yields a folder OUT.part-XXXX beside OUT; renames it to OUT at the end, removes it if anything goes wrong.

    Raises RunFolderError where OUT exists already (another run is never overwritten) or cannot be made.
    """
    out = Path(os.path.abspath(os.path.expanduser(out)))
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{out.name}.part-", dir=out.parent))
    except OSError as error:
        raise RunFolderError(f"{out} cannot be made: {error.strerror or error}; choose another --out") from error
    try:
        part.chmod(0o777 & ~_umask())  # mkdtemp's folders are private; a finished run is an ordinary folder
        yield part
        refuse_existing(out)  # another run may have taken the name meanwhile
        try:
            os.rename(part, out)
        except OSError as error:
            raise RunFolderError(f"{out} cannot be made: {error.strerror or error}; choose another --out") from error
    finally:
        if part.exists():
            shutil.rmtree(part, ignore_errors=True)


def refuse_existing(out: str | os.PathLike) -> None:
    """Another run is never overwritten: RunFolderError where `out` exists."""
    out = Path(os.path.abspath(os.path.expanduser(out)))
    if os.path.lexists(out):
        raise RunFolderError(f"{out} exists; choose another --out")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
