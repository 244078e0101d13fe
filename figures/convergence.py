"""Convergence: how close each channel is to its full-depth value at each depth, and the nulls it must beat."""

from __future__ import annotations

import pandas as pd

from figures import intervals, marks, published as papers, style

COLUMNS = ("model", "task", "prompt", "start", "null", "channel", "depth", "metric", "value")
METRICS = {"cosine": "cosine similarity to depth T", "rel_l2": "relative L2 distance to depth T"}


def draw(frame, *, model=None, start=None, metric="cosine", published=False):
    """One row of panels per task: all channels of the trained model, then each channel beside its nulls.

    metric: "cosine" (linear) or "rel_l2" (logarithmic). Layers are averaged inside a prompt. published: also the papers' cosines.
    """
    frame, model, start = style.rows(frame, COLUMNS, "convergence", model, start)
    frame, _ = style.choose(frame, "metric", metric, "convergence")
    tasks, channels = style.order(frame["task"], style.TASKS), style.order(frame["channel"], style.CHANNELS)
    nulls = style.order(frame["null"], style.NULLS)
    real = frame["null"] == "none"
    keys = ("task", "null", "channel", "depth")
    means = pd.concat(
        [intervals.table(frame[real], keys, "value"), intervals.table(frame[~real], keys, "value", resamples=0)], ignore_index=True
    )
    beside = channels if nulls != ["none"] else []
    fig = style.figure(6.2 + 1.55 * len(beside), 1.5 + 2.5 * len(tasks))
    axes = fig.subplots(len(tasks), 1 + len(beside), squeeze=False, sharey="row", width_ratios=[3.0, *[1.0] * len(beside)])
    theirs = []
    for row, task in enumerate(tasks):
        part = means[means["task"] == task]
        panel(axes[row, 0], part[part["null"] == "none"], channels, metric)
        axes[row, 0].set_title(f"{task or 'prompts'}: all channels")
        if published and metric == "cosine":
            theirs = papers.on_convergence(axes[row, 0], channels)
        for ax, channel in zip(axes[row, 1:], beside):
            _against_nulls(ax, part[part["channel"] == channel], channel, metric)
            style.depth_axis(ax, frame["depth"].unique(), "depth r")
            ax.set_title(style.look(style.CHANNELS, channel).label, fontsize=style.LABEL, color=style.look(style.CHANNELS, channel).colour)
    return style.finish(
        fig,
        f"{model}: how each channel settles with recurrence depth",
        style.caption(
            frame,
            start,
            extra=". ".join(["Small panels: each channel against its nulls; only a gap to every null is a finding about it"] * bool(beside)
                            + [papers.CAPTION] * bool(theirs)),
        ),
        _alt(model, means, tasks, channels, metric),
        style.handles_of(axes[0, 0]) + _null_handles(nulls) + theirs,
        (4 if theirs else 8) if beside else 3,
    )


def panel(ax, means, channels, metric="cosine"):
    """Channels against depth (columns channel, depth, mean, low, high)."""
    for channel in channels:
        look = style.look(style.CHANNELS, channel)
        marks.line(ax, _positive(means[means["channel"] == channel], metric), "depth", look, look.label)
    _value_axis(ax, means, metric)


def _against_nulls(ax, part, channel, metric):
    for null in style.order(part["null"], style.NULLS)[::-1]:
        look, own = style.look(style.NULLS, null), style.look(style.CHANNELS, channel)
        if null == "none":
            marks.line(ax, _positive(part[part["null"] == null], metric), "depth", style.Look("", own.colour, "", "-"))
        else:
            marks.line(ax, _positive(part[part["null"] == null], metric), "depth", look, band=False, linewidth=1.3)


def _null_handles(nulls):
    from matplotlib.lines import Line2D

    looks = [style.look(style.NULLS, n) for n in nulls if n != "none"]
    return [Line2D([], [], color=n.colour, linestyle=n.line, linewidth=1.3, label=f"null: {n.label}") for n in looks]


def _positive(table, metric):
    # depth T is at distance 0 from itself: no place for it on a logarithmic axis
    return table[table["mean"] > 1e-12] if metric == "rel_l2" else table


def _value_axis(ax, means, metric):
    if metric == "rel_l2":
        style.log_axis(ax)
    ax.set_ylabel(METRICS.get(metric, metric))
    style.depth_axis(ax, means["depth"].unique())


def _alt(model, means, tasks, channels, metric):
    first = means["depth"].min()
    at = means[(means["null"] == "none") & (means["depth"] == first)].set_index(["task", "channel"])["mean"]
    said = "; ".join(
        f"{task}: "
        + ", ".join(f"{style.look(style.CHANNELS, c).label} {style.number(at.get((task, c), float('nan')), 3)}" for c in channels)
        for task in tasks
    )
    return f"Lines of {METRICS.get(metric, metric)} against recurrence depth on {model}, one per channel. At depth {first}: {said}."


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("convergence"))
