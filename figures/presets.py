"""Figures for paper and for notebooks: the same figure, laid out again for a column's width.

    figures.draw("convergence", frame, preset="single")     # one column of a two-column paper
    figures.draw("convergence", frame, preset="double")     # the whole width of its page
    figures.draw("convergence", frame, preset="notebook")   # dark on light, as wide as a cell's output

Every figure file lays its panels out for a page of its own. A preset takes that figure before it has been laid out: panels flow,
in reading order, into rows as wide as the column; type, lines and marks take their printed size; in a paper, title and caption
leave the figure, since a paper sets its own (they stay in `figure.note`). What a panel holds is not touched.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Preset:
    """width: inches, of a paper exactly, else at most (inf: the figure's own). scale: of type, lines and marks. words: title and
    caption stay on the figure. dpi: of a PNG."""

    name: str
    width: float = inf
    scale: float = 1.0
    words: bool = True
    dpi: int = 150

    @property
    def room(self) -> float:
        """Inches across at the figure files' own type size: what one that counts its columns may fill."""
        return self.width / self.scale


PRESETS = {
    "page": Preset("page"),
    "single": Preset("single", 3.35, 0.78, False, 300),  # 85 mm, the column of most two-column journals
    "double": Preset("double", 7.0, 0.78, False, 300),  # 178 mm, both columns
    "notebook": Preset("notebook", 9.0, 0.92, True, 100),
}
PAGE_HEIGHT = 9.4  # inches that a letter or A4 page leaves
_TIGHTEST = 0.72  # of its own width, at the preset's type size, that a panel can be pressed to before the row breaks
_LOOSEST = 1.6  # and that it can be stretched to
_PRESSED = 0.72  # what a panel alone in its row can be pressed to beyond that
_SMALLEST = 5.0  # points; print below is not read
_NARROW = 3.6  # inches; in a panel below, long names of rows take two lines
_LONG = 16  # letters of such a name in one line
_LOWEST = 1.05  # inches of a panel's height, labels included


def preset(name: str) -> Preset:
    """The preset of that name. Raises SettingError."""
    if name not in PRESETS:
        near = closest(name, PRESETS)
        raise SettingError(f"no preset is called {name!r}{f' (did you mean {near}?)' if near else ''}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def apply(fig: Figure, chosen: Preset, panels: Sequence[int] | None = None) -> None:
    """Lay `fig` out for `chosen`, in place; of its panels only those counted in `panels` (from 1, in reading order).

    Raises SettingError where a panel cannot be made narrow enough to be read, and for a panel that is not there.
    """
    from figures import style

    if chosen.width == inf:
        if panels is not None:
            raise SettingError(f"panels can be chosen with a preset only: {', '.join(p for p in PRESETS if p != chosen.name)}")
        return
    if panels is not None and fig.subfigs:
        raise SettingError("this figure is made of parts that belong together: its panels cannot be chosen")
    width, height = fig.get_size_inches()
    if chosen.words and width * chosen.scale < chosen.width:  # a small figure is not blown up
        chosen = replace(chosen, width=width * chosen.scale)
    _, _, _, share = fig.get_layout_engine().get()["rect"]
    inner = list(fig.subfigs) or [fig]
    heights = [_flow(part, width, tall, chosen, panels) for part, tall in zip(inner, _shares(inner, height * share))]
    if len(inner) > 1:
        inner[0]._subplotspec.get_gridspec().set_height_ratios(heights)
    _shrink(fig, chosen.scale)
    fig.set_size_inches(chosen.width, sum(heights))
    style.furnish(fig, chosen)


def _shares(inner, height: float) -> list[float]:
    """Inches of height of every subfigure, from the ratios that they were made with."""
    if len(inner) == 1:
        return [height]
    ratios = inner[0]._subplotspec.get_gridspec().get_height_ratios()
    return [height * r / sum(ratios) for r in ratios]


@dataclass
class _Panel:
    ax: Axes
    row: int
    width: float  # inches, in the figure as its file laid it out
    height: float


def _panels(part, width: float, height: float) -> list[_Panel]:
    """The panels in reading order; colour bars belong to theirs and follow them."""
    found = []
    for ax in part.axes:
        spec = ax.get_subplotspec()
        if spec is None or hasattr(ax, "_colorbar"):
            continue
        if not ax.axison and not ax.texts:  # a place that was left empty
            ax.remove()
            continue
        grid = spec.get_gridspec()
        wide, tall = grid.get_width_ratios() or [1] * grid.ncols, grid.get_height_ratios() or [1] * grid.nrows
        across, down = spec.colspan, spec.rowspan
        own = width * sum(wide[c] for c in across) / sum(wide), height * sum(tall[r] for r in down) / sum(tall)
        found.append((down.start, across.start, _Panel(ax, down.start, *own)))
    return [panel for _, _, panel in sorted(found, key=lambda f: f[:2])]


def _flow(part, width: float, height: float, chosen: Preset, wanted: Sequence[int] | None) -> float:
    """Put the panels of a figure (or subfigure) into rows of the preset's width; returns the rows' height in inches."""
    panels = _panels(part, width, height)
    shown = _picked(panels, wanted)
    for panel in shown:
        _check_width(panel, chosen)
    rows = [row for n in dict.fromkeys(p.row for p in shown) for row in _rows([p for p in shown if p.row == n], chosen)]
    if len(rows) != len({panel.row for panel in panels}) or len(shown) != len(panels):
        _label(panels, rows)
    for panel in panels:
        if panel not in shown:
            _remove(panel.ax)
    plans, before = [], None
    for row in rows:
        fill = min(chosen.width / sum(p.width for p in row), _LOOSEST * chosen.scale)
        if before and before[0] == row[0].row and before[1] < fill:  # the rest of a broken row keeps its neighbours' width
            fill = before[1]
        before = (row[0].row, fill)
        ratios = [p.width * fill for p in row]
        spare = chosen.width - sum(ratios)
        tall = max(p.height for p in row) * min(chosen.scale, max(fill, 0.8 * chosen.scale))
        plans.append((row, [*ratios, *[spare] * bool(spare > 0.05 * chosen.width)], max(_LOWEST, tall)))
    _place(part, plans)
    for row, ratios, tall in plans:
        for panel, own in zip(row, ratios):
            _break_words(panel.ax, own, tall, chosen.scale)
    return sum(tall for *_, tall in plans)


def _rows(panels: list[_Panel], chosen: Preset) -> list[list[_Panel]]:
    """One row of the figure as few rows of the preset's width, filled evenly (four panels: two and two, not three and one)."""

    def broken(limit: float) -> list[list[_Panel]]:
        rows: list[list[_Panel]] = []
        for panel in panels:
            if rows and sum(p.width for p in rows[-1]) + panel.width <= limit + 1e-9:
                rows[-1].append(panel)
            else:
                rows.append([panel])
        return rows

    limit = chosen.width / (chosen.scale * _TIGHTEST)
    fewest = len(broken(limit))
    return broken(next(part for n in range(1, 21) if len(broken(part := limit * n / 20)) == fewest))


def _check_width(panel: _Panel, chosen: Preset) -> None:
    narrow = _TIGHTEST * _PRESSED
    if panel.width * chosen.scale * narrow > chosen.width:
        wider = [p.name for p in PRESETS.values() if p.width > chosen.width and panel.width * p.scale * narrow <= p.width]
        raise SettingError(f"this figure is too wide for the preset {chosen.name}: its widest panel needs "
                           f"{panel.width * chosen.scale * narrow:.1f} inches, and there are {chosen.width:g}; use {' or '.join(wider)}")


def _picked(panels: list[_Panel], wanted: Sequence[int] | None) -> list[_Panel]:
    if wanted is None:
        return panels
    if not wanted or any(not 1 <= n <= len(panels) for n in wanted):
        raise SettingError(f"panels {', '.join(map(str, wanted)) or '(none)'} were asked for; this figure has {len(panels)}, counted from "
                           "1 in reading order")
    return [panels[n - 1] for n in dict.fromkeys(wanted)]


def _remove(ax: Axes) -> None:
    for bar in list(getattr(ax, "_colorbars", ())):
        bar.remove()
    ax.remove()


def _place(part, plans) -> None:
    heights = [tall for *_, tall in plans]
    alike = {tuple(round(r, 3) for r in ratios) for _, ratios, _ in plans}
    if len(alike) == 1:  # one grid, so that axes line up from row to row
        grid = part.add_gridspec(len(plans), len(plans[0][1]), height_ratios=heights, width_ratios=plans[0][1])
        rows = [[grid[y, x] for x in range(len(ratios))] for y, (_, ratios, _) in enumerate(plans)]
    else:
        outer = part.add_gridspec(len(plans), 1, height_ratios=heights)
        own = [outer[y].subgridspec(1, len(ratios), width_ratios=ratios) for y, (_, ratios, _) in enumerate(plans)]
        rows = [[grid[0, x] for x in range(grid.ncols)] for grid in own]
    for (row, *_), specs in zip(plans, rows):
        for panel, spec in zip(row, specs):
            panel.ax.set_subplotspec(spec)


def _label(panels: list[_Panel], rows: list[list[_Panel]]) -> None:
    """Panels that leaned on a neighbour for their axis labels get labels of their own."""
    for row in rows:
        first = row[0].ax
        leader = next(p.ax for p in panels if p.row == row[0].row)
        if first is not leader and leader in first.get_shared_y_axes().get_siblings(first):
            first.tick_params(labelleft=True)
            if not first.get_ylabel():
                first.set_ylabel(leader.get_ylabel())
        for panel in row:
            if not panel.ax.get_xlabel():
                below = [s for s in panel.ax.get_shared_x_axes().get_siblings(panel.ax) if s.get_xlabel()]
                if below:
                    panel.ax.tick_params(labelbottom=True)
                    panel.ax.set_xlabel(below[0].get_xlabel())


def _break_words(ax: Axes, width: float, height: float, scale: float) -> None:
    """Titles, labels and names of rows in lines no longer than their panel."""
    shown = [t.get_text() for t in ax.get_yticklabels()] if ax.yaxis.get_tick_params().get("labelleft", True) else []
    tall = height * 72 > len(shown) * 2.6 * 8.5 * scale  # two lines to a name
    if width < _NARROW and tall and any(len(name) > _LONG for name in shown):
        shown = [textwrap.fill(name, _LONG, break_long_words=False) for name in shown]
        ax.set_yticks(ax.get_yticks(), shown)
    longest = max((len(line) for name in shown for line in name.split("\n")), default=0)
    beside = 0.15 + 0.56 * 8.5 * scale / 72 * max(longest, 4 * bool(shown))  # inches that names and numbers of rows take
    for text, inches in ((ax.title, width - beside), (ax._left_title, width - beside), (ax.xaxis.label, width - beside),
                         (ax.yaxis.label, 0.8 * height)):
        if text.get_text():
            letters = max(12, int(inches * 72 / (0.58 * text.get_fontsize() * scale)))
            text.set_text("\n".join(line for part in text.get_text().split("\n") for line in textwrap.wrap(part, letters) or [""]))


def _shrink(fig: Figure, scale: float) -> None:
    """Type, lines and marks at print size."""
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    ticks = {id(artist) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) for artist in axis.findobj()}
    for artist in fig.findobj():
        if id(artist) in ticks and not any(artist in (ax.xaxis.label, ax.yaxis.label) for ax in fig.axes):
            continue  # ticks come and go; their axis is told below
        if isinstance(artist, Text):
            artist.set_fontsize(max(_SMALLEST, artist.get_fontsize() * scale))
        elif isinstance(artist, Line2D):
            artist.set_linewidth(artist.get_linewidth() * scale)
            artist.set_markersize(artist.get_markersize() * scale)
            artist.set_markeredgewidth(artist.get_markeredgewidth() * scale)
        elif isinstance(artist, Collection):
            artist.set_linewidth([w * scale for w in artist.get_linewidth()])
        elif isinstance(artist, Patch):
            artist.set_linewidth(artist.get_linewidth() * scale)
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            drawn = axis.get_ticklabels()
            size = drawn[0].get_fontsize() if drawn else 8.5
            axis.set_tick_params(labelsize=max(_SMALLEST, size * scale), length=3.5 * scale, width=0.8 * scale, pad=3 * scale)
            axis.labelpad *= scale
