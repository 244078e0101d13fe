"""How every figure looks: one colour and one second cue per channel, policy and decoder; sizes; captions.

Colours are Okabe and Ito's and Paul Tol's colour-blind safe sets; each comes with a marker or a line style that says the
same without colour. Nothing here changes matplotlib's global settings: `context()` holds for one drawing only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from figures import marks, presets
from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

DPI = 150
TITLE, PANEL, LABEL, TICK, NOTE = 13, 10.5, 9.5, 8.5, 8.5  # font sizes in points
INK, QUIET, GRID = "#222222", "#666666", "#dddddd"


@dataclass(frozen=True)
class Look:
    """A label and its three cues."""

    label: str
    colour: str
    marker: str = "o"
    line: str | tuple = "-"
    hollow: bool = False  # of a decoder that is not lossless: its marks have no fill


@dataclass(frozen=True)
class Note:
    """The words that travel with a figure: title, caption, and what it shows for a reader who cannot see it."""

    title: str
    caption: str
    alt: str


CHANNELS = {
    "q": Look("Q (queries)", "#0072B2", "o", "-"),
    "k": Look("K (keys)", "#009E73", "s", (0, (6, 1.5))),
    "v": Look("V (values)", "#D55E00", "D", "-"),
    "attn_out": Look("attention output", "#CC79A7", "^", (0, (3, 1, 1, 1))),
    "state": Look("state", "#444444", "v", (0, (1.5, 1.2))),
}
POLICIES = {  # a policy wears the colour of the channel it reads at full depth
    "aligned": Look("aligned (both at the draft's depth)", "#666666", "o", "-"),
    "deep_v": Look("deep V (Mature-V)", "#D55E00", "D", "-"),
    "deep_k": Look("deep K", "#009E73", "s", (0, (6, 1.5))),
    "deep_kv": Look("deep K/V", "#332288", "^", (0, (3, 1, 1, 1))),
}
CONTROLS = {
    "none": Look("the real one", "#D55E00", "D", "-"),
    "shuffled_v": Look("V shuffled over positions", "#888888", "x", (0, (4, 2))),
    "other_prompt_v": Look("another prompt's V", "#555555", "P", (0, (1, 1))),
    "noise_v": Look("noise of V's norm", "#AAAAAA", "*", (0, (4, 1, 1, 1))),
}
NULLS = {
    "none": Look("the model itself", "#222222", "o", "-"),
    "token_mean_removed": Look("token mean removed", "#555555", "", (0, (5, 1.5))),
    "random_map": Look("state through a random map", "#777777", "", (0, (1, 1.2))),
    "random_weights": Look("random weights", "#999999", "", (0, (5, 1.5, 1, 1.5))),
}
DECODERS = {
    "AR": Look("AR", "#444444", "o", "-"),
    "plain": Look("plain loop", "#999999", "P", (0, (1, 1))),
    "DtV": Look("draft-then-verify", "#E69F00", "s", (0, (6, 1.5))),
    "WFD": Look("wavefront", "#0077BB", "D", "-"),
    "LoopSpec": Look("LoopSpec", "#CC3311", "p", (0, (4, 1))),
    "DAS-Wave": Look("DAS-Wave", "#AA3377", "^", (0, (3, 1, 1, 1))),
    "PLD": Look("prompt lookup", "#88CCEE", "X", (0, (1, 1))),
}
LOSSLESS, NOT_LOSSLESS = "lossless", ("approximate", "lossy")
HATCHES = {"approximate": "...", "lossy": "++"}
WHAT = {"approximate": "not AR's tokens by design", "lossy": "recurrences left out"}
_EXTRA = ("#117733", "#999933", "#44AA99", "#AA4499", "#661100", "#6699CC")
TASKS = {"maths": Look("maths", "#332288", "o", "-"), "code": Look("code", "#117733", "s", (0, (6, 1.5)))}
STEPS = tuple(zip(("#882255", "#CC6677", "#DDAA33", "#117733", "#0077BB"), ("o", "s", "D", "^", "v")))  # colour, marker of an ordered few
STARTS = {
    "keyed": Look("keyed random start", INK, "o", "-"),
    "zero": Look("zero start", INK, "o", (0, (2, 1.5))),
    "embedding": Look("embedding start", INK, "o", "-"),
    "given": Look("given start", INK, "o", "-"),
}
OWN_START = ("keyed", "embedding", "zero")  # which of several start states is a model's own

_RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": LABEL,
    "text.parse_math": False,
    "axes.titlesize": PANEL,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 6,
    "axes.labelsize": LABEL,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.labelsize": TICK,
    "ytick.labelsize": TICK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": TICK,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.bbox": None,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "svg.hashsalt": "loopscope",
    "svg.fonttype": "path",  # outlines: an SVG cannot carry a font along, and "none" would show whatever font the reader has
    "pdf.fonttype": 42,  # TrueType, embedded: text can be searched and edited, and journals that refuse Type 3 take it
    "path.simplify": True,
}


def context():
    """matplotlib's settings for one drawing, restored afterwards whatever happens."""
    return matplotlib.rc_context(_RC)


_ROOM = ContextVar("room", default=inf)


@contextmanager
def room(inches: float) -> Iterator[None]:
    """For one drawing: how many inches at this page's type size there are across (figures.presets)."""
    token = _ROOM.set(inches)
    try:
        yield
    finally:
        _ROOM.reset(token)


def fitting(most: int, first: float, each: float) -> int:
    """How many columns of `each` inches fit beside `first` inches of labels, at most `most`: all of them, but in a narrow preset."""
    return most if _ROOM.get() == inf else int(min(most, max(1, (_ROOM.get() - first) // each)))


def look(family: dict[str, Look], name: str) -> Look:
    """The look of `name`; a name this page does not know gets a stable look of its own, never another's."""
    if name in family:
        return family[name]
    n = sum(ord(c) for c in str(name))  # not hash(): that differs from one Python process to the next
    return Look(str(name), _EXTRA[n % len(_EXTRA)], "<>hp8X"[n % 6], "-")


def family(decoder: str) -> str:
    """'DAS-Wave' of 'DAS-Wave J=12 k=1 deep_kv': the label's first word names the family."""
    return str(decoder).split()[0] if str(decoder).split() else str(decoder)


def decoder_look(decoder: str) -> Look:
    """A decoder's look: its family's colour, its own label, hollow where the label says that it is not lossless."""
    kind = look(DECODERS, family(decoder))
    return Look(str(decoder), kind.colour, kind.marker, kind.line, fidelity_of(decoder) != LOSSLESS)


def fidelity_of(label: str) -> str:
    """What a decoder's label says of it: '... (approximate)', '... (lossy)', or nothing where it is lossless."""
    return next((f for f in NOT_LOSSLESS if f"({f})" in str(label)), LOSSLESS)


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a bench table with labels that say what is not lossless, also where only its columns did (older tables)."""
    told = frame["fidelity"] if "fidelity" in frame else frame["lossless"].map(lambda yes: LOSSLESS if yes else NOT_LOSSLESS[0])
    worst = {d: max(set(part), key=(LOSSLESS, *NOT_LOSSLESS).index) for d, part in told.groupby(frame["decoder"], observed=True)}
    names = {d: f"{d} ({f})" for d, f in worst.items() if f != LOSSLESS and fidelity_of(d) == LOSSLESS}
    return frame.assign(decoder=frame["decoder"].astype(str).replace(names)) if names else frame


def not_lossless_handles(decoders: Iterable[str]) -> list:
    """Legend entries for what is drawn hollow: one for each fidelity among these labels."""
    from matplotlib.patches import Patch

    found = {fidelity_of(d) for d in decoders}
    return [Patch(facecolor="white", edgecolor=INK, hatch=HATCHES[f], label=f"hollow: {f}, {WHAT[f]}") for f in NOT_LOSSLESS if f in found]


def order(names: Iterable[str], known: dict[str, Look]) -> list[str]:
    """Names in the order of this page, unknown ones after them in alphabetical order."""
    names = {str(n) for n in names}
    return [n for n in known if n in names] + sorted(names - set(known))


def decoders_in_order(labels: Iterable[str]) -> list[str]:
    """Decoder labels by family (AR first), then by name."""
    rank = list(DECODERS)
    return sorted({str(label) for label in labels}, key=lambda d: (rank.index(family(d)) if family(d) in rank else len(rank), d))


def choose(frame: pd.DataFrame, column: str, value: str | None, kind: str, prefer: Sequence[str] = ()) -> tuple[pd.DataFrame, str]:
    """The rows where `column` is `value`; None takes the first of `prefer` that is there, or the only one there is.

    Raises SettingError when nothing, or more than one, is left to choose.
    """
    found = sorted(frame[column].astype(str).unique())
    if value is None:
        value = next((p for p in prefer if p in found), None)
        if value is None:
            if len(found) != 1:
                raise SettingError(f"the {kind} table holds {len(found)} values of {column} ({', '.join(found)}): choose one, {column}=...")
            value = found[0]
    if str(value) not in found:
        raise SettingError(f"{column}={value!r} is not in the {kind} table; it holds {', '.join(found)}")
    return frame[frame[column].astype(str) == str(value)], str(value)


def check(frame: pd.DataFrame, columns: Sequence[str], kind: str) -> None:
    """Raises SettingError for a table without rows or without a needed column, naming what is missing."""
    missing = [c for c in columns if c not in frame.columns]
    if missing:
        near = "; ".join(f"{m}: is it {closest(m, map(str, frame.columns))}?" for m in missing if closest(m, map(str, frame.columns)))
        raise SettingError(
            f"the {kind} figure needs the columns {', '.join(missing)}; found {', '.join(map(str, frame.columns))}"
            + (f" ({near})" if near else "")
        )
    if frame.empty:
        raise SettingError(f"the {kind} table has no rows: nothing to draw")


def rows(frame: pd.DataFrame, columns: Sequence[str], kind: str, model: str | None, start: str | None) -> tuple[pd.DataFrame, str, str]:
    """(the rows of one model and one start state, which model, which start): the head of most figures. Raises SettingError."""
    check(frame, columns, kind)
    frame, model = choose(frame, "model", model, kind)
    frame, start = choose(frame, "start", start, kind, OWN_START)
    return frame, model, start


def figure(width: float, height: float) -> Figure:
    """An empty figure in inches, drawn by Agg, known to no global state."""
    fig = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(fig)
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)
    return fig


def finish(fig: Figure, title: str, caption: str, alt: str, handles: Sequence | None = None, columns: int = 6) -> Figure:
    """Title above, the legend of `handles` under it, caption below; the words stay on the figure as `figure.note`.

    The panels are laid out in what these three leave free, so that none can cover data.
    """
    if getattr(fig, "few", False):  # what the panels drew says so (figures.marks)
        caption = f"{caption.rstrip('.')}. {marks.NOTE}."
    fig.note, fig.legend_of = Note(title, caption, alt), (list(handles or ()), columns)
    furnish(fig, presets.PRESETS["page"])
    for ax in fig.axes:  # ticks are made lazily, perhaps outside our context: pin their look now
        ax.tick_params(labelcolor=INK)
    return fig


def furnish(fig: Figure, preset: presets.Preset) -> None:
    """What stands around the panels, anew and at the preset's size, as `finish` was told it."""
    for old in (*fig.legends, *fig.texts):
        old.remove()
    fig._suptitle = None  # it was among the texts; matplotlib would go on writing into it
    (handles, columns), (height, scale) = fig.legend_of, (fig.get_figheight(), preset.scale)
    if preset.width != inf and handles:
        longest = max(len(h.get_label()) for h in handles)  # about 0.55 of its size to a letter, and five letters for the mark
        columns = max(1, min(len(handles), int(preset.width * 72 / (0.55 * TICK * scale * (longest + 7)))))
    title = 0.42 if preset.words else 0.1 / scale
    below = wrap(fig.note.caption, fig.get_figwidth() / scale) if preset.words else ""
    rows = -(-len(handles) // columns) if handles else 0
    top, bottom = (title + 0.21 * rows + 0.08 * (rows > 0)) * scale, (0.15 + 0.165 * (below.count("\n") + 1)) * scale  # inches
    bottom *= preset.words
    if preset.width != inf:  # the panels keep their height
        fig.set_figheight(height := height + top + bottom)
    fig.get_layout_engine().set(rect=(0, bottom / height, 1, 1 - (top + bottom) / height))
    if preset.words:
        at = {"x": 0.01, "ha": "left"}
        fits = fig.get_figwidth() * 72 / (0.66 * len(fig.note.title) + 1)  # bold letters are two thirds of their size wide
        size = min(TITLE * scale, fits)
        fig.suptitle(fig.note.title, y=1 - 0.12 * scale / height, va="top", fontsize=size, fontweight="bold", color=INK, **at)
        fig.text(y=0.07 * scale / height, s=below, va="bottom", fontsize=NOTE * scale, color=QUIET, linespacing=1.3, **at)
    if handles:
        fig.legend(handles=_by_rows(handles, columns), loc="upper left", ncols=columns, columnspacing=1.6, borderaxespad=0, borderpad=0,
                   fontsize=TICK * scale, bbox_to_anchor=(0.012, 1 - (title + 0.02) * scale / height))


def wrap(text: str, inches: float) -> str:
    """Break a caption to the figure's width (about 15 characters to the inch at NOTE size)."""
    import textwrap

    return "\n".join(textwrap.wrap(text, max(40, int(inches * 15))))


def caption(frame: pd.DataFrame, start: str | None = None, interval: str | None = "bands", extra: str = "") -> str:
    """'24 prompts (code 12, maths 12); bands: 95 % bootstrap interval over prompts; start state: keyed random. ...'"""
    by_task = frame.groupby("task", observed=True)["prompt"].nunique() if "prompt" in frame else None
    parts = []
    if by_task is not None:
        each = f" ({', '.join(f'{t} {n}' for t, n in by_task.items())})" if len(by_task) > 1 else ""
        parts.append(count(by_task.sum(), "prompt") + each)
        if interval:
            enough = int(by_task.max()) > 1
            parts.append(f"{interval}: 95 % bootstrap interval over prompts" if enough else "one prompt a task: no interval")
    elif interval:
        parts.append(f"{interval}: 95 % bootstrap interval over prompts")
    if start:
        parts.append(f"start state: {look(STARTS, start).label.removesuffix(' start')}")
    text = "; ".join(parts)
    return ". ".join(p.rstrip(".") for p in (text, extra) if p) + "."


def depth_axis(ax: Axes, depths: Iterable[int], label: str = "recurrence depth r (recurrences applied)") -> None:
    """Integer depths on the x axis; logarithmic to base 2 beyond depth 8, where the early depths would be crushed."""
    depths = sorted({int(d) for d in depths})
    if len(depths) > 1 and depths[-1] > 8 and depths[0] >= 1:
        ax.set_xscale("log", base=2)
        ticks = [d for d in (1, 2, 4, 8, 16, 32, 64, 128) if depths[0] <= d <= depths[-1]]
        if depths[-1] >= 1.4 * ticks[-1]:
            ticks.append(depths[-1])
    else:
        ticks = depths if len(depths) <= 10 else depths[:: len(depths) // 8]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if len(depths) == 1:
        ax.set_xlim(depths[0] - 0.5, depths[0] + 0.5)
    ax.set_xlabel(label)


def _by_rows(handles: Sequence, columns: int) -> list:
    """Reordered so that matplotlib, which fills a legend by columns, reads by rows."""
    rows = -(-len(handles) // columns)
    columns = min(columns, len(handles))
    grid = [list(handles[r * columns : (r + 1) * columns]) for r in range(rows)]
    return [row[c] for c in range(columns) for row in grid if c < len(row)]


def points(axis, label: str = "change in top-1 agreement (points)") -> None:
    """An axis of differences between shares, read in points: 0.05 is 5 positions in a hundred."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}".replace("-", "\u2212") if abs(share) > 1e-12 else "0"))
    axis.set_label_text(label)


def log_axis(ax: Axes) -> None:
    """A logarithmic y axis whose ticks read 0.01, 1, 100."""
    from matplotlib.ticker import LogLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 50 * low else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: ""))


def handles_of(ax: Axes) -> list:
    """The labelled artists of a panel, for `finish`."""
    return list(ax.get_legend_handles_labels()[0])


def count(n: float, thing: str) -> str:
    """'1 prompt', '12 prompts'."""
    return f"{int(n)} {thing}{'s' * (int(n) != 1)}"


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number for a sentence or a label; 'n/a' where there is none."""
    return "n/a" if value != value else f"{value:{'+' if sign else ''}.{digits}f}"


def plain(token: str, limit: int = 14) -> str:
    """A token as a label: line breaks and tabs visible, characters this font lacks boxed, not too long."""
    shown = str(token).replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    shown = "".join(c if 32 <= ord(c) < 0x250 else "\u25a1" for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"
