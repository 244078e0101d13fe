"""Runs of agreement: how likely a depth stays right for so many positions, and how likely it would be if misses were independent."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "depth", "length", "cut", "runs")
_LONGEST = 32


def draw(frame, *, model=None, start=None):
    """A panel per task: share of windows of n positions that agree throughout, by depth; dotted: independent misses of the same number."""
    frame, model, start = style.rows(frame, COLUMNS, "agreement_runs", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    depths = [d for d in sorted(frame["depth"].unique()) if d < frame["depth"].max()] or sorted(frame["depth"].unique())
    shown = [d for d in (1, 2, 4, 8) if d in depths] or depths[:1]
    fig = style.figure(max(5.0, 4.4 * len(tasks) + 0.4), 4.2)
    axes = fig.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    said = []
    for ax, task in zip(axes, tasks):
        for i, d in enumerate(shown):
            part = frame[(frame["task"] == task) & (frame["depth"] == d)]
            lengths, share, independent = survival(part)
            look = style.Look(f"depth {d}", *style.STEPS[i], "-")
            marks.line(ax, spread(part, lengths, share), "length", look, look.label, markersize=3.5, markevery=4)
            ax.plot(lengths, independent, color=look.colour, linestyle=(0, (1, 1.6)), linewidth=1.1)
            said.append(f"{task or 'prompts'}, depth {d}: {style.number(share[min(3, len(share) - 1)], 2)} of windows of 4")
        ax.set_title(task or "prompts")
        ax.set_xlabel("positions n in a row")
        ax.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of windows all right")
    return style.finish(
        fig,
        f"{model}: for how many positions a depth stays right",
        style.caption(frame, start, extra="Pooled over prompts. Dotted: as many misses, independent of each other; a line above its dotted "
                                          "one says that misses come in clusters"),
        f"Lines of the share of windows of n positions that agree with full depth throughout, on {model}. {'; '.join(said)}.",
        style.handles_of(axes[0]),
        4,
    )


def survival(part):
    """(n, share of windows of n positions that all agree, the same for independent misses), n = 1.. up to the longest run."""
    lengths = list(range(1, int(min(_LONGEST, max(1, part["length"].max()))) + 1))
    length, runs, missed = part["length"].to_numpy(), part["runs"].to_numpy(), part["runs"].where(~part["cut"].astype(bool), 0)
    positions = (part["length"] * part["runs"] + missed).groupby(part["prompt"]).sum().to_numpy()
    a = float((length * runs).sum()) / float(positions.sum())
    windows = [float((positions - n + 1).clip(min=0).sum()) for n in lengths]
    share = [float((runs * (length - n + 1).clip(min=0)).sum()) / w if w else float("nan") for n, w in zip(lengths, windows)]
    return lengths, share, [a**n for n in lengths]


def spread(part, lengths, share):
    """Columns length, mean (the pooled share), low, high (over prompts, windows of a prompt together) and n, prompts with such windows."""
    import numpy as np
    import pandas as pd

    n, good, windows = np.array(lengths), [], []
    for _, own in part.groupby("prompt"):
        length, runs = own["length"].to_numpy(), own["runs"].to_numpy()
        positions = (length * runs).sum() + runs[~own["cut"].to_numpy(bool)].sum()
        windows.append(np.clip(positions - n + 1, 0, None))
        good.append((runs[:, None] * np.clip(length[:, None] - n + 1, 0, None)).sum(0))
    good, windows = np.stack(good, 1).astype(float), np.stack(windows, 1).astype(float)  # [lengths, prompts]
    low, high = intervals.ratio_bounds(good, windows)
    return pd.DataFrame({"length": lengths, "mean": share, "low": low, "high": high, "n": (windows > 0).sum(1)})


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("agreement_runs"))
