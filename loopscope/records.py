"""Results: frozen, tidy, saved as parquet beside a manifest, and drawn without a model.

A result is a pandas frame with one row per observation (units in the column name) and a few facts about how it was
made. Files appear under their final name only when complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.errors import RunFolderError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
_VERSIONS = ("torch", "transformers", "transformer-lens", "numpy", "pandas", "scipy", "matplotlib", "seaborn")


@dataclass(frozen=True, eq=False)
class Result:
    """One tidy table and how it was made. Subclasses set `kind` (the table's file name) and `columns` (its schema)."""

    frame: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "result"
    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        missing = [c for c in self.columns if c not in self.frame.columns]
        if missing:
            found = ", ".join(map(str, self.frame.columns))
            raise RunFolderError(f"a {self.kind} table needs the columns {', '.join(missing)}; found {found}")

    def to_frame(self) -> pd.DataFrame:
        """The tidy table, one row per observation (a copy)."""
        return self.frame.copy()

    def save(self, folder: str | os.PathLike) -> Path:
        """Write FOLDER/<kind>.parquet (the facts travel in its metadata)."""
        return write_table(self.frame, Path(folder) / f"{self.kind}.parquet", self.meta)

    @classmethod
    def load(cls, folder: str | os.PathLike):
        """Read what `save` wrote. Raises RunFolderError for a missing, broken or foreign table."""
        frame, meta = read_table(Path(folder) / f"{cls.kind}.parquet")
        return cls(frame, meta)

    def plot(self, **options):
        """The result's figure (matplotlib Figure), drawn by the room above: `figures.draw(kind, frame)`."""
        return import_module("figures").draw(self.kind, self.frame, **options)

    def _repr_html_(self) -> str:
        """The figure and the head of the table, for Jupyter; an empty table has no figure, nor has every kind one."""
        import base64
        import io

        if self.frame.empty:
            return f"<p>{self.kind}: no rows</p>{self.frame.to_html(index=False)}"
        if self.kind not in import_module("figures").kinds():
            return f"<p>{self.kind}: {len(self.frame)} rows</p>{self.frame.head(20).to_html(index=False)}"
        figure = self.plot()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        image = base64.b64encode(buffer.getvalue()).decode()
        return (f'<img alt="{self.kind}" src="data:image/png;base64,{image}"/>'
                f"<details><summary>{len(self.frame)} rows</summary>{self.frame.head(20).to_html(index=False)}</details>")


def write_table(frame: pd.DataFrame, path: Path, meta: Mapping[str, Any] | None = None) -> Path:
    """Parquet under its final name only when complete. Raises RunFolderError (for instance on a full disk)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    facts = {"loopscope": json.dumps({"schema": SCHEMA_VERSION, **dict(meta or {})}, default=str)}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **{k.encode(): v.encode() for k, v in facts.items()}})
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, part)
        os.replace(part, path)
    except OSError as error:
        _discard(part)
        raise RunFolderError(f"{path} could not be written: {error.strerror or error}") from error
    return path


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and its facts, as write_table wrote them. Raises RunFolderError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{path} cannot be read as a parquet table: {error}") from error
    try:
        meta = json.loads((table.schema.metadata or {}).get(b"loopscope", b"{}"))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} has facts in its metadata that are not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise RunFolderError(f"{path} should have a JSON object of facts in its metadata, found {type(meta).__name__}")
    if meta.pop("schema", None) != SCHEMA_VERSION:
        raise RunFolderError(f"{path} was not written by this version of loopscope (schema {SCHEMA_VERSION} expected)")
    try:  # without the notes beside the columns, which may be damaged: columns say themselves what they hold
        return table.replace_schema_metadata(None).to_pandas(), meta
    except (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
        raise RunFolderError(f"{path} has a column that cannot be read, so the file is damaged: {error}") from error


def write_text(text: str, path: Path) -> Path:
    """A text file under its final name only when complete. Raises RunFolderError."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        _discard(part)
        raise RunFolderError(f"{path} could not be written: {error.strerror or error}") from error
    return path


def _discard(part: Path) -> None:
    """Remove what was half written. Where even that fails, as below a file, what is worth saying is why the write failed."""
    with contextlib.suppress(OSError):
        part.unlink()


def manifest(**facts: Any) -> dict[str, Any]:
    """What is needed to reproduce a run: versions, command, git commit, hardware, and the given facts."""
    import torch

    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"schema": SCHEMA_VERSION, "command": _command(), "git": _git_commit(),
            "python": platform.python_version(), "versions": versions,
            "hardware": {"machine": platform.machine(), "cpu": _cpu_name(), "cores": os.cpu_count(),
                         "threads": torch.get_num_threads(),
                         "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}, **facts}


def _command() -> str:
    """How this process was started, ready to be pasted: `loopscope probe ...`, or `python -m loopscope.cli probe ...`."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)  # of what `python -m` runs; a script has none
    start = [Path(sys.argv[0]).name] if module is None else ["python", "-m", module.name.removesuffix(".__main__")]
    return shlex.join([*start, *sys.argv[1:]])


def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
