"""Predicted beside measured: what the plan expected of each decoder from the findings, and what the benchmark saw."""

from __future__ import annotations

from figures import intervals, marks, ratios, style

COLUMNS = ("model", "task", "decoder", "basis", "call_speedup", "time_speedup", "low", "high")


_LONG = 12  # decoders in a list that leaves room for two panels beside it
EXACT, ESTIMATED = "=", "\u2248"  # beside a decoder's name: how its calls were predicted


def both(plan):
    """One row per task and decoder: predicted and measured speedups side by side (NaN where the benchmark did not run it).

    exact: its calls were predicted exactly, by a replay of the very prompts; older tables say so of none. n: prompts behind the
    measured interval, NaN where the table does not say.
    """
    cells = (
        plan.groupby(["task", "decoder", "basis"], observed=True)[["call_speedup", "time_speedup", "low", "high"]].mean().unstack("basis")
    )
    cells.columns = [f"{name}_{basis}" for name, basis in cells.columns]
    for name in ("call_speedup", "time_speedup", "low", "high"):
        for basis in ("predicted", "measured"):
            if f"{name}_{basis}" not in cells:
                cells[f"{name}_{basis}"] = float("nan")
    measured = plan[plan["basis"] == "measured"]
    counted = measured.groupby(["task", "decoder"], observed=True)["n_prompts"].max() if "n_prompts" in measured else None
    cells = cells.assign(n=float("nan") if counted is None else counted.reindex(cells.index)).reset_index()
    told = plan[plan["exact_calls"].eq(True)] if "exact_calls" in plan else plan[:0]
    exact = set(zip(told["task"].astype(str), told["decoder"].astype(str)))
    return cells.assign(exact=[(str(t), str(d)) in exact for t, d in zip(cells["task"], cells["decoder"])])


def sign(row) -> str:
    """EXACT or ESTIMATED of a row of `both`; nothing where nothing was predicted, and of AR, whose T calls per token are no prediction."""
    return "" if row.time_speedup_predicted != row.time_speedup_predicted or row.decoder == "AR" else EXACT if row.exact else ESTIMATED


def remeasured(plan, bench):
    """The plan with its measured rows by the definition of its predictions: all of AR's seconds over all of the decoder's, and calls alike.

    The other tables of the page average per-prompt ratios, in which a prompt that drafts well counts for more; beside a prediction
    that would be a miss by definition. Column n_prompts says how many prompts the interval is over. Rows that `bench` cannot speak for
    stay as they are.
    """
    if not ratios.has_pairs(bench):
        return plan
    keys, by = ["model", "task", "prompt", "decoder"], ["model", "task", "decoder"]
    later = (bench["tokens"] - 1).groupby([bench[k] for k in keys], observed=True).min().rename("later").reset_index()
    pairs = ratios.per_prompt(bench).merge(later, on=keys)
    for cost in ("seconds_per_token", "calls_per_token"):
        pairs[f"own_{cost}"], pairs[f"ar_{cost}"] = pairs[cost] * pairs["later"], pairs[f"{cost}_ar"] * pairs["later"]
    time, calls = (intervals.ratio_table(pairs, by, f"ar_{cost}", f"own_{cost}").set_index(by)
                   for cost in ("seconds_per_token", "calls_per_token"))
    out = plan.assign(n_prompts=float("nan"))
    for i, r in plan[plan["basis"] == "measured"].iterrows():
        cell = (r["model"], r["task"], r["decoder"])
        if cell in time.index:
            found = [calls.loc[cell, "mean"], *time.loc[cell, ["mean", "low", "high", "n"]]]
            out.loc[i, ["call_speedup", "time_speedup", "low", "high", "n_prompts"]] = [float(v) for v in found]
    return out


def draw(frame, *, model=None):
    """A row per task: ranked dumbbells (hollow predicted, filled measured) in time, and both speedups against the diagonal."""
    style.check(frame, COLUMNS, "plan")
    frame, model = style.choose(frame, "model", model, "plan")
    table = both(frame)
    tasks = style.order(table["task"], style.TASKS)
    most = max(table[table["task"] == t].shape[0] for t in tasks)
    fig, axes = _panels(len(tasks), most)
    for row, task in enumerate(tasks):
        part = ranked(table[table["task"] == task])
        listed, *plots = axes[row]
        dumbbells(listed, part)
        listed.set_title(f"{task or 'prompts'}: the plan's ranking")
        listed.set_xlabel("times faster than AR (wall clock)")
        for ax, measure, words in zip(plots, ("time_speedup", "call_speedup"), ("wall clock", "block calls")):
            _scatter(ax, part, measure)
            ax.set_title(f"{task or 'prompts'}: {words}")
    return style.finish(
        fig,
        f"{model}: predicted beside measured",
        "Predicted from findings and a timing sweep, before the benchmark ran. "
        f"{EXACT}: its block calls were predicted exactly, by replay (ringed on the right); {ESTIMATED}: estimated. "
        f"Speeds: all of AR's seconds over all of the decoder's{_over(table)}. Bars: 95 % bootstrap interval over prompts, of predictions "
        "over the rounds of the sweep too. "
        "Numbers in the right-hand panels are those of the left-hand list.",
        _alt(model, table),
        _handles(table["decoder"]),
        3,
    )


def _over(table):
    """', over 10 prompts' where the table says how many were timed."""
    most = table["n"].max()
    return f", over {style.count(most, 'prompt')}{' a task' * (table['task'].nunique() > 1)}" if most == most else ""


def _panels(tasks, most):
    """(figure, [list, wall clock, block calls] of each task): side by side, and the last two below each other beside a long list."""
    if most < _LONG:
        fig = style.figure(12.5, 1.5 + tasks * max(2.6, 0.75 + 0.34 * most))
        return fig, fig.subplots(tasks, 3, squeeze=False, width_ratios=[1.5, 1, 1])
    fig = style.figure(11, 1.5 + tasks * (0.75 + 0.34 * most))
    grid = fig.add_gridspec(2 * tasks, 2, width_ratios=[1.55, 1])
    where = [(grid[2 * t : 2 * t + 2, 0], grid[2 * t, 1], grid[2 * t + 1, 1]) for t in range(tasks)]
    return fig, [[fig.add_subplot(cell) for cell in cells] for cells in where]


def ranked(part):
    """Fastest prediction first."""
    return part.sort_values("time_speedup_predicted", ascending=False, kind="stable").reset_index(drop=True)


def dumbbells(ax, part):
    """One line per decoder of a ranked table: hollow predicted, filled measured with its interval."""
    for y, r in enumerate(part.itertuples()):
        look = style.decoder_look(r.decoder)
        ax.plot([r.time_speedup_predicted, r.time_speedup_measured], [y, y], color=look.colour, linewidth=1, alpha=0.5)
        ax.hlines(y, r.low_predicted, r.high_predicted, color=look.colour, linewidth=1.2, alpha=0.8)
        marks.whisker(ax, y, _measured(r), look.colour, width=3)
        ax.plot(r.time_speedup_predicted, y, marker=look.marker, color=look.colour, markerfacecolor="white", markersize=8, linestyle="none")
        ax.plot(r.time_speedup_measured, y, marker=look.marker, markersize=8, linestyle="none", **_fill(look))
    ax.axvline(1, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.set_yticks(range(len(part)), [f"{i}. {r.decoder} {sign(r)}".rstrip() for i, r in enumerate(part.itertuples(), 1)])
    ax.set_ylim(len(part) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.margins(x=0.08)


def _scatter(ax, part, measure):
    here = part.dropna(subset=[f"{measure}_measured", f"{measure}_predicted"])
    values = [
        *here[f"{measure}_predicted"],
        *here[f"{measure}_measured"],
        *(here["high_measured"].dropna() if measure == "time_speedup" else []),
    ]
    top = 1.12 * max(values, default=1.0)
    ax.plot([0, top], [0, top], color=style.QUIET, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
    for r in here.itertuples():
        look = style.decoder_look(r.decoder)
        x, y = getattr(r, f"{measure}_predicted"), getattr(r, f"{measure}_measured")
        if measure == "time_speedup":
            marks.whisker(ax, x, _measured(r), look.colour, horizontal=False)
        ax.plot(x, y, marker=look.marker, markersize=6, linestyle="none", **_fill(look))
        if r.exact and measure == "call_speedup":
            ring = {"markerfacecolor": "none", "markeredgecolor": style.INK, "markeredgewidth": 0.8}
            ax.plot(x, y, marker="o", markersize=12, linestyle="none", **ring)
    _number(ax, here, measure, top)
    ax.set_xlim(0, top)
    ax.set_ylim(0, top)
    ax.set_aspect("equal")
    ax.locator_params(nbins=6)
    ax.set_xlabel("predicted (x)")
    ax.set_ylabel("measured (x)")


def _measured(r):
    return {"low": r.low_measured, "high": r.high_measured, "n": r.n if r.n == r.n else marks.FEW}


def _number(ax, here, measure, top):
    """The list's numbers beside their marks, each on the side where least stands already."""
    size = 150.0  # points, about, along an axis of such a panel
    places = [(getattr(r, f"{measure}_predicted") * size / top, getattr(r, f"{measure}_measured") * size / top) for r in here.itertuples()]
    taken = list(places)
    for (x, y), r in zip(places, here.itertuples()):
        tries = [(x + dx, y + dy) for dx, dy in ((10, -6), (10, 6), (-10, 6), (-10, -6), (0, -12), (0, 12), (18, 0), (-18, 0))]
        best = max(tries, key=lambda at: min(min((_apart(at, other) for other in taken if other != (x, y)), default=99.0), 11.0))
        taken.append(best)
        ax.annotate(str(r.Index + 1), (x * top / size, y * top / size), xytext=(best[0] - x, best[1] - y), textcoords="offset points",
                    ha="center", va="center", fontsize=style.TICK - 0.5, color=style.INK)


def _apart(one, other):
    return ((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2) ** 0.5


def _fill(look):
    """Measured marks are filled, here hollow means predicted: one that is not lossless is filled by half."""
    return {"color": look.colour, **({"fillstyle": "left", "markerfacecoloralt": "white"} if look.hollow else {})}


def _handles(decoders):
    from matplotlib.lines import Line2D

    half = {"marker": "o", "color": style.INK, "linestyle": "none", "markersize": 7, "fillstyle": "left", "markerfacecoloralt": "white"}
    found = {style.fidelity_of(d) for d in decoders} - {style.LOSSLESS}
    return [Line2D([], [], **half, label=f"measured, {' or '.join(f for f in style.NOT_LOSSLESS if f in found)}")] * bool(found) + [
        Line2D([], [], marker="o", color=style.INK, markerfacecolor="white", linestyle="none", markersize=7, label="predicted"),
        Line2D([], [], marker="o", color=style.INK, linestyle="none", markersize=7, label="measured"),
        Line2D([], [], color=style.QUIET, linestyle=(0, (4, 2)), label="predicted = measured"),
    ]


def _alt(model, table):
    said = "; ".join(
        f"{r.task} {r.decoder} {_times(r.time_speedup_predicted, 'predicted')}{' (calls exact)' if r.exact else ''}, "
        f"{_times(r.time_speedup_measured, 'measured')}"
        for r in table.itertuples()
    )
    return f"Predicted and measured wall-clock speedup over AR on {model}: {said}."


def _times(value, basis):
    return f"{basis} {style.number(value)}x" if value == value else f"not {basis}"


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("plan"))
