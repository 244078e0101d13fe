"""Head attribution: what each attention head, at each recurrence, adds to a token's logit."""

from __future__ import annotations

from figures import depth_map, intervals, marks, style
from figures.attribution import TARGETS, chosen

COLUMNS = ("model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "head", "value_logits", "logit")
_SHOWN = 10
_KEYS = ["part", "depth", "cycle", "layer", "head"]


def draw(frame, *, model=None, start=None, target=None, against=None):
    """Per task: a heat map of the core's heads by recurrence, and the heads that add or take most, wherever they are."""
    frame, model, start, target, against = chosen(frame, COLUMNS, "head_attribution", model, start, target, against)
    tasks = style.order(frame["task"], style.TASKS)
    rows = frame.loc[frame["part"].isin(["core", "inner"]), ["cycle", "layer", "head"]].drop_duplicates()
    tall = min(6.0, max(2.9, 0.9 + 0.16 * len(rows)))
    fig = style.figure(10.5, 1.5 + tall * len(tasks))
    axes = fig.subplots(len(tasks), 2, squeeze=False, width_ratios=[1.3, 1])
    said = []
    for (left, right), task in zip(axes, tasks):
        part = frame[frame["task"] == task]
        _map(fig, left, part)
        left.set_title(f"{task or 'prompts'}: heads of the core")
        said.append(f"{task or 'prompts'}: {_most(right, part)}")
    of = TARGETS.get(target, f"token {target}")
    if against:
        of += " minus the mean logit" if against == "mean" else f" minus token {against}"
    return style.finish(
        fig,
        f"{model}: which heads add to the logit of {of}",
        style.caption(frame, start, "whiskers", "Direct paths only, norm scales and gates held at the run's; an attention's heads add up "
                                                f"to it. Right: the {_SHOWN} largest, either way"),
        f"Contributions in logits of the attention heads of {model}. Largest, {'; '.join(said)}.",
    )


def _map(fig, ax, part):
    found = depth_map.of_core(part, ["layer", "head"], "value_logits")
    if found is None:
        return ax.set_axis_off()
    means, layers = found
    depth_map.heat(fig, ax, means, [f"{layer} head {i[-1]}" for layer, i in zip(layers, means.index)], "contribution (logits)")


def _most(ax, part):
    """Bars of the heads with the largest mean contributions; returns the first of them in words."""
    means = intervals.table(part, _KEYS, "value_logits", resamples=0)
    largest = means.loc[means["mean"].abs().nlargest(_SHOWN).index, _KEYS]
    shown = intervals.table(part.merge(largest, on=_KEYS), _KEYS, "value_logits").sort_values("mean")
    names = [_name(row) for row in shown.itertuples()]
    places = range(len(names))
    ax.barh(places, shown["mean"], color=["#B2182B" if v > 0 else "#2166AC" for v in shown["mean"]], alpha=0.85, height=0.7)
    marks.bars(ax, places, shown, style.INK, horizontal=True)
    ax.set_yticks(places, names)
    ax.axvline(0, color=style.QUIET, linewidth=0.8)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("contribution (logits)")
    ax.set_title("largest of all")
    best = shown["mean"].abs().to_numpy().argmax()
    return f"{names[best]} {style.number(float(shown['mean'].iloc[best]), 2, True)}"


def _name(row):
    where = {"core": f"r = {row.depth}", "inner": f"r = {row.depth}, inner {row.cycle}",
             "prelude": f"prelude at r = {row.depth}" if row.depth else "prelude"}.get(row.part, row.part)
    return f"{where}, layer {row.layer} head {row.head}"


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("head_attribution"))
