"""Direct logit attribution: what each component adds to a token's logit, recurrence by recurrence."""

from __future__ import annotations

from figures import depth_map, intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "branch", "value_logits", "logit")
GROUPS = {  # what the lines sum over
    "attn": style.Look("core attention", "#0072B2", "o", "-"),
    "mlp": style.Look("core MLPs", "#D55E00", "D", (0, (6, 1.5))),
    "fed": style.Look("embedding and prelude, as injected here", "#009E73", "s", (0, (3, 1, 1, 1))),
}
TARGETS = {"next": "the text's next token", "top": "the top token"}


def chosen(frame, columns, kind, model, start, target, against):
    """The rows of one model, start, target and what it is set against, and which these are: as given, or by preference."""
    frame, model, start = style.rows(frame, columns, kind, model, start)
    frame, target = style.choose(frame, "target", target, kind, ("next", "top"))
    frame, against = style.choose(frame, "against", against, kind, ("", "mean"))
    return frame, model, start, target, against


def draw(frame, *, model=None, start=None, target=None, against=None):
    """Per task: contributions by recurrence (lines), by layer and recurrence (heat map), and those outside the loop (bars)."""
    frame, model, start, target, against = chosen(frame, COLUMNS, "attribution", model, start, target, against)
    tasks = style.order(frame["task"], style.TASKS)
    layers = frame.loc[frame["part"].isin(["core", "inner"]), ["cycle", "layer"]].drop_duplicates()
    tall = max(2.7, 0.9 + 0.2 * 2 * len(layers))
    fig = style.figure(11.5, 1.5 + tall * len(tasks))
    axes = fig.subplots(len(tasks), 3, squeeze=False, width_ratios=[1.15, 1.25, 0.8])
    said = []
    for row, task in zip(axes, tasks):
        part = frame[frame["task"] == task]
        _lines(row[0], part)
        row[0].set_title(f"{task or 'prompts'}: by recurrence")
        _map(fig, row[1], part)
        said.append(f"{task or 'prompts'}: {_outside(row[2], part)}")
    of = TARGETS.get(target, f"token {target}")
    if against:
        of += " minus the mean logit" if against == "mean" else f" minus token {against}"
    return style.finish(
        fig,
        f"{model}: what adds to the logit of {of}",
        style.caption(frame, start, "bands and whiskers",
                      "Direct paths only, norm scales held at the run's; a prompt's contributions add up to its logit"),
        f"Contributions in logits of the components of {model} by recurrence, layer and part. {'; '.join(said)}.",
        style.handles_of(axes[0, 0]),
        3,
    )


def _lines(ax, part):
    """One line each for what attention, MLPs and injections add at every recurrence, summed over layers inside a prompt."""
    inside = part[part["depth"] > 0]
    if inside.empty:
        return ax.set_axis_off()
    group = inside["branch"].where(inside["part"].isin(["core", "inner"]), "fed")
    keys = ["task", "prompt", "group", "depth"]
    sums = inside.assign(group=group).groupby(keys, observed=True)["value_logits"].sum().reset_index()
    means = intervals.table(sums, ["group", "depth"], "value_logits")
    for name in style.order(means["group"], GROUPS):
        look = GROUPS[name]
        marks.line(ax, means[means["group"] == name], "depth", look, look.label)
    ax.axhline(0, color=style.QUIET, linewidth=0.8)
    ax.set_ylabel("contribution (logits)")
    depths = sorted(inside["depth"].unique())  # not logarithmic: it is the last recurrences that differ
    ax.set_xticks(depths[:: max(1, len(depths) // 8)])
    ax.set_xlabel("recurrence depth r")


def _map(fig, ax, part):
    """Core branches by recurrence, attention before the MLP."""
    found = depth_map.of_core(part, ["layer", "branch"], "value_logits")
    if found is None:
        return ax.set_axis_off()
    means, layers = found
    depth_map.heat(fig, ax, means, [f"{layer} {i[-1]}" for layer, i in zip(layers, means.index)], "contribution (logits)")
    ax.set_title("by layer and recurrence")


def _outside(ax, part):
    """Bars of the sums of parts, and the logit that they make; returns them in words."""
    label = part["part"].replace({"inner": "core"}) + part["branch"].map({"attn": " attention", "mlp": " MLPs"}).fillna("")
    sums = part.assign(label=label).groupby(["task", "prompt", "label"], observed=True)["value_logits"].sum().reset_index()
    means = intervals.table(sums, ["label"], "value_logits").set_index("label")
    wanted = ["start", "embedding", *(f"{p}{b}" for p in ("prelude", "core", "coda") for b in (" attention", " MLPs"))]
    names = [n for n in wanted if n in means.index]
    whole = intervals.table(part, [], "logit").iloc[0]
    means.loc["logit"] = whole
    names.append("logit")
    shown = means.loc[names]
    places = range(len(names))
    colours = [style.INK if n == "logit" else GROUPS["attn" if "attention" in n else "mlp" if "MLPs" in n else "fed"].colour for n in names]
    ax.barh(places, shown["mean"], color=colours, alpha=0.85, height=0.7)
    marks.bars(ax, places, shown, style.INK, horizontal=True)
    ax.set_yticks(places, ["= logit" if n == "logit" else n for n in names])
    ax.invert_yaxis()
    ax.axvline(0, color=style.QUIET, linewidth=0.8)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("contribution (logits)")
    ax.set_title("summed over depth")
    return ", ".join(f"{n} {style.number(float(shown.loc[n, 'mean']), 2, True)}" for n in names)


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("attribution"))
