"""Settle depth: after which recurrence the top token never changes again."""

from __future__ import annotations

from figures import style


def draw(frame, *, model=None, start=None):
    """Share of positions by settle depth, bars per task, and the running share above them."""
    frame, model, start = style.rows(frame, ("model", "task", "prompt", "start", "settle_depth", "positions"), "settle", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    depths = range(int(frame["settle_depth"].min()), int(frame["settle_depth"].max()) + 1)
    fig = style.figure(max(5.5, min(10.0, 2.5 + 0.45 * len(depths))), 3.9)
    ax = fig.subplots()
    width = 0.8 / len(tasks)
    said = []
    for i, task in enumerate(tasks):
        look = style.look(style.TASKS, task)
        counts = frame[frame["task"] == task].groupby("settle_depth")["positions"].sum().reindex(depths, fill_value=0)
        share = counts / counts.sum()
        mean = float((share * share.index).sum())
        place = [d + (i - (len(tasks) - 1) / 2) * width for d in depths]
        bars = ax.bar(
            place,
            share,
            width * 0.92,
            color=look.colour,
            alpha=0.85,
            hatch=("", "///", "...", "xx")[i % 4],
            edgecolor="white",
            label=f"{task or 'prompts'}: mean settle depth {mean:.2f}, {style.count(counts.sum(), 'position')}",
        )
        if len(depths) <= 8:
            ax.bar_label(bars, [f"{s:.0%}" if s >= 0.005 else "" for s in share], fontsize=style.TICK - 1, padding=2)
        said.append(f"{task}: mean {mean:.2f}, {share.iloc[0]:.0%} at depth {depths[0]}")
    ax.set_xlabel("settle depth (first depth after which the top token never changes)")
    ax.set_ylabel("share of positions")
    step = max(1, len(depths) // 16)
    ax.set_xticks(list(depths)[::step])
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
