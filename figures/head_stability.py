"""Head stability: how far each head's attention pattern is from the one it has at full depth."""

from __future__ import annotations

from figures import depth_map, intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "layer", "head", "depth", "js_nats")


def draw(frame, *, model=None, start=None):
    """Per task: the mean over heads by depth, a line for each core layer, and a heat map of all heads."""
    frame, model, start = style.rows(frame, COLUMNS, "head_stability", model, start)
    tasks, layers = style.order(frame["task"], style.TASKS), sorted(frame["layer"].unique())
    heads = frame[["layer", "head"]].drop_duplicates()
    tall = min(6.0, max(2.7, 0.9 + 0.16 * len(heads)))
    fig = style.figure(9.0, 1.5 + tall * len(tasks))
    axes = fig.subplots(len(tasks), 2, squeeze=False, width_ratios=[1, 1.2])
    most = float(frame.groupby(["task", "layer", "head", "depth"])["js_nats"].mean().max()) or 1.0
    looks = {n: style.Look(f"layer {n}", colour, "osD^vP"[i % 6]) for i, (n, colour) in enumerate(zip(layers, _colours(len(layers))))}
    said = []
    for (ax, beside), task in zip(axes, tasks):
        part = frame[frame["task"] == task]
        means = intervals.table(part, ["layer", "depth"], "js_nats")
        for layer in layers:
            marks.line(ax, means[means["layer"] == layer], "depth", looks[layer], looks[layer].label, band=len(layers) <= 4)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("JS divergence to depth T (nats)")
        ax.set_title(f"{task or 'prompts'}: mean over heads")
        style.depth_axis(ax, part["depth"].unique())
        _map(fig, beside, part, most)
        first = part[part["depth"] == part["depth"].min()].groupby(["layer", "head"])["js_nats"].mean()
        worst = first.idxmax()
        said.append(f"{task or 'prompts'}: mean {first.mean():.3f}, most {first.max():.3f} in head {worst[1]} of layer {worst[0]}")
    return style.finish(
        fig,
        f"{model}: when heads look where they will look",
        style.caption(frame, start, extra="0: the same pattern as at full depth; 0.69: no key in common"),
        f"Jensen-Shannon divergence of attention patterns to full depth on {model}. At depth {frame['depth'].min()}: {'; '.join(said)}.",
        style.handles_of(axes[0, 0])[:12],
        6,
    )


def _colours(count):
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(1, count - 1)) for i in range(count)]


def _map(fig, ax, part, most):
    means = part.groupby(["layer", "head", "depth"])["js_nats"].mean().unstack("depth").sort_index()
    names = [f"layer {layer} head {head}" for layer, head in means.index]
    depth_map.heat(fig, ax, means, names, "JS divergence (nats)", cmap="magma_r", vmin=0, vmax=most)
    ax.set_title("every head")


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("head_stability"))
