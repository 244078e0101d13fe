"""Prefix effects: the verdict table as a forest plot, one line per policy or control."""

from __future__ import annotations

from figures import intervals, marks, style
from interventions.effects import NOISE

METRICS = {"agreement": ("change in top-1 agreement (points)", "higher is better"),
           "kl_nats": ("change in KL to depth T (nats)", "lower is better")}


def draw(frame, *, model=None, start=None, lag=None, depth=None):
    """Paired effects with intervals at one draft depth (default: the shallowest) and lag (default: the nearest); filled where they hold."""
    style.check(
        frame, ("model", "task", "start", "depth", "lag", "policy", "control", "metric", "effect", "low", "high", "holds"), "prefix_effects"
    )
    frame, model = style.choose(frame, "model", model, "prefix_effects")
    frame, start = style.choose(frame, "start", start, "prefix_effects", style.OWN_START)
    frame, lag = style.choose(frame, "lag", frame["lag"].min() if lag is None else lag, "prefix_effects")
    frame, depth = style.choose(frame, "depth", frame["depth"].min() if depth is None else depth, "prefix_effects")
    tasks, metrics = style.order(frame["task"], style.TASKS), [m for m in METRICS if m in set(frame["metric"])]
    rows = [
        (p, c)
        for p in style.order(frame["policy"], style.POLICIES)
        for c in style.order(frame["control"], style.CONTROLS)
        if ((frame["policy"] == p) & (frame["control"] == c)).any() and (p, c) != ("aligned", "none")
    ]
    # Controls do tens of times more harm than the real thing does good: each kind gets a scale of its own.
    blocks = [block for block in ([r for r in rows if r[1] == "none"], [r for r in rows if r[1] != "none"]) if block]
    tall = [0.85 + 0.3 * len(block) for _ in tasks for block in blocks]
    fig = style.figure(2.8 + 3.9 * len(metrics), 1.1 + sum(tall))
    axes = fig.subplots(len(tall), len(metrics), squeeze=False, sharey="row", height_ratios=tall)
    for i, (task, block) in enumerate((t, b) for t in tasks for b in blocks):
        for ax, metric in zip(axes[i], metrics):
            forest(ax, frame[(frame["task"] == task) & (frame["metric"] == metric)], block)
            label, better = METRICS[metric]
            ax.set_title(f"{task or 'prompts'}" + (", controls" if block[0][1] != "none" else "") + f": {better}", fontsize=style.LABEL)
            ax.set_xlabel(label)
            if metric == "agreement":
                style.points(ax.xaxis, label)
    n = int(frame["n_prompts"].max()) if "n_prompts" in frame else None
    return style.finish(
        fig,
        f"{model}: effects against the aligned draft (depth {depth}, lag {lag})",
        (f"{style.count(n, 'prompt')} a task; " if n else "") + "bars: 95 % bootstrap interval over prompts, paired; start state: "
        f"{style.look(style.STARTS, start).label.removesuffix(' start')}. Filled: the interval excludes 0 in the good direction.",
        _alt(model, frame),
    )


def forest(ax, part, rows):
    """One horizontal interval per (policy, control) row of `part`, which holds one task and one metric."""
    part = part[[pair in set(rows) for pair in zip(part["policy"], part["control"])]]
    for y, (policy, control) in enumerate(rows):
        for r in part[(part["policy"] == policy) & (part["control"] == control)].itertuples():
            look = style.look(style.POLICIES, policy) if control == "none" else style.look(style.CONTROLS, control)
            n = getattr(r, "n_prompts", intervals.FEW)
            marks.whisker(ax, y, {"low": r.low, "high": r.high, "n": n}, look.colour)
            sure = r.holds and n >= intervals.FEW
            marker = {"x": "X", "*": "*"}.get(look.marker, look.marker)
            ax.plot(r.effect, y, marker=marker, markersize=7.5, color=look.colour, markerfacecolor=look.colour if sure else "white")
    ax.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    ax.set_yticks(range(len(rows)), [name(p, c) for p, c in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    if not part.empty and part[["effect", "low", "high"]].abs().max().max() < NOISE:
        ax.set_xlim(-0.01, 0.01)  # no effect at all: rounding errors must not look like one
    ax.locator_params(axis="x", nbins=5)


def name(policy, control):
    """'deep V (Mature-V)' or 'control: noise of V's norm'."""
    return style.look(style.POLICIES, policy).label if control == "none" else f"control: {style.look(style.CONTROLS, control).label}"


def _alt(model, frame):
    real = frame[(frame["control"] == "none") & (frame["metric"] == "agreement")]
    said = "; ".join(
        f"{r.task} {style.look(style.POLICIES, r.policy).label} {r.effect:+.3f} "
        f"{intervals.words(r.low, r.high, getattr(r, 'n_prompts', intervals.FEW), '{:+.3f}')}".rstrip()
        for r in real.itertuples()
    )
    return f"Forest plot of paired effects on {model}. Change in agreement: {said}."


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("prefix_effects"))
