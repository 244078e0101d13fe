"""Activation patching: how much of the clean answer one clean activation brings back, by where it was put."""

from __future__ import annotations

from figures import style

COLUMNS = ("model", "task", "prompt", "start", "site", "depth", "layer", "position", "head", "token", "corrupted_token", "restored")
SITES = {
    "resid_pre": "stream before the block", "resid_mid": "stream between attention and MLP", "resid_post": "stream after the block",
    "attn_out": "attention output", "mlp_out": "MLP output", "q": "queries of a head", "k": "keys of a head", "v": "values of a head",
    "z": "what a head reads (z)",
}  # fmt: skip


def draw(frame, *, model=None, start=None, task=None, prompt=None):
    """One heat map per site: position (or layer and head) against depth (and layer), mean over pairs.

    Pairs of different lengths have no position in common: then the first is drawn, or the one that `prompt` says.
    """
    frame, model, start = style.rows(frame, COLUMNS, "patching", model, start)
    frame, task = style.choose(frame, "task", task, "patching", style.order(frame["task"], style.TASKS))
    lengths = frame[frame["position"] >= 0].groupby("prompt")["position"].max()
    if prompt is not None or lengths.nunique() > 1:
        frame, prompt = style.choose(frame, "prompt", prompt, "patching", sorted(frame["prompt"].astype(str).unique(), key=int))
    frame = frame.dropna(subset=["restored"])
    style.check(frame, COLUMNS, "patching")
    sites = [s for s in SITES if s in set(frame["site"])] + sorted(set(frame["site"]) - set(SITES))
    tables = [_table(frame[frame["site"] == site]) for site in sites]
    tall = max(2.4, min(7.0, 0.9 + 0.19 * max(len(t) for t, _ in tables)))
    across = min(len(sites), 3)
    down = -(-len(sites) // across)
    fig = style.figure(max(5.5, 4.3 * across), 1.3 + tall * down)
    axes = fig.subplots(down, across, squeeze=False).flatten()
    said = []
    for ax, site, (table, by_layer) in zip(axes, sites, tables):
        image = ax.imshow(table.to_numpy(), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        step = max(1, len(table) // 28)
        ax.set_yticks(range(0, len(table), step), list(table.index)[::step], fontsize=style.TICK - 1)
        _columns(ax, list(table.columns), by_layer)
        ax.set_title(SITES.get(site, site))
        row, column = divmod(int(table.fillna(-9).to_numpy().argmax()), table.shape[1])
        said.append(f"{SITES.get(site, site)}: most at {' '.join(str(table.index[row]).split())}, {_place(table.columns[column])} "
                    f"({style.number(float(table.iloc[row, column]), 2)})")
    for ax in axes[len(sites):]:
        ax.set_axis_off()
    bar = fig.colorbar(image, ax=axes[len(sites) - 1], shrink=0.9, pad=0.02, extend="both")
    bar.set_label("restored (1: the clean answer)")
    bar.outline.set_visible(False)
    count = frame["prompt"].nunique()
    what = f"pair {prompt}" if prompt is not None else f"mean over {count} pair{'s' * (count != 1)}"
    return style.finish(
        fig,
        f"{model}: which activation carries the answer",
        f"{task or 'prompts'}, {what}; start state: {style.look(style.STARTS, start).label.removesuffix(' start')}. Clean activations put "
        "into the run on the corrupted prompt. *: the prompts differ here. all: at every depth at once. Colours end at -1 and 1.",
        f"Heat maps of activation patching on {model}. {'; '.join(said)}.",
    )


def _table(part):
    """(rows by position or by head, whether columns are (depth, layer) or depth alone): means over pairs, the largest over what is left."""
    if (part["head"] >= 0).any():
        heads, by_layer = "head " + part["head"].astype(str), False
        names = ("layer " + part["layer"].astype(str) + " " + heads).where(part["layer"] >= 0, heads)
        order = [part["layer"], part["head"]]
    elif (part["position"] >= 0).any():
        differ = part.groupby("position").apply(lambda g: bool((g["token"] != g["corrupted_token"]).any()), include_groups=False)
        first = part.drop_duplicates("position").set_index("position")["token"]
        words = {p: f"{style.plain(_seen(first[p]), 10)}  {p}{' *' if differ[p] else ''}" for p in first.index}
        names, by_layer, order = part["position"].map(words), True, [part["position"]]
    else:
        names, by_layer, order = part["layer"].map(lambda n: f"layer {n}" if n >= 0 else "all layers"), False, [part["layer"]]
    rows = part.assign(_name=names, **{f"_{i}": o for i, o in enumerate(order)})
    keys = [f"_{i}" for i in range(len(order))] + ["_name"]
    columns = ["depth", "layer"] if by_layer else ["depth"]
    means = rows.groupby([*keys, "depth", "layer", "position", "head"])["restored"].mean().reset_index()
    table = means.groupby([*keys, *columns])["restored"].max().unstack(columns).sort_index()
    table.index = table.index.get_level_values("_name")
    last = [c for c in table.columns if _depth(c) < 0]
    return table[sorted((c for c in table.columns if _depth(c) >= 0)) + sorted(last)], by_layer


def _depth(column):
    return column[0] if isinstance(column, tuple) else column


def _place(column):
    depth, *layer = column if isinstance(column, tuple) else (column,)
    return ("all depths" if depth < 0 else f"depth {depth}") + (f", layer {layer[0]}" if layer and layer[0] >= 0 else "")


def _columns(ax, columns, by_layer):
    """A tick at the first column of a depth, thinned; lines between recurrences where there is room."""
    firsts = [i for i, c in enumerate(columns) if i == 0 or _depth(columns[i - 1]) != _depth(c)]
    kept = firsts[:: max(1, len(firsts) // 8)]
    if _depth(columns[-1]) < 0:
        kept = [i for i in kept if i <= firsts[-1] - max(1, len(firsts) // 8)] + [firsts[-1]]
    width = len(columns) / len(firsts)
    ax.set_xticks([i + (width - 1) / 2 for i in kept], ["all" if _depth(columns[i]) < 0 else str(_depth(columns[i])) for i in kept])
    if by_layer and width > 1:
        for i in firsts[1:]:
            ax.axvline(i - 0.5, color=style.GRID, linewidth=0.6)
    elif _depth(columns[-1]) < 0 and len(firsts) > 1:
        ax.axvline(firsts[-1] - 0.5, color=style.QUIET, linewidth=0.8)
    ax.grid(visible=False)
    ax.set_xlabel("recurrence depth r" + (" (a column for each layer)" if by_layer and width > 1 else ""))


def _seen(token):
    return str(token).replace(" ", "\u00b7")


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("patching"))
