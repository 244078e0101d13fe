"""Trajectories: the path of the state over depth, its steps, its turns, and whether it ends in a fixed point or an orbit."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "depth", "step", "angle_degrees", "distance", "contraction", "fixed_point", "orbit",
           "slider", "pc1", "pc2")
LABELS = {"fixed_point": ("fixed point", "//"), "orbit": ("orbit", ".."), "slider": ("slider", "\\\\"), "wandering": ("wandering", "")}
_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#dddddd")
_PATHS = 6  # of each task; more would hide each other


def draw(frame, *, model=None, start=None):
    """Paths of the last positions on two main directions; step and distance, turning angle, and names of paths, by depth."""
    frame, model, start = style.rows(frame, COLUMNS, "trajectories", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    fig = style.figure(11.5, 6.6)
    grid = fig.add_gridspec(2, 3, width_ratios=[1.5, 1, 1])
    path, axes = fig.add_subplot(grid[:, 0]), [fig.add_subplot(grid[i // 2, 1 + i % 2]) for i in range(4)]
    _paths(path, frame, tasks)
    for ax, measure, title, label in (
        (axes[0], "step", "Step size", "step / length of the state"),
        (axes[1], "distance", "Way to the last state", "distance / length of the last state"),
        (axes[2], "angle_degrees", "Turning angle", "angle between steps (degrees)"),
    ):
        _measure(ax, frame, tasks, measure)
        ax.set_title(title)
        ax.set_ylabel(label)
    _names(axes[3], frame)
    last = frame[frame["depth"] == frame["depth"].max()]
    said = "; ".join(
        f"{task or 'prompts'}: contraction {style.number(part['contraction'].mean(), 3)}, turning angle "
        f"{style.number(part['angle_degrees'].mean(), 0)} degrees, fixed points {style.number(part['fixed_point'].mean(), 2)}"
        for task in tasks
        for part in [last[last["task"] == task]]
    )
    return style.finish(
        fig,
        f"{model}: where the state goes",
        style.caption(frame, start, extra=f"Left: last positions of at most {_PATHS} prompts a task, from a hollow mark (the start state) "
                                          "to the cross (depth T)"),
        f"Paths of the state of {model} over recurrence depth, with step sizes, angles and names of paths. At the last depth: {said}.",
        style.handles_of(path) + _patches(),
        6,
    )


def _paths(ax, frame, tasks):
    for task in tasks:
        look = style.look(style.TASKS, task)
        for n, prompt in enumerate(sorted(frame.loc[frame["task"] == task, "prompt"].unique())[:_PATHS]):
            one = frame[(frame["task"] == task) & (frame["prompt"] == prompt)].sort_values("depth")
            ax.plot(one["pc1"], one["pc2"], color=look.colour, linewidth=1, alpha=0.75, marker=look.marker, markersize=2.6,
                    label=task or "prompts" if n == 0 else None)
            ax.plot(one["pc1"].iloc[:1], one["pc2"].iloc[:1], color=look.colour, marker=look.marker, markersize=7, markerfacecolor="white")
    ax.plot([0], [0], color=style.INK, marker="x", markersize=9, markeredgewidth=2, linestyle="none")
    ax.set_xlabel("main direction 1 (units of the state)")
    ax.set_ylabel("main direction 2 (units of the state)")
    ax.set_title("Paths, all ending at the cross")
    ax.set_aspect("equal", adjustable="datalim")


def _measure(ax, frame, tasks, measure):
    kept = frame.dropna(subset=[measure])
    if measure != "angle_degrees":  # the last state is at distance 0 from itself: no place for it on a logarithmic axis
        kept = kept[kept[measure] > 0]
    if kept.empty:
        ax.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=ax.transAxes, color=style.QUIET)
        return
    means = intervals.table(kept, ["task", "depth"], measure)
    for task in tasks:
        part = means[means["task"] == task]
        if len(part):
            marks.line(ax, part, "depth", style.look(style.TASKS, task))
    if measure == "angle_degrees":
        ax.set_ylim(0, 180)
        ax.set_yticks([0, 45, 90, 135, 180])
    else:
        style.log_axis(ax)
    _depths(ax, frame)


def _names(ax, frame):
    """Shares of positions by the name of their path so far, stacked."""
    named = frame.dropna(subset=["fixed_point"])
    ax.set_title("Name of the path so far")
    ax.set_ylabel("share of positions")
    if named.empty:
        ax.text(0.5, 0.5, "fewer than 4 recurrences", ha="center", va="center", transform=ax.transAxes, color=style.QUIET)
        return
    shares = named.groupby("depth")[list(LABELS)[:3]].mean()
    shares["wandering"] = (1 - shares.sum(axis=1)).clip(lower=0)
    below = 0 * shares["orbit"]
    for (name, (_, hatch)), colour in zip(LABELS.items(), _COLOURS):
        ax.bar(shares.index, shares[name], 0.9, bottom=below, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        below = below + shares[name]
    ax.set_ylim(0, 1)
    ax.grid(axis="x", visible=False)
    _depths(ax, named)


def _depths(ax, frame):
    depths = sorted(frame["depth"].unique())
    ax.set_xticks(depths[:: max(1, len(depths) // 8)])
    ax.set_xlabel("recurrence depth r")


def _patches():
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name) for (name, hatch), colour in zip(LABELS.values(), _COLOURS)]


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("trajectories"))
