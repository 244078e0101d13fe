"""Figures: pure functions of frames, drawn without a model and without touching matplotlib's global state.

    figure = figures.draw("convergence", frame)          # a matplotlib Figure
    figures.save(figure, frame, "runs/first/figures", "convergence")   # PNG, SVG, PDF and the frame beside them

Nothing heavy is imported until something is drawn.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.errors import RunFolderError, SettingError, closest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# kind (a table's name, or a figure's own name) -> the module that draws it
_MODULES = {
    "convergence": "convergence",
    "depth_lens": "depth_lens",
    "settle": "settle",
    "attribution": "attribution",
    "head_attribution": "head_attribution",
    "block_lens": "block_lens",
    "layer_fixed_points": "layer_fixed_points",
    "linear_probe": "linear_probe",
    "patching": "patching",
    "trajectories": "trajectories",
    "token_grid": "heatmap",
    "head_stability": "head_stability",
    "depth_similarity": "depth_similarity",
    "second_candidate": "second_candidate",
    "agreement_runs": "agreement_runs",
    "prefix_channels": "prefix_channels",
    "prefix_effects": "prefix_effects",
    "depth_grid": "depth_grid",
    "acceptance": "acceptance",
    "acceptance_by_depth": "acceptance_by_depth",
    "bench": "speedup",
    "speedup": "speedup",
    "factorial": "factorial",
    "timing": "timing",
    "hops": "hops",
    "plan": "predicted",
    "miss": "misses",
    "predicted_vs_measured": "predicted",
    "trace": "schedule",
    "schedule": "schedule",
    "dashboard": "dashboard",
    "claims": "claims",
    "grid": "grid",
    "join": "join",
    "concept": "concept",
}
FORMATS = ("png", "svg", "pdf")
# dates and random ids out: a redrawn figure that shows the same data is the same file
METADATA = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}}


def kinds() -> tuple[str, ...]:
    """Every kind that `draw` knows: the tables of docs/tables.md, the dashboard, and the picture of the idea."""
    return tuple(_MODULES)


def modules() -> tuple[str, ...]:
    """Names of the files that draw, each of which is also a command."""
    return tuple(dict.fromkeys(_MODULES.values()))


def draw(kind: str, frame: pd.DataFrame | Mapping[str, pd.DataFrame] | None, *, preset: str = "page",
         panels: Sequence[int] | None = None, **options) -> Figure:
    """Draw one table as one figure.

    frame: the tidy table named `kind` (docs/tables.md gives columns and units); the dashboard takes a dict of tables,
    the concept picture None. options: `model`, `task`, `start` choose rows; each figure's module documents its own.
    published=True lays the papers' values over a figure that has any (figures.published.KINDS).
    preset: "page" (the figure's own size), "single" or "double" (a paper's columns; title and caption stay in `figure.note` only), or
    "notebook" (figures.presets). panels: with one of those, only these panels, counted from 1 in reading order.
    Raises SettingError for an unknown kind, an empty table, a missing column, or a choice the table does not hold.
    """
    if kind not in _MODULES:
        near = closest(kind, _MODULES)
        raise SettingError(f"no figure is called {kind!r}{f' (did you mean {near}?)' if near else ''}; known: {', '.join(_MODULES)}")
    from figures import presets, published, style

    chosen = presets.preset(preset)
    if options.get("published") and kind not in published.KINDS:
        raise SettingError(f"no published values can be laid over the {kind} figure; they can over {', '.join(published.KINDS)}")
    if not options.get("published"):
        options.pop("published", None)
    module = import_module(f"figures.{_MODULES[kind]}")
    with style.context(), style.room(chosen.room):
        figure = module.draw(frame, **options)
        presets.apply(figure, chosen, panels)
        # Lay out once, here: every later save would solve the same layout again, the slowest part of drawing.
        for _ in range(1 if preset == "page" else 2):  # colour bars of a figure that changed its size need a second turn
            figure.draw_without_rendering()
        figure.set_layout_engine(None)
        _rounded(figure)
    return figure


def _rounded(figure: Figure) -> None:
    """Places to a ten-millionth of the figure: the layout's solver leaves the last bits to chance, and an SVG's ids hang on every bit."""
    import numpy as np
    from matplotlib.transforms import Bbox

    for part in figure.subfigs:
        part.bbox_relative.set_points(np.round(part.bbox_relative.get_points(), 7))
    for ax in figure.axes:
        ax.set_position(Bbox(np.round(ax.get_position(original=True).get_points(), 7)))


def save(figure: Figure, frame: pd.DataFrame | Mapping[str, pd.DataFrame] | None, folder: str | os.PathLike, name: str) -> list[Path]:
    """Write NAME.png, NAME.svg, NAME.pdf and NAME.parquet (a dict of tables: NAME.TABLE.parquet each) into `folder`.

    The same figure gives the same bytes each time. Raises RunFolderError, leaving none of the files half written.
    """
    from figures import style
    from loopscope.records import write_table

    folder = Path(folder)
    tables = {} if frame is None else {f"{name}.{k}": f for k, f in frame.items()} if isinstance(frame, Mapping) else {name: frame}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    except OSError as error:
        raise RunFolderError(f"{folder} cannot hold figures: {error.strerror or error}") from error
    try:
        written = []
        with style.context():
            for kind in FORMATS:
                figure.savefig(scratch / f"{name}.{kind}", dpi=style.DPI, metadata=METADATA[kind])
                written.append(f"{name}.{kind}")
        for stem, table in tables.items():
            write_table(table, scratch / f"{stem}.parquet")
            written.append(f"{stem}.parquet")
        for file in written:  # everything is complete: now, and only now, the final names
            os.replace(scratch / file, folder / file)
        return [folder / file for file in written]
    except OSError as error:
        raise RunFolderError(f"the figure {name} could not be written to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
