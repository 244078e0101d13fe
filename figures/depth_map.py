"""A heat map with recurrences across and named parts of the model upwards, its colour bar beside it."""

from __future__ import annotations

from figures import style

_MOST_NAMES, _MOST_DEPTHS = 24, 8  # that an axis has room for


def heat(fig, ax, means, names, label, **colours) -> None:
    """means: a table [parts, depths], the first part at the bottom; names: of its rows; label: of the colour bar.

    colours: cmap, vmin and vmax; without vmin, red is above zero and blue below, equally far.
    """
    if "vmin" not in colours:
        most = float(means.abs().to_numpy().max()) or 1.0
        colours = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    image = ax.imshow(means.to_numpy(), origin="lower", aspect="auto", interpolation="nearest", **colours)
    step, depths = max(1, len(names) // _MOST_NAMES), list(means.columns)
    ax.set_yticks(range(0, len(names), step), names[::step], fontsize=style.TICK - 1)
    every = max(1, len(depths) // _MOST_DEPTHS)
    ax.set_xticks(range(0, len(depths), every), [str(d) for d in depths[::every]])
    ax.grid(visible=False)
    ax.set_xlabel("recurrence depth r")
    bar = fig.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)


def of_core(part, within, value):
    """(means [(cycle, *within), depth] of the core's rows as they run, from the bottom up; the name of each row's layer) or None.

    Inner cycles come before the core itself (cycle 0).
    """
    core = part[part["part"].isin(["core", "inner"])]
    if core.empty:
        return None
    means = core.groupby(["cycle", *within, "depth"], observed=True)[value].mean().unstack("depth")
    order = sorted(means.index, key=lambda i: (i[0] == 0, *i))
    cycles = any(i[0] for i in order)
    return means.loc[order], [f"{f'inner {c}, ' if c else 'slow, ' if cycles else ''}layer {layer}" for c, layer, *_ in order]
