"""The idea in one picture: a shallow draft's queries against the prefix, aligned and with mature values. No data."""

from __future__ import annotations

from figures import style


def draw(frame=None, *, depth=4, draft=1):
    """Two panels, depth upwards and position to the right: where a draft at depth `draft` finds the prefix's keys and values."""
    from matplotlib.patches import FancyArrowPatch

    fig = style.figure(11.5, 4.9)
    axes = fig.subplots(1, 2, sharey=True)
    words = ["the", "sum", "of", "3", "and"]
    q, k, v = (style.CHANNELS[c].colour for c in "qkv")
    last = len(words) + 0.7  # a gap before the draft, for the arrows
    for ax, title, source in (
        (axes[0], "Aligned: keys and values of the draft's own depth", draft),
        (axes[1], "Mature-V: values of full depth, keys as before", depth),
    ):
        for p, word in enumerate(words):
            for r in range(1, depth + 1):
                text = "  ".join(name for name, at in (("K", draft), ("V", source)) if at == r)
                face, edge = {"K": ("#d9efe6", k), "V": ("#f9e1d2", v), "K  V": ("#ece6d8", style.QUIET), "": ("#ffffff", "#cccccc")}[text]
                _cell(ax, p, r, face, edge, text)
            ax.text(p, 0.3, word, ha="center", va="center", fontsize=style.LABEL)
        for r in range(1, depth + 1):
            _cell(ax, last, r, *(("#d6e6f3", q, "Q" if r == draft else "") if r <= draft else ("none", "#cccccc", "", (0, (3, 2)))))
        ax.text(last, 0.3, "draft", ha="center", va="center", fontsize=style.LABEL, style="italic")
        for target, colour, shift in ((draft, k, -0.12), (source, v, 0.12)):
            ax.add_patch(
                FancyArrowPatch(
                    (last - 0.42, draft + shift),
                    (len(words) - 0.56, target + (shift if source == draft else 0)),
                    arrowstyle="-|>",
                    mutation_scale=15,
                    color=colour,
                    linewidth=2.2,
                    shrinkA=0,
                    shrinkB=0,
                    zorder=6,
                )
            )
        ax.set_title(title)
        ax.set_xlim(-0.6, last + 0.6)
        ax.set_ylim(0.05, depth + 0.5)
        ax.set_yticks(range(1, depth + 1))
        ax.set_xticks([])
        ax.grid(visible=False)
        ax.set_xlabel("position in the text")
        ax.spines["bottom"].set_visible(False)
    axes[0].set_ylabel("recurrence depth (loops done)")
    return style.finish(
        fig,
        "A shallow draft and the prefix it reads",
        "The prefix was already computed at full depth, so its keys and values exist at every depth. The draft has run one loop only "
        "(dashed: loops it has not run). "
        "Its queries Q meet keys K and collect values V; Mature-V changes only where the values are read.",
        "Diagram: grids of position against recurrence depth. On the left a draft that has run one loop reads keys and values "
        "of the prefix at depth one; "
        "on the right it reads keys at depth one and values at full depth, which is called Mature-V.",
    )


def _cell(ax, x, y, face, edge, text="", line="-"):
    from matplotlib.patches import FancyBboxPatch

    ax.add_patch(
        FancyBboxPatch(
            (x - 0.38, y - 0.34),
            0.76,
            0.68,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor=face,
            edgecolor=edge,
            linestyle=line,
            linewidth=1.4,
            zorder=3 + bool(text),
        )
    )
    if text:
        ax.text(x, y, text, ha="center", va="center", fontsize=style.LABEL, fontweight="bold", color=style.INK, zorder=7)


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("concept"))
