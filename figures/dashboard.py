"""The dashboard: what was probed, what follows from it, and what it brought, for one model on one page."""

from __future__ import annotations

from collections.abc import Mapping

from figures import acceptance, advice, convergence, depth_lens, intervals, predicted, prefix_channels, ratios, speedup, style
from figures import published as papers
from interventions.effects import NOISE
from loopscope.errors import SettingError

_MOST = 8  # decoders in a panel

TABLES = {  # what the page is made of, and the columns it needs
    "convergence": convergence.COLUMNS,
    "depth_lens": depth_lens.COLUMNS,
    "prefix_channels": prefix_channels.COLUMNS,
    "acceptance": acceptance.COLUMNS,
    "bench": ratios.COLUMNS,
    "plan": predicted.COLUMNS,
}


def draw(frame: Mapping, *, model=None, task=None, start=None, published=False):
    """frame: {table name: table}. Six panels for one model and one task (default: the first, whichever decodes fastest).

    A panel whose table is missing says so. The two lines on top are computed from the tables, never from a hope.
    published: also the papers' values, in panels 1, 2 and 5.
    """
    tables = {k: t for k, t in frame.items() if t is not None and len(t) and "model" in t.columns}
    if not tables:
        raise SettingError("the dashboard needs at least one table with rows")
    models = sorted({str(m) for t in tables.values() for m in t["model"].unique()})
    if model is None and len(models) != 1:
        raise SettingError(f"the tables hold {len(models)} models ({', '.join(models)}): choose one, model=...")
    model = model or models[0]
    if model not in models:
        raise SettingError(f"model={model!r} is not in the tables; they hold {', '.join(models)}")
    tables = {k: t[t["model"].astype(str) == model] for k, t in tables.items()}
    tables = {k: t for k, t in tables.items() if len(t)}
    for kind, needed in TABLES.items():
        if kind in tables:
            style.check(tables[kind], needed, kind)
    if "plan" in tables and "bench" in tables:
        tables["plan"] = predicted.remeasured(tables["plan"], tables["bench"])
    if "bench" in tables:
        tables["bench"] = style.labelled(tables["bench"])
    pairs = ratios.per_prompt(tables["bench"]) if "bench" in tables else None
    held = [pairs] if pairs is not None and len(pairs) else [t for t in tables.values() if "task" in t]
    tasks = style.order([x for t in held for x in t["task"].unique()], style.TASKS)
    task = task or next(iter(tasks), "")
    fig = style.figure(15, 9.4)
    halves = fig.subfigures(2, 1)  # each row finds its own column widths: decoder names are long, depths are not
    axes = [*halves[0].subplots(1, 3), *halves[1].subplots(1, 3, width_ratios=[1.15, 1, 1])]
    panels = [
        ("1  How channels settle", "convergence", _convergence),
        ("2  What each depth would say", "depth_lens", _lens),
        ("3  Reading full-depth prefixes", "prefix_channels", _channels),
        ("4  Drafts accepted, by place", "acceptance", _acceptance),
        ("5  Speed, paired with AR", "bench", _speed),
        ("6  Predicted beside measured", "plan", _plan),
    ]
    few = _few(pairs[pairs["task"] == task]) if pairs is not None else None
    for ax, (title, kind, fill) in zip(axes, panels):
        part = tables.get(kind)
        if part is not None and few and kind in ("acceptance", "bench"):
            part = part[part["decoder"].isin(few) | (part["task"] != task)]
        if part is not None and start and "start" in part:
            part = part[part["start"] == start]
        if part is not None and kind not in ("depth_lens", "prefix_channels"):
            part = part[part["task"].astype(str) == task]
        if part is None or part.empty:
            ax.set_axis_off()
            ax.text(0.5, 0.5, f"no {kind} table in this run", ha="center", va="center", color=style.QUIET, transform=ax.transAxes)
        else:
            fill(ax, part)
        ax.set_title(title, fontsize=style.PANEL + 1.5)
        for legend in filter(None, [ax.get_legend()]):
            legend.set_zorder(6)
    theirs = _published(axes, tables, task, start) if published else []
    lines = headline(tables, task)
    fig = style.finish(
        fig,
        f"{model}: {lines[0]}",
        f"Panels 1, 4, 5 and 6: {task or 'all'} prompts{_counted(tables, task)}; 2 and 3: every task. Bands, bars and whiskers: 95 % "
        "bootstrap interval over prompts. Speeds: decode seconds of AR over the decoder's, mean of per-prompt ratios"
        f"{_left_out(pairs, task)}. "
        + (f"6: all seconds over all seconds; {predicted.EXACT}: block calls predicted exactly, {predicted.ESTIMATED}: estimated. "
           if "plan" in tables else "")
        + " ".join([lines[2], *[f"{papers.CAPTION}."] * bool(theirs)]),
        " ".join(lines),
    )
    fig.texts[-1].set_fontsize(style.NOTE)
    top = [f"{model}: {lines[0]}", lines[1]]
    fig.suptitle(
        "\n".join(top),
        x=0.01,
        y=1 - 0.12 / fig.get_figheight(),
        ha="left",
        va="top",
        fontsize=min(17, 17 * 98 / max(map(len, top))),  # about 98 characters of this size fit across
        fontweight="bold",
        color=style.INK,
        linespacing=1.35,
    )
    left, bottom, width, _ = fig.get_layout_engine().get()["rect"]
    if theirs:
        fig.legend(handles=theirs, loc="lower left", ncols=3, bbox_to_anchor=(0.005, bottom), borderaxespad=0)
        bottom += (0.08 + 0.21 * -(-len(theirs) // 3)) / fig.get_figheight()
    fig.get_layout_engine().set(rect=(left, bottom, width, 1 - bottom - 0.86 / fig.get_figheight()))
    return fig


def _few(pairs) -> list[str]:
    """What a page has room for: AR and the fastest of every kind, then the fastest of the rest; lossless ones first."""
    means = pairs.groupby("decoder", observed=True)["time_speedup"].mean().sort_values(ascending=False)
    kinds: dict[tuple[str, bool], str] = {}
    for decoder in means.index:
        kinds.setdefault((style.family(decoder), style.fidelity_of(decoder) == style.LOSSLESS), decoder)
    first = [d for (_, lossless), d in sorted(kinds.items(), key=lambda kind: not kind[0][1])]
    rest = [d for d in means.index if d not in first and style.fidelity_of(d) == style.LOSSLESS]
    return (["AR"] + [d for d in first if d != "AR"] + rest)[:_MOST]


def _counted(tables, task) -> str:
    """' (16 probed, 10 timed)'."""
    said = []
    for kind, word in (("depth_lens", "probed"), ("bench", "timed")):
        if kind in tables:
            part = tables[kind]
            said.append(f"{part.loc[part['task'].astype(str) == task, 'prompt'].nunique()} {word}")
    return f" ({', '.join(said)})" if said else ""


def _left_out(pairs, task) -> str:
    """'; 3 more decoders in the figure of speeds' where the panels do not show all."""
    n = 0 if pairs is None else pairs.loc[pairs["task"] == task, "decoder"].nunique() - _MOST
    return f"; {n} more decoder{'s' * (n > 1)} in the figure of speeds" if n > 0 else ""


def _published(axes, tables, task, start):
    """The papers' values on the panels that can carry them; their legend entries, each once."""
    found = []
    own = {k: t[t["start"] == start] if start and "start" in t else t for k, t in tables.items()}
    if len(own.get("convergence", ())):
        found += papers.on_convergence(axes[0], set(own["convergence"]["channel"]))
    if len(own.get("depth_lens", ())):
        found += papers.on_depth_lens(axes[1], own["depth_lens"]["depth"].unique())
    labels = [label.get_text().replace("\n", " ") for label in axes[4].get_yticklabels()]
    found += papers.on_speedup(axes[4], labels, task) if "bench" in own else []
    return list({handle.get_label(): handle for handle in found}.values())


def headline(tables, task=None):
    """(Mature-V in a sentence, the decoder to use in a sentence, the equality of tokens in a sentence)."""
    first = "Mature-V was not measured."
    if "prefix_channels" in tables:
        frame = _one_start(tables["prefix_channels"])
        table = prefix_channels.effects(frame)
        cell = table[(table["policy"] == "deep_v") & (table["control"] == "none") & (table["lag"] == table["lag"].min())]
        cell = cell[cell["depth"] == cell["depth"].min()]
        said = []
        rank = style.order(cell["task"], style.TASKS)
        for r in sorted(cell.itertuples(), key=lambda r: rank.index(r.task)):
            kind = "no interval" if r.low != r.low else "helps" if r.low > NOISE else "hurts" if r.high < -NOISE else "no clear effect"
            said.append(f"{kind}{f' on {r.task}' if r.task else ''} ({100 * r.mean:+.1f} points)")
        if said:
            first = "Mature-V: " + ", ".join(said)
    second, third = "No decoder was timed.", ""
    if "bench" in tables:
        second = next((found.short for found in advice.of_tables(tables) if found.task == (task or found.task)), second)
        third = speedup.same_tokens(ratios.equality(tables["bench"]))
    return first, second, third


def _one_start(frame):
    return style.choose(frame, "start", None, "prefix_channels", style.OWN_START)[0]


def _convergence(ax, part):
    part = _one_start(part)
    part = part[(part["null"] == "none") & (part["metric"] == "cosine")]
    convergence.panel(ax, intervals.table(part, ("channel", "depth"), "value"), style.order(part["channel"], style.CHANNELS))
    ax.set_ylabel("cosine to depth T")
    ax.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")


def _lens(ax, part):
    depth_lens.panel(ax, _one_start(part))
    ax.legend(
        ax.get_legend_handles_labels()[0],
        [label.split(",")[0] for label in ax.get_legend_handles_labels()[1]],
        loc="lower right",
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
    )


def _channels(ax, part):
    """Effects at the shallowest draft right behind the prefix, tasks along x."""
    table = prefix_channels.effects(_one_start(part))
    table = table[(table["control"] == "none") & (table["lag"] == table["lag"].min()) & (table["depth"] == table["depth"].min())]
    tasks = style.order(table["task"], style.TASKS)
    table = table.assign(place=table["task"].map(tasks.index))
    prefix_channels.panel(ax, table, "place", "policy", style.POLICIES)
    for line in ax.lines[:-1]:  # tasks are no scale: points only
        line.set_linestyle("none")
        line.set_markersize(9)
    ax.set_xticks(range(len(tasks)), [t or "prompts" for t in tasks])
    ax.set_xlabel(f"prompts (draft depth {int(table['depth'].min())}, lag {int(table['lag'].min())}; 0 = aligned draft)")
    style.points(ax.yaxis)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.32 * (high - low))
    ax.legend(loc="upper left", ncols=3, columnspacing=1.0, handlelength=1.2)


def _acceptance(ax, part):
    part, decoders = acceptance.together(part), style.decoders_in_order(part["decoder"])
    rates = acceptance.panel(ax, part, decoders, band=len(decoders) <= 4)
    low = min(rates["mean"].min(), rates["low"].min() if len(decoders) <= 4 else 1.0)
    acceptance.rate_axis(ax, low - 0.05)
    ax.set_ylabel("accepted / reached")
    ax.set_xlabel("place of the draft in its run")
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15), ncols=2, columnspacing=0.8, handlelength=2.2, fontsize=style.TICK - 1)


def _speed(ax, part):
    pairs = ratios.per_prompt(part)
    ranked = pairs.groupby("decoder")["time_speedup"].mean().sort_values(ascending=False).index.tolist()
    speedup.panel(ax, pairs, ranked, room=1.65)
    ax.set_yticks(range(len(ranked)), [_two_lines(d) for d in ranked])
    ax.set_xlabel("times faster than AR (wall clock)")


def _plan(ax, part):
    table = predicted.ranked(predicted.both(part))
    measured = table[table["time_speedup_measured"].notna()]
    # What was measured, then the best of the rest.
    rest = table.index.difference(measured.index)[: max(0, _MOST - len(measured))]
    table = table.loc[sorted([*measured.index[:_MOST], *rest])].reset_index(
        drop=True
    )
    predicted.dumbbells(ax, table)
    ax.set_yticks(range(len(table)), [_two_lines(r.decoder, predicted.sign(r)) for r in table.itertuples()])
    ax.set_xlabel("times faster than AR (hollow: predicted)")


def _two_lines(decoder, sign=""):
    family, _, rest = str(decoder).partition(" ")
    family = f"{family} {sign}".rstrip()
    return f"{family}\n{rest}" if rest else family


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("dashboard"))
