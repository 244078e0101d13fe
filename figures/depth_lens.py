"""Depth lens: what the model would say if it stopped at each depth."""

from __future__ import annotations

from figures import intervals, marks, published as papers, style

COLUMNS = ("model", "task", "prompt", "start", "depth", "agreement", "kl_nats")
# column -> (title, y label)
MEASURES = {
    "agreement": ("Same top token as full depth", "top-1 agreement with depth T"),
    "kl_nats": ("Distance to full depth", "KL to depth T (nats)"),
    "loss_nats": ("How well the text is predicted", "next-token loss (nats)"),
    "entropy_nats": ("Uncertainty", "entropy (nats)"),
    "margin_logits": ("Confidence", "top-1 minus top-2 (logits)"),
}


def draw(frame, *, model=None, published=False):
    """Agreement, KL, loss, entropy and margin against depth; tasks by colour and marker, a second start state thinner.

    published: also the papers' agreement of aligned drafts.
    """
    style.check(frame, COLUMNS, "depth_lens")
    frame, model = style.choose(frame, "model", model, "depth_lens")
    measures = [m for m in MEASURES if m in frame.columns]
    columns = min(3, len(measures))
    rows = -(-len(measures) // columns)
    fig = style.figure(4.0 * columns, 1.3 + 2.7 * rows)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax, measure in zip(axes, measures):
        panel(ax, frame, measure)
    theirs = papers.on_depth_lens(axes[measures.index("agreement")], frame["depth"].unique()) if published else []
    for ax in axes[len(measures) :]:
        ax.set_axis_off()
    starts = style.order(frame["start"], style.STARTS)
    return style.finish(
        fig,
        f"{model}: what each depth would already say",
        style.caption(frame, starts[0] if len(starts) == 1 else None,
                      extra=". ".join(["Full depth agrees with itself by definition"] + [papers.CAPTION] * bool(theirs))),
        _alt(model, frame),
        style.handles_of(axes[0]) + theirs,
        3 if theirs else 4,
    )


def panel(ax, frame, measure="agreement"):
    """One measure against depth, a line per task and start state."""
    starts = style.order(frame["start"], style.STARTS)
    for task in style.order(frame["task"], style.TASKS):
        look = style.look(style.TASKS, task)
        for i, start in enumerate(starts):
            part = frame[(frame["task"] == task) & (frame["start"] == start)]
            if part.empty:
                continue
            means = intervals.table(part, ["depth"], measure)
            label = f"{task or 'prompts'}, {style.look(style.STARTS, start).label}"
            extra = {} if i == 0 else {"linewidth": 1.1, "linestyle": (0, (1, 1.3)), "markerfacecolor": "white"}
            marks.line(ax, means, "depth", look, label, **extra)
    title, label = MEASURES[measure]
    ax.set_title(title)
    ax.set_ylabel(label)
    style.depth_axis(ax, frame["depth"].unique())


def _alt(model, frame):
    first = frame["depth"].min()
    means = frame[frame["depth"] == first].groupby(["task", "start"], observed=True)["agreement"].mean()
    said = "; ".join(f"{task} ({style.look(style.STARTS, start).label}): {value:.3f}" for (task, start), value in means.items())
    shown = "agreement with full depth, KL, loss, entropy and margin"
    return f"Lines of {shown} against recurrence depth on {model}. Agreement at depth {first}: {said}."


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("depth_lens"))
