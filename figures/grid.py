"""The grid: predicted against measured speedup of every schedule, one panel per model and task."""

from __future__ import annotations

from figures import style

NEAR = 0.15  # the band drawn around predicted = measured
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12)  # speeds are ratios: twice and half as fast are equally far


def draw(frame, *, model=None, task=None):
    """A mark per schedule, coloured by decoder; the plan's pick is ringed, the fastest one measured has a square around it. Both axes
    are logarithmic."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    style.check(frame, ("model", "task", "decoder", "speedup_predicted", "speedup_measured", "planned"), "grid")
    if model is not None:
        frame, model = style.choose(frame, "model", model, "grid")
    if task is not None:
        frame, task = style.choose(frame, "task", task, "grid")
    panels = list(frame.groupby(["model", "task"], observed=True, sort=False))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    fig = style.figure(4.3 * columns, 4.1 * rows + 0.6)
    axes = fig.subplots(rows, columns, squeeze=False)
    said, seen = [], {}
    for ax, ((name, of), part) in zip(axes.flat, panels):
        top = 1.08 * float(part[["speedup_predicted", "speedup_measured"]].max().max())
        low = 0.93 * float(part[["speedup_predicted", "speedup_measured"]].min().min())
        ax.fill_between([low, top], [low * (1 - NEAR), top * (1 - NEAR)], [low * (1 + NEAR), top * (1 + NEAR)], color=style.QUIET,
                        alpha=0.18, linewidth=0)
        ax.plot([low, top], [low, top], color=style.QUIET, linestyle=(0, (4, 2)), linewidth=1)
        for decoder, x, y in zip(part.decoder, part.speedup_predicted, part.speedup_measured):
            look = style.decoder_look(decoder)
            seen.setdefault(style.family(decoder), look)
            ax.plot(x, y, marker=look.marker, markersize=5, color=look.colour, linestyle="none", alpha=0.75)
        best, picked = part.loc[part.speedup_measured.idxmax()], part[part.planned].iloc[0]
        ax.plot(best.speedup_predicted, best.speedup_measured, marker="s", markersize=13, markerfacecolor="none", color=style.INK)
        ax.plot(picked.speedup_predicted, picked.speedup_measured, marker="o", markersize=10, markerfacecolor="none", color=style.INK)
        timed = part[part.decoder != "AR"]
        near = float(((timed.speedup_measured / timed.speedup_predicted - 1).abs() <= NEAR).mean())
        ax.set_title(f"{name}, {of or 'prompts'}")
        ax.text(0.03, 0.97, f"{near:.0%} of {len(timed)} in the band\nregret {1 - picked.speedup_measured / best.speedup_measured:.1%}",
                transform=ax.transAxes, va="top", fontsize=style.TICK)
        for axis, set_scale, set_limits in ((ax.xaxis, ax.set_xscale, ax.set_xlim), (ax.yaxis, ax.set_yscale, ax.set_ylim)):
            set_scale("log")
            set_limits(low, top)
            axis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= top]))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_locator(NullLocator())
        ax.set_aspect("equal")
        ax.set_xlabel("predicted speedup (x)")
        ax.set_ylabel("measured speedup (x)")
        said.append(f"{name}, {of}: {near:.0%} of {len(timed)} schedules within {NEAR:.0%}; best {best.decoder} "
                    f"{style.number(best.speedup_measured)}x, picked {picked.decoder} {style.number(picked.speedup_measured)}x")
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    return style.finish(fig, "Every schedule of the grid: predicted before, measured after",
                        f"Speedup over AR of decode time. Band: within {NEAR:.0%}. Regret: share of speed that the plan's pick loses to "
                        "the fastest.",
                        f"Predicted against measured speedup. {'. '.join(said)}.", _handles(seen), 4)


def _handles(seen):
    from matplotlib.lines import Line2D

    rings = [Line2D([], [], marker=marker, markersize=10, markerfacecolor="none", color=style.INK, linestyle="none", label=words)
             for marker, words in (("o", "the plan's pick"), ("s", "the fastest measured"))]
    return [Line2D([], [], marker=look.marker, color=look.colour, linestyle="none", label=name) for name, look in seen.items()] + rings


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("grid"))
