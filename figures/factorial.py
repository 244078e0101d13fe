"""The factorial of DAS-Wave: tokens committed and speed in its cells, and what each switch and their interplay bring."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "repeat", "carry", "deep_k", "deep_v", "tokens", "verifications", "accepted", "committed",
           "recur_calls", "decode_seconds", "ar_recur_calls", "ar_decode_seconds")
PANELS = {"committed_per_verification": ("G: tokens committed per verification", "tokens"),
          "call_speedup": ("Calls", "times fewer recurrence calls than AR"),
          "time_speedup": ("Wall clock", "times faster than AR (decode seconds)")}
EFFECT = "committed_per_verification"
_WORDS = {"carry": "carry", "deep_k": "deep K", "deep_v": "deep V"}


def draw(frame, *, model=None, task=None):
    """Bars per cell, carry off beside carry on, in the reads' colours; below them the effects on G with paired intervals.

    frame: the factorial table; task: which one to draw (default: the first).
    """
    from decoders.factorial import cells, effects

    style.check(frame, COLUMNS, "factorial")
    frame, model = style.choose(frame, "model", model, "factorial")
    frame, task = style.choose(frame, "task", task, "factorial", style.order(frame["task"], style.TASKS))
    table, terms = cells(frame).assign(n=frame["prompt"].nunique()), effects(frame)
    fig = style.figure(12, 7.6 if len(table) == 8 else 6.4)
    upper, lower = fig.subfigures(2, 1, height_ratios=[1.15, 1])
    for ax, (measure, (title, label)) in zip(upper.subplots(1, 3), PANELS.items()):
        _bars(ax, table, measure)
        ax.set_title(title)
        ax.set_ylabel(label)
    ax, other = lower.subplots(1, 2, sharey=True)
    _effects(ax, terms[terms["measure"] == EFFECT])
    ax.set_title("Effects on G")
    ax.set_xlabel("change in tokens committed per verification")
    _effects(other, terms[terms["measure"] == "time_speedup"])
    other.set_title("Effects on speed")
    other.set_xlabel("change in times faster than AR")
    alone = "" if table["carry"].any() else " Nothing can be carried: this model does not inject its embedding into the loop."
    return style.finish(
        fig,
        f"{model}: what carry, deep K and deep V bring to DAS-Wave{f' on {task}' if task else ''}",
        style.caption(frame, None, "whiskers", "An effect is the difference that a switch makes, or that it makes to another's, averaged "
                      f"over the switches not named.{alone}"),
        _alt(model, table, terms),
        _handles(table),
        4,
    )


def _bars(ax, table, measure):
    groups = sorted(set(table["carry"]))
    for i, carry in enumerate(groups):
        part = table[table["carry"] == carry].reset_index(drop=True)
        for j, r in part.iterrows():
            look = style.look(style.POLICIES, r["read"])
            x = i + 0.2 * (j - (len(part) - 1) / 2)
            ax.bar(x, r[measure], width=0.18, color=look.colour, alpha=0.8, hatch=_HATCHES[r["read"]], edgecolor="white", linewidth=0)
            marks.whisker(ax, x, {"low": r[f"{measure}_low"], "high": r[f"{measure}_high"], "n": r["n"]}, style.INK, False, 1.4)
            top = max(v for v in (r[measure], r[f"{measure}_high"]) if v == v)
            ax.annotate(f"{r[measure]:.1f}", (x, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=style.TICK - 1)
    ax.set_xticks(range(len(groups)), ["carry on" if c else "carry off" for c in groups])
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.margins(y=0.12)
    ax.grid(axis="x", visible=False)


def _effects(ax, terms):
    """Point and interval per term, main effects on top; filled where the interval excludes 0, over enough prompts."""
    for y, r in enumerate(terms.itertuples()):
        clear = (r.low > 0 or r.high < 0) and r.n_prompts >= intervals.FEW
        marks.whisker(ax, y, {"low": r.low, "high": r.high, "n": r.n_prompts}, style.INK)
        ax.plot(r.effect, y, marker="os^"[r.order - 1], color=style.INK, markerfacecolor=style.INK if clear else "white", markersize=7)
        end = r.high if r.high == r.high else r.effect  # beside the interval: rows are too near for a number between them
        ax.annotate(f"{r.effect:+.2f}", (end, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=style.TICK - 1)
    ax.axvline(0, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.set_yticks(range(len(terms)), [_named(t) for t in terms["term"]])
    ax.set_ylim(len(terms) - 0.4, -0.8)
    ax.margins(x=0.2)


def _named(term):
    return " x ".join(_WORDS[switch] for switch in term.split(" x "))


def _handles(table):
    from matplotlib.patches import Patch

    reads = [read for read in style.POLICIES if read in set(table["read"])]
    return [Patch(facecolor=style.POLICIES[r].colour, alpha=0.8, hatch=_HATCHES[r], edgecolor="white", label=style.POLICIES[r].label)
            for r in reads]


_HATCHES = {"aligned": "", "deep_v": "///", "deep_k": "...", "deep_kv": "xx"}


def _alt(model, table, terms):
    said = "; ".join(f"{'carry' if r.carry else 'no carry'} {r.read} {style.number(r.committed_per_verification)} tokens, "
                     f"{style.number(r.time_speedup)}x" for r in table.itertuples())
    found = "; ".join(f"{_named(r.term)} {style.number(r.effect, sign=True)}" for r in terms[terms["measure"] == EFFECT].itertuples())
    return f"Bars per cell of the factorial on {model}, tokens committed per verification and speed over AR: {said}. Effects: {found}."


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("factorial"))
