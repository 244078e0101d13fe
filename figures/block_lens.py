"""Block lens: rank and probability of the final token after every block of the unrolled core."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "lens", "depth", "cycle", "layer", "block", "rank", "probability")
LENSES = {
    "coda": style.Look("through the model's own coda, norm and head", "#332288", "o", "-"),
    "logit": style.Look("through norm and head alone", "#D55E00", "D", (0, (4, 1.5))),
}
_MEASURES = (("rank", "rank of the final token", "Rank"), ("probability", "probability of the final token", "Probability"))


def draw(frame, *, model=None, start=None):
    """Per task: rank (logarithmic, 1 is the top) and probability of the full-depth top token, a line for each lens."""
    frame, model, start = style.rows(frame, COLUMNS, "block_lens", model, start)
    tasks, depths = style.order(frame["task"], style.TASKS), sorted(frame["depth"].unique())
    each = int(frame.groupby("depth")["block"].nunique().max())  # blocks of one recurrence
    frame = frame.assign(at=frame["block"] / each)
    fig = style.figure(10.0, 1.3 + 2.9 * len(tasks))
    axes = fig.subplots(len(tasks), 2, squeeze=False)
    said = []
    for row, task in zip(axes, tasks):
        part = frame[frame["task"] == task]
        for ax, (measure, label, title) in zip(row, _MEASURES):
            means = intervals.table(part, ["lens", "at"], measure)
            for lens in style.order(means["lens"], LENSES):
                look = style.look(LENSES, lens)
                own = means[means["lens"] == lens].sort_values("at")
                ends = [i for i, x in enumerate(own["at"]) if float(x).is_integer()]
                marks.line(ax, own, "at", look, look.label, markevery=ends[:: max(1, len(ends) // 20)] or None)
            ax.set_ylabel(label)
            ax.set_title(f"{task or 'prompts'}: {title.lower()}")
            ax.set_xticks(depths[:: max(1, len(depths) // 8)])
            ax.set_xlabel("recurrences applied (one point for each block)")
        style.log_axis(row[0])
        row[0].set_ylim(bottom=0.9)
        row[1].set_ylim(0, 1)
        for lens in style.order(part["lens"], LENSES):
            own = part[part["lens"] == lens]
            first = own[own["block"] == own["block"].min()]
            last = own[own["block"] == own["block"].max()]
            said.append(f"{task or 'prompts'}, {lens} lens: rank {style.number(first['rank'].mean(), 1)} after the first block, "
                        f"{style.number(last['rank'].mean(), 1)} after the last, probability {style.number(last['probability'].mean(), 2)}")
    return style.finish(
        fig,
        f"{model}: the final token, block by block",
        style.caption(frame, start, extra=f"{each} block{'s' * (each != 1)} a recurrence; marks stand on its last one. Final token: on "
                                          "top at full depth. Rank: geometric mean over positions"),
        f"Rank and probability of the final token of {model} over the unrolled core. {'; '.join(said)}.",
        style.handles_of(axes[0, 0]),
        2,
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("block_lens"))
