"""Token grid: token by depth, the top token printed in its cell, for one prompt."""

from __future__ import annotations

from figures import style

COLUMNS = ("model", "task", "prompt", "start", "position", "token", "depth", "top", "top_text", "probability", "final_rank")
_MOST = 24  # positions, and depths, that a page can hold with letters one can read


def draw(frame, *, model=None, start=None, task=None, prompt=None, first=0):
    """Positions from `first` on against depth: colour by probability, letters bold where the top token is already the final one.

    More depths than fit are thinned to powers of two and the last.
    """
    frame, model, start = style.rows(frame, COLUMNS, "token_grid", model, start)
    frame, task = style.choose(frame, "task", task, "token_grid", style.order(frame["task"], style.TASKS))
    frame, prompt = style.choose(frame, "prompt", prompt, "token_grid", sorted(frame["prompt"].astype(str).unique(), key=int))
    shown = frame[frame["position"] >= first]
    style.check(shown, COLUMNS, "token_grid")
    positions, depths = sorted(shown["position"].unique())[:_MOST], sorted(frame["depth"].unique())
    if len(depths) > style.fitting(_MOST, 1.7, 0.5):
        depths = [d for d in depths if d & (d - 1) == 0 or d == depths[-1]]
    cells = shown.set_index(["position", "depth"])
    chance = cells["probability"].unstack("depth").loc[positions, depths]
    letters = 9 if style.fitting(_MOST, 1.7, 0.8) >= len(depths) else 6
    fig = style.figure(max(5.2, 2.4 + 0.78 * len(depths)), 1.9 + 0.27 * len(positions))
    ax = fig.subplots()
    image = ax.imshow(chance.to_numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    for y, position in enumerate(positions):
        for x, depth in enumerate(depths):
            cell = cells.loc[(position, depth)]
            right = cell["final_rank"] == 1
            ax.text(x, y, style.plain(_seen(cell["top_text"]), letters), ha="center", va="center", fontsize=style.TICK - 1,
                    fontweight="bold" if right else "normal", color=style.INK if cell["probability"] > 0.55 else "white")
    tokens = shown.drop_duplicates("position").set_index("position")["token"]
    ax.set_yticks(range(len(positions)), [f"{style.plain(_seen(tokens[p]), 12)}  {p}" for p in positions])
    ax.set_xticks(range(len(depths)), [str(d) for d in depths])
    ax.grid(visible=False)
    ax.set_xlabel("recurrence depth r")
    ax.set_ylabel("input token and its position")
    bar = fig.colorbar(image, ax=ax, pad=0.02)
    bar.set_label("probability of the top token")
    bar.outline.set_visible(False)
    share = (cells["final_rank"].unstack("depth") == 1).mean()
    said = ", ".join(f"depth {d} {share[d]:.0%}" for d in depths)
    return style.finish(
        fig,
        f"{model}: the next token at every depth",
        f"{task or 'prompts'}, prompt {prompt}, positions {positions[0]} to {positions[-1]} of {frame['position'].max() + 1}. Bold: the "
        "top token of full depth. A dot stands for a space.",
        f"Grid of top tokens of {model} by position and recurrence depth. Positions whose top token is the final one: {said}.",
    )


def _seen(token):
    return str(token).replace(" ", "\u00b7")


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("token_grid"))
