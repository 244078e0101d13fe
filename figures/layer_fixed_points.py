"""Layer fixed points: how every block of the loop comes to rest, and how far apart they come to rest."""

from __future__ import annotations

from figures import intervals, marks, style
from figures.trajectories import LABELS, _COLOURS as NAME_COLOURS

COLUMNS = ("model", "task", "prompt", "start", "layer", "depth", "distance", "fixed_point", "orbit", "slider", "apart")
STATE = style.Look("state", style.INK, "v", (0, (1.5, 1.2)))
_MANY = 4  # layers; more bands than that hide each other


def draw(frame, *, model=None, start=None):
    """Per task: the way to a block's own end, the distance to the block before it, and what its path is called, by layer."""
    frame, model, start = style.rows(frame, COLUMNS, "layer_fixed_points", model, start)
    tasks, layers = style.order(frame["task"], style.TASKS), sorted(frame["layer"].unique())
    looks = _looks(layers)
    fig = style.figure(11.5, 1.5 + 2.8 * len(tasks))
    axes = fig.subplots(len(tasks), 3, squeeze=False, width_ratios=[1.2, 1.2, 0.9])
    said = []
    for row, task in zip(axes, tasks):
        part, words = frame[frame["task"] == task], task or "prompts"
        _lines(row[0], part, looks, "distance")
        row[0].set_ylabel("distance to its last output (share)")
        row[0].set_title(f"{words}: way to the end")
        _lines(row[1], part[part["layer"] >= 0], looks, "apart")
        row[1].set_ylabel("distance to the block before (share)")
        row[1].set_title("Blocks apart")
        _names(row[2], part, layers)
        apart = part[(part["depth"] == part["depth"].max()) & (part["layer"] >= 0)].groupby("layer")["apart"].mean()
        near = part[(part["depth"] == part["depth"].max() - 1) & (part["layer"] >= 0)].groupby("layer")["distance"].mean()
        said.append(f"{words}: at the end blocks lie {style.number(apart.min(), 2)} to {style.number(apart.max(), 2)} of their length apart"
                    + (f"; one recurrence before, {style.number(near.max(), 3)} at most were left to go" if len(near) else ""))
    from matplotlib.patches import Patch

    names = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
             for (name, hatch), colour in zip(LABELS.values(), NAME_COLOURS)]
    return style.finish(
        fig,
        f"{model}: where each block of the loop comes to rest",
        style.caption(frame, start, extra="Distances over the length of the block's output. Distinct fixed points: left goes down to 0, "
                                          "the middle does not"),
        f"Fixed points of the blocks of {model} by recurrence depth. {'. '.join(said)}.",
        style.handles_of(axes[0, 0])[:12] + names,
        7,
    )


def _looks(layers):
    from matplotlib import colormaps

    own = [n for n in layers if n >= 0]
    shades = [colormaps["viridis"](0.9 * i / max(1, len(own) - 1)) for i in range(len(own))]
    looks = {n: style.Look(f"layer {n}", colour, "osD^P"[i % 5]) for i, (n, colour) in enumerate(zip(own, shades))}
    return looks | ({-1: STATE} if -1 in layers else {})


def _lines(ax, part, looks, measure):
    kept = part[part[measure] > 0]  # the last output is at distance 0 from itself: no place for it on a logarithmic axis
    depths = sorted(part["depth"].unique())
    ax.set_xticks(depths[:: max(1, len(depths) // 8)])
    ax.set_xlabel("recurrence depth r")
    if kept.empty:
        ax.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=ax.transAxes, color=style.QUIET)
        return
    means = intervals.table(kept, ["layer", "depth"], measure)
    for layer, look in looks.items():
        own = means[means["layer"] == layer]
        if len(own):
            marks.line(ax, own, "depth", look, look.label, band=len(looks) <= _MANY)
    if measure == "distance":
        style.log_axis(ax)
    else:
        ax.set_ylim(bottom=0)


def _names(ax, part, layers):
    """Shares of positions by the name of each block's whole path, stacked."""
    ax.set_title("Name of the whole path")
    last = part[part["depth"] == part["depth"].max()].dropna(subset=["fixed_point"])
    if last.empty:
        ax.text(0.5, 0.5, "fewer than 5 recurrences", ha="center", va="center", transform=ax.transAxes, color=style.QUIET)
        ax.set_xticks([])
        ax.set_yticks([])
        return
    shares = last.groupby("layer")[list(LABELS)[:3]].mean().reindex(layers)
    shares["wandering"] = (1 - shares.sum(axis=1)).clip(lower=0)
    below = 0 * shares["orbit"]
    places = range(len(layers))
    for (name, (_, hatch)), colour in zip(LABELS.items(), NAME_COLOURS):
        ax.barh(places, shares[name], 0.8, left=below, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        below = below + shares[name]
    ax.set_yticks(places, ["state" if n < 0 else f"layer {n}" for n in layers])
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of positions")
    ax.grid(axis="y", visible=False)


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("layer_fixed_points"))
