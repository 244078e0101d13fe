"""Similarity of depths: linear CKA between the states of any two recurrences."""

from __future__ import annotations

from figures import style

COLUMNS = ("model", "task", "prompt", "start", "depth", "other_depth", "cka")


def draw(frame, *, model=None, start=None):
    """One heat map per task, depth against depth, mean over prompts."""
    frame, model, start = style.rows(frame, COLUMNS, "depth_similarity", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    fig = style.figure(max(5.0, 3.6 * len(tasks) + 0.9), 4.7)
    axes = fig.subplots(1, len(tasks), squeeze=False)[0]
    low = min(0.0, float(frame.groupby(["task", "depth", "other_depth"])["cka"].mean().min()))
    said = []
    for ax, task in zip(axes, tasks):
        means = frame[frame["task"] == task].groupby(["depth", "other_depth"])["cka"].mean().unstack("other_depth").sort_index()
        image = ax.imshow(means.to_numpy(), origin="lower", cmap="cividis", vmin=low, vmax=1, interpolation="nearest")
        for set_ticks, depths in ((ax.set_xticks, list(means.columns)), (ax.set_yticks, list(means.index))):
            every = max(1, len(depths) // 8)
            set_ticks(range(0, len(depths), every), [str(d) for d in depths[::every]])
        ax.grid(visible=False)
        ax.set_title(task or "prompts")
        ax.set_xlabel("recurrence depth s")
        ax.set_ylabel("recurrence depth r")
        said.append(f"{task or 'prompts'}: depth {means.index[0]} to depth {means.columns[-1]} {style.number(means.iloc[0, -1], 3)}")
    bar = fig.colorbar(image, ax=axes[-1], shrink=0.8, pad=0.02)
    bar.set_label("linear CKA")
    bar.outline.set_visible(False)
    return style.finish(
        fig,
        f"{model}: which depths hold the same picture",
        style.caption(frame, start, None, "Unbiased linear CKA over positions, mean over prompts; 1: alike but for rotation, scale"),
        f"Heat maps of linear CKA between states of {model}, depth against depth. {'; '.join(said)}.",
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("depth_similarity"))
