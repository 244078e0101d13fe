"""Acceptance by position: how often the i-th draft of a run is accepted, and how many runs got that far."""

from __future__ import annotations

from dataclasses import replace

from figures import intervals, marks, style

ENOUGH = 5  # runs: a rate of fewer is noise
_SINGLE = 8  # places that are drawn one by one; more are taken together by powers of two, for lines that can be followed
COLUMNS = ("model", "task", "prompt", "decoder", "position", "reached", "accepted")


def draw(frame, *, model=None):
    """A column per task: acceptance rate by place in the run above, runs that reached the place below.

    Beyond 8 places, places are taken together: 1, 2, 3-4, 5-8, 9-16, ...
    """
    style.check(frame, COLUMNS, "acceptance")
    return rates_and_counts(
        together(frame),
        model,
        "acceptance",
        "place of the draft in its run (1 = first)",
        ("accepted / reached", "runs"),
        ("acceptance by position", "Lines of acceptance rate by place in the run", "At the first place"),
        "A run ends at the first rejected draft; rates are pooled over prompts and over places that stand together, and "
        "drawn where {enough} drafts or more were judged (of a decoder with fewer everywhere, all). Below: runs that reached the first of "
        "such places",
    )


def rates_and_counts(frame, model, kind, across, upwards, words, note):
    """The figure: rates above, counts below, over the column `position`. words: title, what is drawn, and what is said of the first."""
    frame, model = style.choose(frame, "model", model, kind)
    tasks, decoders = style.order(frame["task"], style.TASKS), style.decoders_in_order(frame["decoder"])
    fig = style.figure(max(6.5, 4.6 * len(tasks)), 5.2 + 0.21 * -(-len(decoders) // 3))
    axes = fig.subplots(2, len(tasks), squeeze=False, sharex=True, sharey="row", height_ratios=[1.9, 1])
    said, lowest, furthest = [], 1.0, 0
    for column, task in enumerate(tasks):
        part = frame[frame["task"] == task]
        upper, lower = axes[:, column]
        rates = panel(upper, part, decoders)
        lowest, furthest = min(lowest, rates[["mean", "low"]].min().min()), max(furthest, int(rates["position"].max()))
        upper.set_title(task or "prompts")
        for decoder, look in looks(decoders).items():
            reached = part[part["decoder"] == decoder].groupby("position")["runs" if "runs" in part else "reached"].sum()
            reached = reached[reached > 0]
            table = reached.rename("mean").reset_index()
            marks.line(lower, table, "position", look, band=False, linewidth=1.3)
        style.log_axis(lower)
        lower.set_xlabel(across)
        first = rates.sort_values("position").groupby("decoder", sort=False).head(1)
        said += [f"{task} {r.decoder} {r.mean:.2f}" for r in first[["decoder", "mean"]].itertuples()]
    places = [p for p in sorted(frame["position"].unique()) if p <= furthest]  # beyond, counts alone would take half of the axis
    for lower in axes[1]:
        _places(lower, places, frame)
        lower.set_xlim(places[0] - 0.04 * len(places) - 0.1, furthest + 0.04 * len(places) + 0.1)
    rate_axis(axes[0, 0], lowest - 0.04)
    axes[0, 0].set_ylabel(upwards[0])
    axes[1, 0].set_ylabel(upwards[1])
    return style.finish(
        fig,
        f"{model}: {words[0]}",
        style.caption(frame, extra=note.format(enough=ENOUGH)),
        f"{words[1]} on {model}. {words[2]}: {'; '.join(said)}.",
        [*style.handles_of(axes[0, 0]), *style.not_lossless_handles(decoders)],
        3,
    )


def panel(ax, part, decoders, band=True):
    """Rate lines of one task; returns the rates with intervals."""
    rates = intervals.ratio_table(part[part["reached"] > 0], ("decoder", "position"), "accepted", "reached")
    enough = rates["total"] >= ENOUGH
    alone = ~rates["decoder"].isin(rates.loc[enough, "decoder"])  # a decoder with few runs everywhere is still drawn
    rates = rates[enough | alone]
    for decoder, look in looks(decoders).items():
        marks.line(ax, rates[rates["decoder"] == decoder], "position", look, decoder, band=band)
    _places(ax, sorted(rates["position"].unique()), part)
    return rates


def together(frame):
    """The table with places taken together where there are many: position counts the groups from 1, words names them ('3-4').

    reached and accepted are sums over a group's places, runs is how many reached its first. A table of few places stays as it is.
    """
    if frame["position"].max() <= _SINGLE:
        return frame
    group = (frame["position"] - 1).map(lambda place: int(place).bit_length())  # 1 | 2 | 3-4 | 5-8 | ...: last places are powers of two
    first = group.map(lambda n: 1 + (1 << n) // 2)
    runs = frame["reached"].where(frame["position"] == first, 0)
    keys = ["model", "task", "prompt", "decoder", "position"]
    summed = frame.assign(runs=runs, position=group + 1).groupby(keys, observed=True, as_index=False)[["reached", "accepted", "runs"]].sum()
    names = {n: str(1 << (n - 1)) if n < 3 else f"{1 + (1 << (n - 2))}-{1 << (n - 1)}" for n in summed["position"].unique()}
    return summed.assign(words=summed["position"].map(names))


def rate_axis(ax, low):
    """From `low` up to 1, with room for marks at 1 and no tick beyond it."""
    ax.set_ylim(max(0.0, low), 1.02)
    ax.set_yticks([tick for tick in ax.get_yticks() if max(0.0, low) <= tick <= 1.0001])


def _places(ax, places, frame):
    """Ticks at the places, by their names where they have some, thinned."""
    if "words" in frame:
        names = dict(zip(frame["position"], frame["words"]))
        ax.set_xticks(places, [names[p] for p in places])
    else:
        ax.set_xticks(places[:: max(1, len(places) // 8)])


def looks(decoders):
    """Looks by decoder; within one family the second and third members get a hollow marker's line style of their own."""
    seen, out = {}, {}
    for decoder in decoders:
        look, n = style.decoder_look(decoder), seen.setdefault(style.family(decoder), 0)
        seen[style.family(decoder)] += 1
        out[decoder] = (
            look
            if n == 0
            else replace(
                look,
                marker="sdphv8"[(n - 1) % 6] if look.marker != "s" else "Xdphv8"[(n - 1) % 6],
                line=[(0, (1.5, 1)), (0, (5, 1, 1, 1)), (0, (8, 2))][(n - 1) % 3],
            )
        )
    return out


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("acceptance"))
