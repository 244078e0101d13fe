"""Speedup bars: seconds and block calls of AR over those of each decoder, paired per prompt."""

from __future__ import annotations

from figures import intervals, marks, published as papers, ratios, style

MEASURES = {
    "time_speedup": ("Wall clock", "times faster than AR (decode seconds)"),
    "call_speedup": ("Block calls", "times fewer recurrence calls than AR"),
}


def draw(frame, *, model=None, published=False):
    """A row per task: wall clock and block calls; bar = mean of per-prompt ratios, whisker = interval, dot = one prompt.

    published: also the papers' wall-clock speedups, each on the row of our fastest decoder of its kind.
    """
    style.check(frame, ratios.COLUMNS, "bench")
    frame, model = style.choose(frame, "model", model, "bench")
    frame = style.labelled(frame)
    pairs = ratios.per_prompt(frame)
    tasks = style.order(pairs["task"], style.TASKS)
    count = pairs["decoder"].nunique()
    fig = style.figure(11, 1.2 + len(tasks) * (0.8 + 0.36 * count))
    axes = fig.subplots(len(tasks), 2, squeeze=False, sharey="row")
    theirs = {}
    for row, task in enumerate(tasks):
        part = pairs[pairs["task"] == task]
        ranked = part.groupby("decoder")["time_speedup"].mean().sort_values(ascending=False).index.tolist()
        for ax, measure in zip(axes[row], MEASURES):
            panel(ax, part, ranked, measure)
            ax.set_title(f"{task or 'prompts'}: {MEASURES[measure][0].lower()}")
            ax.set_xlabel(MEASURES[measure][1])
        if published:
            theirs |= {h.get_label(): h for h in papers.on_speedup(axes[row, 0], ranked, task)}
    equal = ratios.equality(frame)
    words = same_tokens(equal)
    return style.finish(
        fig,
        f"{model}: how much faster than plain decoding",
        style.caption(
            pairs,
            None,
            "whiskers",
            f"Bars: mean of per-prompt ratios, {repeats_of(frame)}, prefill left "
            f"out; dots: prompts. {words}"
            + f" {papers.CAPTION}, prefill counted ({papers.NEAREST})." * bool(theirs),
        ),
        _alt(model, pairs, words),
        [*style.not_lossless_handles(pairs["decoder"].unique()), *theirs.values()],
        3 if theirs else 2,
    )


def repeats_of(frame):
    """How the repeats of a decode were put together, in words."""
    from decoders.repeats import has_beat

    repeats = int(frame["repeat"].nunique())
    if repeats == 1:
        return "one decode each"
    return f"the median of {repeats} repeats at one pace" if has_beat(frame) else f"the fastest of {repeats} repeats"


def panel(ax, part, ranked, measure="time_speedup", dots=True, room=1.42):
    """Horizontal bars for the decoders in `ranked` (top first) of one task's ratios; the axis reaches `room` times the widest."""
    means = intervals.table(part, ["decoder"], measure).set_index("decoder")
    widest = part[measure].max()
    for y, decoder in enumerate(ranked):
        look, r = style.decoder_look(decoder), means.loc[decoder]
        values = part.loc[part["decoder"] == decoder, measure].to_numpy()
        fill = {"color": look.colour, "alpha": 0.75, "edgecolor": "white", "linewidth": 0,
                "hatch": {"DtV": "///", "WFD": "", "DAS-Wave": "xx"}.get(style.family(decoder), "")}
        if look.hollow:
            fill = {"facecolor": "white", "edgecolor": look.colour, "linewidth": 1.4, "hatch": style.HATCHES[style.fidelity_of(decoder)]}
        ax.barh(y, r["mean"], height=0.62, **fill)
        if dots and decoder != "AR":
            # a fixed fan instead of random jitter: the same table must draw the same picture
            spread = [0.22 * ((i * 0.618) % 1 - 0.5) * 2 for i in range(len(values))]
            ax.plot(values, [y + s for s in spread], "o", color=style.INK, markersize=2.6, alpha=0.55, markeredgewidth=0)
        marks.whisker(ax, y, r, style.INK, width=1.8)
        reach = max(values.max() if dots else 0, r["mean"], r["high"] if r["high"] == r["high"] else 0)
        interval = "" if decoder == "AR" else intervals.words(r["low"], r["high"], r["n"])
        clear = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}  # of AR's line, beside bars that do not reach it
        ax.annotate(f"{r['mean']:.2f}x {interval}".rstrip(), (reach, y), xytext=(7, 0), textcoords="offset points", va="center",
                    fontsize=style.TICK, color=style.INK, zorder=5, bbox=clear)
    ax.axvline(1, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=3)
    ax.set_ylim(len(ranked) - 0.4, -0.6)
    ax.set_yticks(range(len(ranked)), ranked)
    ax.set_xlim(0, widest * room)
    ax.grid(axis="y", visible=False)


def same_tokens(equal):
    """'Token for token equal to AR: 4 of 4 lossless decoders (120 generations, 7680 tokens).'"""
    exact = equal[equal["lossless"]]
    if exact.empty:
        return "No lossless decoder was compared with AR."
    good = int((exact["mismatches"] == 0).sum())
    return (
        f"Token for token equal to AR: {good} of {style.count(len(exact), 'lossless decoder')} "
        f"({style.count(exact['generations'].sum(), 'generation')}, {style.count(exact['tokens'].sum(), 'token')})"
        + ("." if good == len(exact) else f"; {int(exact['mismatches'].sum())} tokens differ.")
    )


def _alt(model, pairs, words):
    means = pairs[pairs["decoder"] != "AR"].groupby(["task", "decoder"], observed=True)[["time_speedup", "call_speedup"]].mean()
    said = "; ".join(
        f"{task} {decoder} {r.time_speedup:.2f}x in time, {r.call_speedup:.2f}x in calls" for (task, decoder), r in means.iterrows()
    )
    return f"Bars of speedup over autoregressive decoding on {model}: {said}. {words}"


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("bench"))
