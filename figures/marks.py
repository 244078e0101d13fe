"""Lines, bands and whiskers of means: one way to draw an interval, and one to say that few prompts stand behind it.

An interval over fewer than FEW prompts is drawn hatched (a band) or dotted (a whisker), and the caption says so: resampling so few
cannot show how prompts differ. One prompt has no interval, and none is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from figures.intervals import DAGGER, FEW

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from figures.style import Look

NOTE = f"Hatched bands, dotted whiskers and {DAGGER}: intervals over fewer than {FEW} prompts, too narrow to rely on"
_DOTTED = (0, (1.0, 0.8))


def line(ax: Axes, table: pd.DataFrame, x: str, looks: Look, label: str | None = None, band: bool = True, **extra) -> None:
    """A line of means with its interval as a band (columns mean, low, high, n); one point alone gets an error bar."""
    table = table.sort_values(x)
    settings = {"color": looks.colour, "marker": looks.marker, "linestyle": looks.line, **extra}
    if looks.hollow:
        settings.setdefault("markerfacecolor", "white")
    if len(table) > 10:  # markers tell lines apart; one at every point of a long line would hide it
        powers = [i for i, v in enumerate(table[x]) if v > 0 and (int(v) & (int(v) - 1)) == 0]
        settings.setdefault("markevery", powers or None)
    ax.plot(table[x], table["mean"], label=label, **settings)
    if not band:
        return
    if len(table) == 1:
        bars(ax, table[x], table, settings["color"])
        return
    at, low, high = (table[column].to_numpy(float) for column in (x, "low", "high"))
    ax.fill_between(at, low, high, color=settings["color"], alpha=0.18, linewidth=0)
    rough = few(ax, table)
    if rough.any():
        beside = rough | np.append(rough[1:], False) | np.insert(rough[:-1], 0, False)  # up to the neighbours: a band lies between points
        ax.fill_between(at, low, high, where=beside, facecolor="none", edgecolor=settings["color"], alpha=0.45, linewidth=0, hatch="////")


def bars(ax: Axes, x, table: pd.DataFrame, colour: str, horizontal: bool = False, width: float = 1.4) -> None:
    """Interval whiskers from low to high (absent where there is no interval)."""
    draw, rough = ax.hlines if horizontal else ax.vlines, few(ax, table)
    for mask, style in ((~rough, "-"), (rough, _DOTTED)):
        if mask.any():
            draw(np.asarray(x)[mask], table["low"].to_numpy(float)[mask], table["high"].to_numpy(float)[mask], color=colour,
                 linewidth=width, linestyle=style, zorder=3)


def few(ax: Axes, table: pd.DataFrame) -> np.ndarray:
    """Which rows of a table have an interval over fewer than FEW prompts (column n); noted on the figure, whose caption then says so."""
    if "n" not in table:
        return np.zeros(len(table), dtype=bool)
    rough = (table["n"].to_numpy() < FEW) & np.isfinite(table["low"].to_numpy(float))
    if rough.any():
        setattr(ax.get_figure(root=True), "few", True)  # figures.style.finish reads it
    return rough


def whisker(ax: Axes, at: float, row, colour: str, horizontal: bool = True, width: float = 2.0) -> None:
    """One interval of a row with low, high and n."""
    import pandas as pd

    bars(ax, [at], pd.DataFrame([{"low": row["low"], "high": row["high"], "n": row.get("n", FEW)}]), colour, horizontal, width)
