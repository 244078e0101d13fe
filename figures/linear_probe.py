"""Linear probes: what is read off the state at each depth, beside the control, and by how much it is better."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "property", "labels", "depth", "metric", "value")
LABELS = {
    "true": style.Look("the property", "#332288", "o", "-"),
    "control": style.Look("control (a random label for each type)", "#D55E00", "D", (0, (4, 1.5))),
    "baseline": style.Look("baseline (most frequent label, or mean)", "#888888", "", (0, (1, 1.2))),
}
_METRICS = {"accuracy": "held-out accuracy", "absolute_error": "held-out absolute error (unit of the label)"}


def draw(frame, *, model=None, start=None):
    """Per property: score by depth for true labels, control and baseline; and selectivity, true minus control of the same prompts."""
    frame, model, start = style.rows(frame, COLUMNS, "linear_probe", model, start)
    found = frame[["task", "property", "metric"]].drop_duplicates().sort_values(["task", "property"]).itertuples(index=False)
    found = list(found)
    fig = style.figure(9.5, 1.4 + 2.9 * len(found))
    axes = fig.subplots(len(found), 2, squeeze=False, width_ratios=[1.2, 1])
    said = []
    for (left, right), (task, name, metric) in zip(axes, found):
        part = frame[(frame["task"] == task) & (frame["property"] == name) & (frame["metric"] == metric)]
        means = intervals.table(part, ["labels", "depth"], "value")
        for labels in style.order(means["labels"], LABELS):
            look = style.look(LABELS, labels)
            marks.line(left, means[means["labels"] == labels], "depth", look, look.label)
        left.set_ylabel(_METRICS.get(metric, metric))
        left.set_title(style.plain(f"{task}: {name}" if task else name, 48))
        left.set_ylim(bottom=0, **({"top": 1} if metric == "accuracy" else {}))
        style.depth_axis(left, part["depth"].unique())
        _selectivity(right, part, metric)
        last = means[means["depth"] == means["depth"].max()].set_index("labels")["mean"]
        said.append(f"{name}: " + ", ".join(f"{n} {style.number(float(last[n]), 2)}" for n in style.order(last.index, LABELS)))
    return style.finish(
        fig,
        f"{model}: what a linear map reads off the state",
        style.caption(frame, start, extra="Every prompt is scored by a map fitted on others. Selectivity above 0: the state holds more "
                                          "than could be learned by heart"),
        f"Held-out linear probes of the state of {model} by recurrence depth. At full depth, {'; '.join(said)}.",
        style.handles_of(axes[0, 0]),
        3,
    )


def _selectivity(ax, part, metric):
    ax.set_title("Selectivity")
    ax.set_ylabel("better than the control by")
    keys = ["task", "prompt", "depth"]
    wide = part.pivot_table(index=keys, columns="labels", values="value").reset_index()
    if "control" not in wide or "true" not in wide:
        ax.text(0.5, 0.5, "no control", ha="center", va="center", transform=ax.transAxes, color=style.QUIET)
        return
    sign = -1 if metric == "absolute_error" else 1
    means = intervals.table(wide.assign(selectivity=sign * (wide["true"] - wide["control"])), ["depth"], "selectivity")
    marks.line(ax, means, "depth", LABELS["true"])
    ax.axhline(0, color=style.QUIET, linewidth=0.8)
    style.depth_axis(ax, part["depth"].unique())


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("linear_probe"))
