"""Depth grid: a shallow draft whose prefix keys and prefix values are read at any two depths."""

from __future__ import annotations

from figures import intervals, style
from interventions.effects import NOISE

MEASURES = {"agreement": "top-1 agreement with depth T", "kl_nats": "KL to depth T (nats)"}
_SPAN = 0.1  # of agreement, that the colours cover at least: what a few positions do must not look like a landscape


def draw(frame, *, model=None, start=None, measure="agreement"):
    """Heat maps of `measure` ("agreement" or "kl_nats"): columns by task, rows by draft depth, the four named policies framed."""
    from matplotlib.patches import Rectangle
    from seaborn import heatmap

    columns = ("model", "task", "prompt", "start", "draft_depth", "k_depth", "v_depth", measure)
    frame, model, start = style.rows(frame, columns, "depth_grid", model, start)
    tasks, drafts = style.order(frame["task"], style.TASKS), sorted(frame["draft_depth"].unique())
    size = max(frame["k_depth"].nunique(), frame["v_depth"].nunique())
    cell = min(0.75, max(0.45, 6 / size))
    fig = style.figure(max(4.6, len(tasks) * (cell * size + 1.5) + 0.6), len(drafts) * (cell * size + 0.8) + 1.2)
    axes = fig.subplots(len(drafts), len(tasks), squeeze=False)
    means = frame.groupby(["task", "draft_depth", "k_depth", "v_depth"], observed=True)[measure].mean()
    low, apart = float(means.min()), _apart(frame, measure)
    if measure == "agreement":
        low = max(0.0, min(low, float(means.max()) - _SPAN))
    said = []
    for row, d in enumerate(drafts):
        for column, task in enumerate(tasks):
            ax = axes[row, column]
            grid = means.loc[task, d].unstack("v_depth").sort_index(ascending=False)
            grid = grid[sorted(grid.columns)]
            heatmap(
                grid,
                ax=ax,
                annot=size <= 12,
                fmt=".3f" if size <= 6 else ".2f",
                cmap="cividis" if measure == "agreement" else "cividis_r",
                annot_kws={"fontsize": style.TICK},
                square=True,
                linewidths=0.5,
                vmin=low,
                vmax=means.max(),
                cbar=column == len(tasks) - 1,
                cbar_kws={"label": MEASURES.get(measure, measure), "shrink": 0.85},
            )
            for text, (k, v) in zip(ax.texts, ((k, v) for k in grid.index for v in grid.columns)):
                text.set_fontweight("bold" if (task, d, k, v) in apart else "normal")
            ax.set_title(f"{task or 'prompts'}, draft depth {d}")
            ax.set_xlabel("prefix values read at depth \u03bd")
            ax.set_ylabel("prefix keys read at depth \u03ba")
            ax.tick_params(length=0, rotation=0)
            full = max(grid.columns)
            # an aligned draft reads depth r at its r-th recurrence: a fixed cell of the grid says the same only at draft depth 1
            for name, k, v in (("aligned", d, d), ("deep_v", d, full), ("deep_k", full, d), ("deep_kv", full, full))[0 if d == 1 else 3 :]:
                if k in grid.index and v in grid.columns:
                    x, y = list(grid.columns).index(v), list(grid.index).index(k)
                    look = style.POLICIES[name]
                    ax.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, fill=False, edgecolor="white", linewidth=4))
                    ax.add_patch(
                        Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, fill=False, edgecolor=look.colour, linewidth=2, linestyle=look.line)
                    )
                    said.append(f"{task} draft depth {d} {name} {grid.loc[k, v]:.3f}")
    from matplotlib.patches import Patch

    shown = [p for name, p in style.POLICIES.items() if any(f" {name} " in s for s in said)]
    handles = [Patch(fill=False, edgecolor=p.colour, linewidth=2, linestyle=p.line, label=p.label.split(" (")[0]) for p in shown]
    return style.finish(
        fig,
        f"{model}: reading the prefix at other depths",
        style.caption(frame, start, None, f"Numbers: mean over prompts; {_marked(frame)}"),
        f"Heat map of {MEASURES.get(measure, measure)} on {model} by the depth of the prefix keys and values read. {'; '.join(said)}.",
        handles,
    )


def _apart(frame, measure):
    """(task, draft depth, k depth, v depth) of cells whose paired difference to the draft's own depth is clear over enough prompts."""
    own = (frame["k_depth"] == frame["draft_depth"]) & (frame["v_depth"] == frame["draft_depth"])
    differences = intervals.paired(frame, ["task", "prompt", "draft_depth"], measure, own)
    table = intervals.table(differences, ["task", "draft_depth", "k_depth", "v_depth"], "difference")
    table = table[(table["n"] >= intervals.FEW) & ((table["low"] > NOISE) | (table["high"] < -NOISE))]
    return set(table[["task", "draft_depth", "k_depth", "v_depth"]].itertuples(index=False, name=None))


def _marked(frame):
    if frame.groupby("task", observed=True)["prompt"].nunique().max() < intervals.FEW:
        return f"over fewer than {intervals.FEW} prompts, too few to say which cells differ"
    return "bold: the 95 % interval of the paired difference to the cell of the draft's own depth excludes 0"


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("depth_grid"))
