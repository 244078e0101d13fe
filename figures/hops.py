"""Hops: how often the guess so many places behind the anchor is right, after so many rounds of carried refinement."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "policy", "updates", "hop", "round", "agreement", "chain", "n_positions")


def draw(frame, *, model=None, start=None):
    """A panel per task, a line per number of rounds: solid, the guess alone is right; thin, all guesses up to it are."""
    frame, model, start = style.rows(frame, COLUMNS, "hops", model, start)
    tasks, last = style.order(frame["task"], style.TASKS), int(frame["round"].max())
    rounds = sorted({r for r in (1, 2, 4, 8) if r < last} | {last})
    fig = style.figure(max(5.0, 4.4 * len(tasks) + 0.4), 4.2)
    axes = fig.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    said = []
    for ax, task in zip(axes, tasks):
        for i, r in enumerate(rounds):
            part = frame[(frame["task"] == task) & (frame["round"] == r)]
            if part.empty:
                continue
            look = style.Look(f"after {r} round{'s' * (r > 1)}", *style.STEPS[i], "-")
            marks.line(ax, intervals.table(part, ["hop"], "agreement"), "hop", look, look.label)
            marks.line(ax, intervals.table(part, ["hop"], "chain", resamples=0), "hop", look, None, band=False, linewidth=0.9,
                       linestyle=(0, (1, 1.6)), markersize=0)
        whole = frame[(frame["task"] == task) & (frame["round"] == last)]
        accepted = whole.groupby("hop")["chain"].mean().sum()
        said.append(f"{task or 'prompts'}: {style.number(accepted, 1)} drafts accepted after {last} rounds")
        style.depth_axis(ax, range(1, int(frame["hop"].max()) + 1), "place of the guess behind the anchor (hops)")
        ax.set_title(task or "prompts")
        ax.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of anchors, guess right")
    policy, updates = style.look(style.POLICIES, frame["policy"].iloc[0]).label.split(" (")[0], int(frame["updates"].iloc[0])
    each = f"{updates} recurrence{'s' * (updates > 1)} a round"
    return style.finish(
        fig,
        f"{model}: how far right guesses travel",
        style.caption(frame, start, extra=f"Dotted: all guesses up to there are right. Prefix: {policy}; {each}"),
        f"Lines of the share of right guesses against hops on {model}, by rounds of refinement. {'; '.join(said)}.",
        style.handles_of(axes[0]),
        5,
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("hops"))
