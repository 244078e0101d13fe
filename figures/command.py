"""`python -m figures.NAME RUN_DIR --out FILE`: one figure of a finished run, from its saved tables alone.

    python -m figures.convergence runs/first --model tiny-huginn --out convergence.pdf
    python -m figures.speedup runs/first --model tiny-huginn --task maths --preset single --out speed.pdf
    python -m figures.schedule runs/first --model tiny-ouro --help

A figure file ends in `command.main(KIND)`, and what its `draw` takes by keyword are the options. No model is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import LoopscopeError, RunFolderError, SettingError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".svg", ".png")
TABLES = {  # kind -> its table, where the two have different names
    "speedup": "bench", "predicted_vs_measured": "plan", "schedule": "trace",
}
_MANY = ("dashboard", "claims", "join")  # kinds that are drawn from several tables at once
_PROBE, _INTERVENE = "loopscope probe MODEL --out {run}", "loopscope intervene MODEL --out {run}"
_BENCH, _REPORT = "loopscope bench MODEL --out {run}", "loopscope report --out {run}"
MAKERS = {  # table -> what makes it, for a reader whose run has none
    "convergence": _PROBE, "depth_lens": _PROBE, "settle": _PROBE, "prefix_channels": _INTERVENE, "prefix_effects": _INTERVENE,
    "depth_grid": _INTERVENE + " --grid", "bench": _BENCH, "acceptance": _BENCH, "acceptance_by_depth": _BENCH,
    "factorial": "loopscope factorial MODEL --out {run}", "grid": "loopscope grid MODEL --out {run}",
    **{kind: f"{_PROBE} --only {kind}" for kind in ("second_candidate", "agreement_runs", "linear_probe", "patching")},
}  # a probe that no command runs is named itself
_ROWS = {"model": "rows of this model", "task": "rows of this task", "start": "rows of this start state: keyed, zero, embedding",
         "decoder": "rows of this decoder, by its label", "metric": "which measure", "measure": "which measure",
         "published": "lay the papers' values over ours"}


def main(kind: str, arguments: Sequence[str] | None = None) -> int:
    """Draw `kind` as the command line says (default: sys.argv) and return the exit status; what is wrong is said in one line."""
    told = parser(kind).parse_args(arguments)
    try:
        suffix_of(told.out)  # before anything is drawn
        figure = figure_of(kind, told.run, told.preset, told.panels, **_given(kind, told))
        file = write(figure, told.out, told.preset)
    except LoopscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wide, tall = figure.get_size_inches()
    print(f"{file}  ({wide:.2f} x {tall:.2f} inches)")
    from figures.presets import PAGE_HEIGHT, PRESETS

    if not PRESETS[told.preset].words:
        print(f"caption: {figure.note.title}. {figure.note.caption}")
        if tall > PAGE_HEIGHT:
            print(f"note: taller than a page ({PAGE_HEIGHT:g} inches); choose rows (--task) or panels (--panels 1 2), or a wider preset")
    return 0


def parser(kind: str) -> argparse.ArgumentParser:
    """The command line of one figure: RUN_DIR, --out, --preset, --panels, and an option for every keyword of its `draw`."""
    from figures.presets import PRESETS

    module = _module(kind)
    if kind == "concept":
        about, run = "The idea in one picture.", {"nargs": "?", "help": "not needed: this figure has no data"}
    else:
        about, run = (module.__doc__ or "").strip().split("\n")[0], {"help": "the folder of a run: it holds tables/"}
    made = argparse.ArgumentParser(prog=f"python -m {module.__name__}", description=about, epilog=inspect.getdoc(module.draw),
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", metavar="RUN_DIR", **run)
    made.add_argument("--out", metavar="FILE", required=True, help=f"the file to write ({', '.join(SUFFIXES)}); replaced if it is there")
    made.add_argument("--preset", metavar="NAME", default="page",
                      help=f"{', '.join(PRESETS)}: its own size, a paper's single or double column, a notebook's output (default: page)")
    made.add_argument("--panels", metavar="N", type=int, nargs="+", help="with a preset: only these panels, from 1 in reading order")
    for name, default in _options(kind).items():
        flag, words = f"--{name.replace('_', '-')}", _ROWS.get(name, "")
        if isinstance(default, bool):
            made.add_argument(flag, action="store_true", help=words)
        else:
            number = isinstance(default, int) or name in ("ticks", "lag", "prompt")
            told = f"{words}{' ' * bool(words)}(default: {default})" if default is not None else words
            made.add_argument(flag, type=int if number else str, default=default, metavar=name.upper(), help=told)
    return made


def figure_of(kind: str, run: str | os.PathLike | None, preset: str = "page", panels: Sequence[int] | None = None, **options) -> Figure:
    """The figure `kind` of the run folder `run`, from its tables.

    options: `model` and `task` choose rows whether or not the figure itself knows them; the rest is its `draw`'s own.
    Raises RunFolderError for a folder without the table (saying what makes it) or with a broken one, SettingError for a choice that
    the table does not hold.
    """
    from figures import draw
    from figures.redraw import drawing

    if kind == "concept":
        return draw(kind, None, preset=preset, panels=panels, **options)
    tables = read(kind, run)
    model = options.pop("model", None) or _only_model(tables, kind)
    tables = _chosen(tables, "model", model, kind)
    task = options.get("task")
    if task is not None and "task" not in _keywords(kind):
        options.pop("task")
    tables = _chosen(tables, "task", task, kind)
    if "plan" in tables and "bench" in tables:
        from figures.predicted import remeasured

        tables["plan"] = remeasured(tables["plan"], tables["bench"])
    frame = tables if kind in _MANY else tables[TABLES.get(kind, kind)]
    if model and "model" in _keywords(kind):
        options["model"] = model
    try:
        return draw(kind, frame, preset=preset, panels=panels, **options)
    except SettingError as error:
        raise SettingError(str(error).replace("choose one, start=...", "choose one with --start")) from error
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        with drawing(run):
            raise error


def read(kind: str, run: str | os.PathLike | None) -> dict[str, pd.DataFrame]:
    """The tables that a figure is drawn from, by name; for those of several tables, whatever the run holds. Raises RunFolderError."""
    from figures.redraw import _check_numbers, read_tables
    from loopscope.records import read_table

    wanted = TABLES.get(kind, kind)
    if not Path(run).is_dir():
        raise RunFolderError(f"{run} is not a folder; give the folder of a run, such as `loopscope report --out {run}` makes")
    held = sorted(path.stem for path in (Path(run) / "tables").glob("*.parquet"))
    if kind not in _MANY and wanted not in held:
        raise RunFolderError(f"{run} has no table {wanted}; it holds {', '.join(held) or 'none'}. Make it with: {maker(wanted, run)}")
    if kind in _MANY and not held:
        raise RunFolderError(f"{run} has no tables, and {kind} is drawn from several. Make them with: {_REPORT.format(run=run)}")
    if kind in _MANY:
        return read_tables(run)
    beside = ["bench"] if wanted == "plan" and "bench" in held else []  # a plan's measured side is averaged anew from its rows
    tables = {}
    for name in [wanted, *beside]:
        file = Path(run) / "tables" / f"{name}.parquet"
        tables[name] = read_table(file)[0]
        _check_numbers(tables[name], file)
    return tables


def maker(table: str, run: str | os.PathLike) -> str:
    """The command, or the call, that makes a table."""
    import probes

    if table not in MAKERS and table in probes.__all__:
        return f'probes.{table}(model, prompts).save("{run}/tables")'
    return MAKERS.get(table, _REPORT).format(run=run)


def suffix_of(out: str | os.PathLike) -> str:
    """".pdf", ".svg" or ".png". Raises SettingError for any other."""
    file = Path(out)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise SettingError(f"{file.name} should end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, which says what to write; found "
                           f"{file.suffix or 'no suffix'}")
    return suffix


def write(figure: Figure, out: str | os.PathLike, preset: str = "page") -> Path:
    """Save as the suffix of `out` says, under that name only when complete. The same figure gives the same bytes each time.

    PDF: fonts embedded as TrueType (Type 42). SVG: text as outlines. PNG: 150, 300 (paper) or 100 (notebook) dots per inch.
    Raises SettingError for an unknown suffix, RunFolderError where the file cannot be written.
    """
    from figures import METADATA, style
    from figures.presets import PRESETS

    file, kind, part = Path(out), suffix_of(out)[1:], None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=".figure-", suffix=f".{kind}", dir=file.parent)
        os.close(handle)
        with style.context():
            figure.savefig(part, format=kind, dpi=PRESETS[preset].dpi, metadata=METADATA[kind])
        os.chmod(part, 0o666 & ~_umask())  # a scratch file is its owner's alone; a figure is as open as any other file
        os.replace(part, file)
    except OSError as error:
        raise RunFolderError(f"{file} could not be written: {error.strerror or error}") from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
    return file


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _module(kind: str):
    from figures import _MODULES

    return import_module(f"figures.{_MODULES[kind]}")


def _keywords(kind: str) -> dict[str, Any]:
    """What a figure's `draw` takes by keyword, with defaults."""
    found = inspect.signature(_module(kind).draw).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}


def _options(kind: str) -> dict[str, Any]:
    chosen = {} if kind in ("concept", "claims") else {"model": None, "task": None}
    return {**chosen, **({"model": None} if kind == "claims" else {}), **_keywords(kind)}


def _given(kind: str, told: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(told, name) for name, default in _options(kind).items() if getattr(told, name) != default}


def _chosen(tables: Mapping[str, pd.DataFrame], column: str, value: str | None, kind: str) -> dict[str, pd.DataFrame]:
    """The rows where `column` is `value`; tables without the column stay whole. Raises SettingError where nothing is left.

    A figure of several tables does without those that have no such rows: a run need not have probed every task.
    """
    if value is None:
        return dict(tables)
    kept, held = {}, set()
    for name, frame in tables.items():
        if column in frame:
            held |= set(frame[column].astype(str))
            frame = frame[frame[column].astype(str) == value]
        if len(frame):
            kept[name] = frame
    if (held and value not in held) or not kept or (kind not in _MANY and TABLES.get(kind, kind) not in kept):
        raise SettingError(f"--{column} {value} is not in the table {', '.join(tables)}; it holds {', '.join(sorted(held))}")
    return kept


def _only_model(tables: Mapping[str, pd.DataFrame], kind: str) -> str | None:
    """The run's model where there is one; a figure of all models needs none. Raises SettingError where one must be chosen."""
    held = sorted({str(m) for t in tables.values() if "model" in t for m in t["model"].unique()})
    if len(held) > 1 and kind not in ("claims", "grid"):
        raise SettingError(f"the run holds {len(held)} models ({', '.join(held)}): choose one with --model")
    return held[0] if len(held) == 1 else None
