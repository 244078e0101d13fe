"""Timing: seconds of one call by number of rows, the machine's side of the cost model."""

from __future__ import annotations

from figures import style

PARTS = {"recur": "core (one recurrence)", "prelude": "prelude", "readout": "coda and head"}
SHAPES = {  # how the rows lie -> (marker, colour, label)
    "chain": ("o", "#222222", "a block: consecutive positions, one depth"),
    "fresh": ("v", "#EE7733", "a block on other rows than the call before"),
    "deep": ("P", "#009988", "a draft that reads deeper than it stands"),
    "wave": ("D", "#0077BB", "a wave: consecutive positions, each at its own depth"),
    "at": ("^", "#882255", "a check and a draft, far apart"),
    "tree": ("s", "#CC3311", "two branches from one root"),
}
LINES = ("-", (0, (2.5, 1.5)), (0, (1, 1.2)))  # by prefix length


def draw(frame, *, model=None):
    """A panel per part of the model; lines by row shape, lower quartiles over repeats (what the plan reads), a band up to the upper."""
    style.check(frame, ("model", "part", "shape", "rows", "prefix_length", "seconds"), "timing")
    frame, model = style.choose(frame, "model", model, "timing")
    frame = frame[~frame["part"].isin(("host", "context"))]  # by kind of call, not by number of rows
    parts = [p for p in PARTS if p in set(frame["part"])] + sorted(set(frame["part"]) - set(PARTS))
    lengths = sorted(frame["prefix_length"].unique())
    fig = style.figure(3.7 * len(parts) + 0.6, 4.0)
    axes = fig.subplots(1, len(parts), squeeze=False)[0]
    said = []
    for ax, part in zip(axes, parts):
        for (shape, length), cell in frame[frame["part"] == part].groupby(["shape", "prefix_length"], observed=True):
            marker, colour, _ = SHAPES.get(shape, ("s", style.QUIET, shape))
            line = LINES[lengths.index(length) % len(LINES)]
            # quartiles, not extremes: one interruption by the machine must not set the scale
            ms = cell.groupby("rows")["seconds"].quantile([0.25, 0.75]).unstack().set_axis(["low", "high"], axis=1) * 1e3
            ax.plot(ms.index, ms["low"], marker=marker, linestyle=line, color=colour)
            ax.fill_between(ms.index.astype(float), ms["low"], ms["high"], color=colour, alpha=0.12, linewidth=0)
            if len(ms) == 1:  # a band needs two points
                ax.vlines(ms.index, ms["low"], ms["high"], color=colour, linewidth=1.4)
            said.append(
                f"{part} {shape} {ms['low'].iloc[0]:.2f} ms at {ms.index[0]} row, {ms['low'].iloc[-1]:.2f} ms at {ms.index[-1]}"
            )
        ax.set_title(PARTS.get(part, part))
        style.depth_axis(ax, {1, *frame.loc[frame["part"] == part, "rows"]}, "rows in the call")
        style.log_axis(ax)  # what n rows cost in calls on one row is what counts, and branches cost tens of them
    axes[0].set_ylabel("milliseconds per call")
    each = frame.groupby(["part", "shape", "rows", "prefix_length"], observed=True).size()
    return style.finish(
        fig,
        f"{model}: what one call costs on this machine",
        f"Lines: lower quartile of {'-'.join(map(str, sorted({each.min(), each.max()})))} rounds, which is what the plan reads; bands: up "
        "to the upper quartile. Prefix: positions before the rows.",
        f"Lines of milliseconds per call against rows on {model}: {'; '.join(said)}.",
        _handles(frame, lengths),
        3,
    )


def _handles(frame, lengths):
    """A mark for each shape, and a line for each prefix length."""
    from matplotlib.lines import Line2D

    held = [name for name in SHAPES if name in set(frame["shape"])] + sorted(set(frame["shape"]) - set(SHAPES))
    looks = [SHAPES.get(name, ("s", style.QUIET, name)) for name in held]
    return [*(Line2D([], [], marker=marker, color=colour, label=words) for marker, colour, words in looks),
            *(Line2D([], [], color=style.QUIET, linestyle=LINES[i % len(LINES)], label=f"prefix of {style.count(n, 'position')}")
              for i, n in enumerate(lengths))]


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("timing"))
