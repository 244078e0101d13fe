"""Prefix channels: does a shallow draft guess better when it reads the prefix's full-depth values, keys, or both?

All effects are paired differences to the aligned draft at the same positions of the same prompts.
"""

from __future__ import annotations

from figures import intervals, marks, published as papers, style

KEYS = ["task", "prompt", "start", "depth", "lag"]
COLUMNS = ("model", *KEYS, "policy", "control", "agreement", "kl_nats")


def effects(frame, value="agreement"):
    """Mean paired difference to aligned with its interval, by task, start, depth, lag, policy and control."""
    base = (frame["policy"] == "aligned") & (frame["control"] == "none")
    differences = intervals.paired(frame, KEYS, value, base)
    differences = differences[(differences["policy"] != "aligned") | (differences["control"] != "none")]
    return intervals.table(differences, ("task", "start", "depth", "lag", "policy", "control"), "difference")


def draw(frame, *, model=None, start=None, published=False):
    """A row per task: effect on agreement by depth, the same with controls, effect on KL, effect by lag.

    published: also a panel of the papers' effects, which are too large for our axes.
    """
    frame, model, start = style.rows(frame, COLUMNS, "prefix_channels", model, start)
    tasks = style.order(frame["task"], style.TASKS)
    nearest, shallowest = frame["lag"].min(), frame["depth"].min()
    agreement, kl = effects(frame), effects(frame, "kl_nats")
    controls = (agreement["control"] != "none").any()
    lags = frame["lag"].nunique() > 1
    names = ["agreement", "kl", *["controls"] * bool(controls), *["lags"] * bool(lags), *["published"] * bool(published)]
    fig = style.figure(3.5 * len(names) + 0.3, 1.6 + 2.9 * len(tasks))
    axes = fig.subplots(len(tasks), len(names), squeeze=False)
    theirs = []
    for row, task in enumerate(tasks):
        ours, its_kl = agreement[agreement["task"] == task], kl[kl["task"] == task]
        near = ours[ours["lag"] == nearest]
        level = (
            frame[(frame["task"] == task) & (frame["policy"] == "aligned") & (frame["lag"] == nearest)].groupby("depth")["agreement"].mean()
        )
        ax = dict(zip(names, axes[row]))
        panel(ax["agreement"], near[near["control"] == "none"], "depth", "policy", style.POLICIES)
        ax["agreement"].set_title(f"{task or 'prompts'}: agreement")
        style.points(ax["agreement"].yaxis)
        ax["agreement"].set_xlabel("draft depth d (in brackets: aligned agreement)")
        ax["agreement"].set_xticks(range(len(level)), [f"{d}\n({a:.2f})" for d, a in level.items()])
        panel(ax["kl"], its_kl[(its_kl["lag"] == nearest) & (its_kl["control"] == "none")], "depth", "policy", style.POLICIES)
        ax["kl"].set_title(f"{task or 'prompts'}: KL (lower is better)")
        ax["kl"].set_ylabel("change in KL to depth T (nats)")
        ax["kl"].set_xlabel("draft depth d")
        if controls:
            panel(
                ax["controls"],
                near[near["policy"] == near.loc[near["control"] != "none", "policy"].iloc[0]]
                if (near["control"] != "none").any()
                else near[:0],
                "depth",
                "control",
                style.CONTROLS,
            )
            ax["controls"].set_title(f"{task or 'prompts'}: deep V and its controls")
            style.points(ax["controls"].yaxis)
            ax["controls"].set_xlabel("draft depth d")
        if lags:
            panel(ax["lags"], ours[(ours["depth"] == shallowest) & (ours["control"] == "none")], "lag", "policy", style.POLICIES)
            ax["lags"].set_title(f"{task or 'prompts'}: by lag, depth {shallowest}")
            style.points(ax["lags"].yaxis)
            ax["lags"].set_xlabel("lag (positions after the last verified one)")
        if published and row == 0:
            theirs = papers.on_prefix_channels(ax["published"])
        elif published:
            ax["published"].set_axis_off()
    handles = axes[0, 0].get_legend_handles_labels()[0]
    if controls:
        handles = handles + [h for h in axes[0, 2].get_legend_handles_labels()[0] if h.get_label() != style.CONTROLS["none"].label]
    return style.finish(
        fig,
        f"{model}: what a shallow draft gains from full-depth prefixes",
        style.caption(
            frame,
            start,
            "bars",
            f"Zero: the aligned draft; lag {nearest} unless the panel says otherwise; controls keep deep V's shape but not its content"
            + f". {papers.CAPTION}" * bool(theirs),
        ),
        _alt(model, agreement, nearest, shallowest),
        handles + theirs,
    )


def panel(ax, table, x, by, looks):
    """Effects with intervals at evenly spaced places of `x`, one colour and marker per `by`, side by side (never on top of each other)."""
    places = {value: i for i, value in enumerate(sorted(table[x].unique()))}
    names = style.order(table[by], looks)
    for i, name in enumerate(names):
        look, part = style.look(looks, name), table[table[by] == name].sort_values(x)
        at = [places[v] + (i - (len(names) - 1) / 2) * 0.6 / max(len(names), 2) for v in part[x]]
        ax.plot(
            at, part["mean"], color=look.colour, marker=look.marker, linestyle=look.line, linewidth=1.0, markersize=5.5, label=look.label
        )
        marks.bars(ax, at, part, look.colour)
    ax.axhline(0, color=style.INK, linewidth=0.9, zorder=1)
    ax.set_xticks(list(places.values()), [str(v) for v in places])
    ax.set_xlim(-0.6, max(len(places), 1) - 0.4)
    ax.grid(axis="x", visible=False)


def _alt(model, table, lag, depth):
    part = table[(table["lag"] == lag) & (table["depth"] == depth) & (table["control"] == "none")]
    said = "; ".join(
        f"{r.task} {style.look(style.POLICIES, r.policy).label} {r.mean:+.3f}"
        + f" [{style.number(r.low, 3, True)}, {style.number(r.high, 3, True)}]" * (r.low == r.low)
        for r in part.itertuples()
    )
    return (
        f"Paired change in agreement with full depth when a draft on {model} reads the prefix at full depth. "
        f"At draft depth {depth}, lag {lag}: {said}."
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("prefix_channels"))
