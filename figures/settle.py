"""Settle depth: after which recurrence the top token never changes again."""

from __future__ import annotations

from figures import style

_SEEN = 0.005  # of positions: bars below are no longer seen, and stand together at the end of the axis


def draw(frame, *, model=None, start=None):
    """Share of positions by settle depth, a bar per task; depths beyond the last at which a bar could be seen are one bar, 'later'."""
    frame, model, start = style.rows(frame, ("model", "task", "prompt", "start", "settle_depth", "positions"), "settle", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    depths = range(int(frame["settle_depth"].min()), int(frame["settle_depth"].max()) + 1)
    shares = {}
    for task in tasks:
        counts = frame[frame["task"] == task].groupby("settle_depth")["positions"].sum().reindex(depths, fill_value=0)
        shares[task] = counts / counts.sum()
    last = max((d for share in shares.values() for d in depths if share[d] >= _SEEN), default=depths[-1])
    shown = [d for d in depths if d <= last]
    later = last < depths[-1] and any(share.loc[last + 1 :].sum() > 0 for share in shares.values())
    fig = style.figure(max(5.5, min(10.0, 2.5 + 0.65 * (len(shown) + later))), 3.9)
    ax = fig.subplots()
    width = 0.8 / len(tasks)
    said = []
    for i, task in enumerate(tasks):
        look = style.look(style.TASKS, task)
        share, positions = shares[task], frame.loc[frame["task"] == task, "positions"].sum()
        mean = float((share * share.index).sum())
        place = [d + (i - (len(tasks) - 1) / 2) * width for d in [*shown, *[last + 1] * later]]
        tall = [*share.loc[:last], *[share.loc[last + 1 :].sum()] * later]
        bars = ax.bar(
            place,
            tall,
            width * 0.92,
            color=look.colour,
            alpha=0.85,
            hatch=("", "///", "...", "xx")[i % 4],
            edgecolor="white",
            label=f"{task or 'prompts'}: mean settle depth {mean:.2f}, {style.count(positions, 'position')}",
        )
        if len(tall) <= 9:
            words = [f"{s:.0%}" if s >= 0.01 else f"{s:.1%}" if s > 0 else "" for s in tall]
            ax.bar_label(bars, words, fontsize=style.TICK - 1.5, padding=2)
        said.append(f"{task}: mean {mean:.2f}, {share.iloc[0]:.0%} at depth {depths[0]}")
    ax.set_xlabel("settle depth (first depth after which the top token never changes)")
    ax.set_ylabel("share of positions")
    step = max(1, len(shown) // 16)
    ticks = [*shown[::step], *[last + 1] * later]
    ax.set_xticks(ticks, [str(d) if d <= last else "later" for d in ticks])
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.12)
    return style.finish(
        fig,
        f"{model}: when the answer stops changing",
        style.caption(frame, start, None, "All positions of all prompts"),
        f"Bars of the share of positions by settle depth on {model}. {'; '.join(said)}.",
        style.handles_of(ax),
        1,
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("settle"))
