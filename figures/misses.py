"""Why decoders were faster or slower than planned: how much of each miss is acceptance, the block calls, or what lies between them."""

from __future__ import annotations

from figures import style

COLUMNS = ("model", "task", "decoder", "exact_calls", "speedup_predicted", "speedup_measured", "acceptance", "kernel", "host_factor")
PARTS = {  # factor -> (label, colour, hatch)
    "acceptance": ("acceptance: block calls per token", "#0077BB", ""),
    "kernel": ("kernel: seconds inside block calls", "#EE7733", "///"),
    "host_factor": ("host: seconds between them", "#999999", "..."),
}
_NARROW, _MIDDLE = (0.5, 0.6, 0.7, 0.85, 1, 1.15, 1.4, 1.7), (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4)  # ratios at ticks
_WIDE = tuple(2.0**n for n in range(-8, 9))
_NEAR, _LEAST = 0.15, 0.2  # a miss that counts as near; half the axis at least


def draw(frame, *, model=None):
    """A column per task, a row per decoder: three steps from the prediction (1) to what was measured (the mark)."""
    style.check(frame, COLUMNS, "miss")
    frame, model = style.choose(frame, "model", model, "miss")
    frame = frame[frame["decoder"] != "AR"]  # the unit of both speeds
    style.check(frame, COLUMNS, "miss")
    tasks = style.order(frame["task"], style.TASKS)
    most = max(int((frame["task"] == t).sum()) for t in tasks)
    fig = style.figure(1.5 + 5.2 * len(tasks), 1.9 + 0.45 * most)
    ends = frame["speedup_measured"] / frame["speedup_predicted"]
    steps = [_log(v) for r in frame.itertuples() for v in _steps(r)]
    reach = min(-_LEAST, 1.15 * min(steps)), max(_LEAST, 1.15 * max(steps))
    for ax, task in zip(fig.subplots(1, len(tasks), squeeze=False)[0], tasks):
        part = frame[frame["task"] == task].assign(end=ends)
        part = part.sort_values("end", ascending=False, kind="stable")
        _panel(ax, part)
        ax.set_title(task or "prompts")
        _percent_axis(ax, reach)
    return style.finish(
        fig,
        f"{model}: what the plan missed, and by what",
        f"Three steps lead from the predicted speed (line at 0) to the measured one (mark), each from where the one above ends. Shaded: "
        f"within {100 * _NEAR:.0f} %. Speeds are relative to AR's, so that a machine that is slow today moves none of it. =: calls "
        "predicted exactly, by replay.",
        f"Bars of what the plan missed on {model}: {'; '.join(map(_said, frame.itertuples()))}.",
        _handles(),
        4,
    )


def _panel(ax, part):
    ax.axvspan(_log(1 - _NEAR), _log(1 + _NEAR), color=style.GRID, alpha=0.45, linewidth=0, zorder=0)
    ax.axvline(0, color=style.INK, linewidth=0.9, zorder=2)
    for y, r in enumerate(part.itertuples()):
        at = _steps(r)
        for i, (name, begin, end) in enumerate(zip(PARTS, at, at[1:])):
            _, colour, hatch = PARTS[name]
            ax.barh(y + 0.24 * (i - 1), _log(end) - _log(begin), left=_log(begin), height=0.22, color=colour, hatch=hatch,
                    edgecolor="white", linewidth=0)
        ax.plot(_log(at[-1]), y + 0.24, marker="D", color=style.INK, markersize=5, zorder=4)
    ax.set_yticks(range(len(part)), [f"{r.decoder} {'=' if r.exact_calls else ''}".strip() for r in part.itertuples()])
    ax.set_ylim(len(part) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def _steps(r) -> list[float]:
    """Speed over the predicted one, after each factor."""
    out = [1.0]
    for name in PARTS:
        out.append(out[-1] * getattr(r, name))
    return out


def _percent_axis(ax, reach):
    """Ratios on a logarithmic scale, so that twice and half as fast are equally far, with ticks in per cent."""
    steps = _NARROW if max(-reach[0], reach[1]) < _log(1.9) else _MIDDLE if max(-reach[0], reach[1]) < _log(4.5) else _WIDE
    ticks = [t for t in steps if reach[0] <= _log(t) <= reach[1]]
    ax.set_xlim(*reach)
    ax.set_xticks([_log(t) for t in ticks], [f"{100 * (t - 1):+.0f} %" if t != 1 else "0" for t in ticks])
    ax.set_xlabel("measured against predicted speed")


def _log(ratio):
    from math import log

    return log(ratio)


def _said(r):
    whole, *parts = (f"{100 * (ratio - 1):+.0f} %" for ratio in (r.speedup_measured / r.speedup_predicted, r.acceptance, r.kernel,
                                                               r.host_factor))
    return f"{r.task} {r.decoder} {whole} (acceptance {parts[0]}, kernel {parts[1]}, host {parts[2]})"


def _handles():
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    parts = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label) for label, colour, hatch in PARTS.values()]
    return [*parts, Line2D([], [], marker="D", color=style.INK, linestyle="none", markersize=5, label="measured")]


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("miss"))
