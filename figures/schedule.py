"""The schedule of a real decode: which position ran at which depth at every tick, and what became of each draft."""

from __future__ import annotations

from figures import style
from loopscope.errors import SettingError

MARKS = {  # event -> (label, marker, colour, filled)
    "draft": ("draft made", "o", "#222222", False),
    "accept": ("draft accepted", "^", "#009E73", True),
    "reject": ("draft rejected", "X", "#D00000", True),
    "commit": ("token committed", "s", "#222222", True),
}


def draw(frame, *, model=None, task=None, decoder=None, ticks=None, first_tick=0):
    """Position (down) against tick (right), `ticks` from `first_tick` (default: 40, or what fits a narrow preset).

    A cell's number and shade is its depth after the tick.
    """
    style.check(frame, ("model", "task", "decoder", "tick", "position", "depth", "event", "token"), "trace")
    frame, model = style.choose(frame, "model", model, "trace", sorted(map(str, frame["model"].unique()))[:1])
    frame, task = style.choose(frame, "task", task, "trace", [t for t in style.TASKS] + sorted(map(str, frame["task"].unique())))
    frame, decoder = style.choose(frame, "decoder", decoder, "trace", _liveliest(frame))
    ticks = style.fitting(40, 1.5, 0.19) if ticks is None else ticks
    shown = frame[(frame["tick"] >= first_tick) & (frame["tick"] < first_tick + ticks)]
    if shown.empty:
        raise SettingError(
            f"the trace has no ticks from {first_tick} to {first_tick + ticks - 1}; it ends at tick {int(frame['tick'].max())}"
        )
    wide, tall = _size(shown)
    fig = style.figure(min(15.0, 2.6 + 0.31 * max(wide, 6)), min(13.0, 1.8 + 0.27 * max(tall, 4)))
    ax = fig.subplots()
    panel(ax, shown, decoder)
    ax.set_xlabel("tick (one block call)")
    ax.set_ylabel("position, and the token committed there" if tall > 10 else "position,\nand its token")
    last = int(frame["tick"].max())
    committed = int((shown["event"] == "commit").sum())
    cut = f"Ticks {int(shown['tick'].min())} to {int(shown['tick'].max())} of {last}. " if len(shown) < len(frame) else ""
    return style.finish(
        fig,
        f"{model}, {task}: schedule of {decoder}" if task else f"{model}: schedule of {decoder}",
        f"{cut}One real decode. A cell is one row of the block call in that column; its number is the depth it reached.",
        _alt(shown, decoder, committed),
        _handles(shown, decoder),
        5 if fig.get_figwidth() > 8 else 3,
    )


def panel(ax, shown, decoder, numbers=True):
    """Cells and marks of the given events on `ax`."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import Rectangle

    runs = shown[shown["event"] == "run"]
    deepest = max(int(shown["depth"].max()), 1)
    shades = LinearSegmentedColormap.from_list("depth", ["#f2f2f2", style.decoder_look(decoder).colour])
    norm = Normalize(0, deepest)
    ax.grid(visible=False)
    cells = [Rectangle((t - 0.5, p - 0.5), 1, 1) for t, p in zip(runs["tick"], runs["position"])]
    ax.add_collection(PatchCollection(cells, facecolors=[shades(norm(d)) for d in runs["depth"]], edgecolors="white", linewidths=0.8))
    wide, tall = _size(shown)
    if numbers and wide <= 60 and tall <= 60:
        settled = shown[shown["event"].isin(("draft", "accept", "reject", "commit"))]
        marked = set(zip(settled["tick"], settled["position"]))
        for r in runs.itertuples():
            if (r.tick, r.position) in marked:
                continue  # the marks need the cell; its neighbours tell its depth
            dark = sum(c * w for c, w in zip(shades(norm(r.depth)), (0.3, 0.59, 0.11))) < 0.55
            ax.text(r.tick, r.position, str(r.depth), ha="center", va="center", fontsize=6.5, color="white" if dark else style.INK)
    for event, (_, marker, colour, filled) in MARKS.items():
        part = shown[shown["event"] == event]
        if part.empty:
            continue
        # a judgement and the commit it leads to fall on the same tick and position: beside each other, not on top
        shift = {"accept": -0.24, "reject": -0.24, "commit": 0.22, "draft": 0.0}[event]
        ax.plot(
            part["tick"] + shift,
            part["position"],
            linestyle="none",
            marker=marker,
            color=colour,
            markersize=5.5 if event != "draft" else 6.5,
            markerfacecolor=colour if filled else "none",
            markeredgecolor="white" if filled else colour,
            markeredgewidth=0.6 if filled else 1.1,
            zorder=5,
        )
    ax.set_xlim(shown["tick"].min() - 0.7, shown["tick"].max() + 0.7)
    ax.set_ylim(shown["position"].max() + 0.7, shown["position"].min() - 0.7)
    tokens = shown[shown["event"] == "commit"].drop_duplicates("position").set_index("position")["token"]
    first, last = int(shown["position"].min()), int(shown["position"].max())
    step = max(1, (last - first + 1) // 40)
    ax.set_yticks(
        range(first, last + 1, step),
        [f"{style.plain(tokens[p])}  {p}" if p in tokens.index else str(p) for p in range(first, last + 1, step)],
    )
    ax.tick_params(axis="y", labelsize=7.5, length=0)
    ax.locator_params(axis="x", integer=True)


def _size(shown):
    return int(shown["tick"].max() - shown["tick"].min()) + 1, int(shown["position"].max() - shown["position"].min()) + 1


def _liveliest(frame):
    # which decoder shows most about scheduling: the one with most drafts per tick, waves first
    order = {"WFD": 0, "DAS-Wave": 1, "DtV": 2, "AR": 3}
    return sorted(map(str, frame["decoder"].unique()), key=lambda d: (order.get(style.family(d), 9), d))


def _handles(shown, decoder):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    present = [MARKS[e] for e in MARKS if (shown["event"] == e).any()]
    return [Patch(color=style.decoder_look(decoder).colour, label="row of a block call (darker = deeper)")] + [
        Line2D([], [], linestyle="none", marker=m, color=c, markerfacecolor=c if filled else "none", markersize=6.5, label=label)
        for label, m, c, filled in present
    ]


def _alt(shown, decoder, committed):
    counts = shown["event"].value_counts()
    calls = shown.loc[shown["event"] == "run", "tick"].nunique()
    return (
        f"Schedule of {decoder}: position against tick, each cell a position advancing one recurrence. In {calls} block calls "
        f"{committed} tokens were committed, {int(counts.get('draft', 0))} drafts made, {int(counts.get('accept', 0))} accepted and "
        f"{int(counts.get('reject', 0))} rejected."
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("trace"))
