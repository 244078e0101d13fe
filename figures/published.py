"""Numbers that papers published, as facts with their sources, and how they are laid over our figures.

    published.load("das")             what figures/published/das.json holds
    python -m figures.published       the back-test: published acceptance beside what our formulae make of published agreements

None of these numbers enters any of ours. On a figure they are large hollow marks with a legend entry of their own,
"published: MODEL, SOURCE"; other models, tasks, depths and machines than ours, so what can be compared is the shape.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import style
from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    import pandas as pd

PAPERS = ("das", "wfd", "loopspec")
KINDS = ("convergence", "depth_lens", "prefix_channels", "bench", "speedup", "dashboard")  # the figures that can carry published values
MODELS = {  # name in the files -> (name, marker)
    "huginn": ("Huginn-3.5B", "*"),
    "huginn_3_5b": ("Huginn-3.5B", "v"),  # the other paper's
    "ouro_2_6b": ("Ouro-2.6B", "p"),
    "raven_llama": ("Raven-Llama", "P"),
    "raven_olmo": ("Raven-OLMo", "X"),
    "raven_tinyllama": ("Raven-TinyLlama", "h"),
}
_NEAREST = {"maths": ("gsm8k", "math_reasoning"), "code": ("humaneval", "overall")}  # our task -> (DAS's, Spec-Bench's)
NEAREST = "GSM8K and Spec-Bench's maths beside maths, HumanEval and all of Spec-Bench beside code"
_TABLES = {"draft_then_verify": ("DtV", "aligned"), "mature_spec": ("DtV", "deep_kv"), "das_wave": ("DAS-Wave", "deep_kv")}
CAPTION = "Large hollow marks: published values of larger models on other machines, for comparison of shape only"


@cache
def _text(paper: str) -> str:
    return (Path(__file__).with_name("published") / f"{paper}.json").read_text(encoding="utf-8")


def load(paper: str) -> dict[str, Any]:
    """One paper's numbers: "das" (arXiv 2609.34538), "wfd" (2609.23033) or "loopspec" (2609.17184). Raises SettingError."""
    if paper not in PAPERS:
        near = closest(paper, PAPERS)
        raise SettingError(f"no published numbers are called {paper!r}{f' (did you mean {near}?)' if near else ''}; "
                           f"known: {', '.join(PAPERS)}")
    return json.loads(_text(paper))


def source(paper: str) -> str:
    """'arXiv 2609.34538'."""
    return load(paper)["source"].split(" (")[0]


def cosines() -> pd.DataFrame:
    """Columns model, channel, depth, value, source: cosine of Q, K and V at depth 1 to full depth, averaged over core layers (DAS)."""
    import pandas as pd

    table = load("das")["q_k_v_cosine_depth1"]
    rows = [(model, channel.lower(), 1, value, source("das")) for model, values in table.items() if model in MODELS
            for channel, value in values.items()]
    return pd.DataFrame(rows, columns=["model", "channel", "depth", "value", "source"])


def agreements() -> pd.DataFrame:
    """Columns model, policy, depth, agreement, source: top-1 agreement of a draft with full depth by read policy, GSM8K (DAS)."""
    import pandas as pd

    table = load("das")["agreement_by_policy"]
    rows = [(model, policy, d, a, source("das")) for model in table if model in MODELS for policy, values in table[model].items()
            for d, a in zip(table["depths"], values)]
    return pd.DataFrame(rows, columns=["model", "policy", "depth", "agreement", "source"])


def speedups() -> pd.DataFrame:
    """Columns model, task, decoder (family), read, speedup, source: wall clock over AR, prefill included, by task of the paper."""
    import pandas as pd

    das, wfd = load("das")["speedup_and_A"], load("wfd")["spec_bench"]
    rows = [(model, task, *_TABLES[name], speed, source("das")) for model in das if model in MODELS for name in _TABLES
            for task, (speed, _) in zip(das["tasks"], das[model][name])]
    for model in (m for m in wfd if m in MODELS):
        for name, family in (("dtv_speedup", "DtV"), ("wfd_speedup", "WFD")):
            rows += [(model, task, family, "aligned", speed, source("wfd")) for task, speed in zip(wfd["tasks"], wfd[model][name])]
    return pd.DataFrame(rows, columns=["model", "task", "decoder", "read", "speedup", "source"])


# ---- on our figures ----------------------------------------------------------------------------------------------


def mark(ax, x, y, model: str, edge: str = style.INK, size: float = 11.0) -> None:
    """One published value: hollow, in the model's marker; `edge` may say which channel it is of."""
    ax.plot([x], [y], linestyle="none", marker=MODELS[model][1], markersize=size, markerfacecolor="none", markeredgecolor=edge,
            markeredgewidth=1.3, zorder=7, clip_on=False)


def handles(table: pd.DataFrame) -> list:
    """A legend entry for every model and source in a table of this page."""
    from matplotlib.lines import Line2D

    said = {(*MODELS[m], s): None for m, s in zip(table["model"], table["source"])}
    return [Line2D([], [], linestyle="none", marker=marker, markersize=9, markerfacecolor="none", markeredgecolor=style.INK,
                   label=f"published: {name}, {where}") for name, marker, where in said]


def on_convergence(ax, channels) -> list:
    """Published cosines at depth 1, edged in their channel's colour."""
    table = cosines()
    table = table[table["channel"].isin(channels)]
    for r in table.itertuples():
        aside = 1.05 ** list(MODELS).index(r.model)  # beside our marks and each other, on an axis of depth that is linear or logarithmic
        mark(ax, r.depth * aside, r.value, r.model, style.look(style.CHANNELS, r.channel).colour)
    return handles(table)


def on_depth_lens(ax, depths) -> list:
    """Published agreement of aligned drafts at the depths that our axis has."""
    table = agreements()
    table = table[(table["policy"] == "aligned") & table["depth"].isin(list(depths))]
    for r in table.itertuples():
        mark(ax, r.depth, r.agreement, r.model, size=8)
    return handles(table)


def on_prefix_channels(ax) -> list:
    """Published change in agreement to the aligned draft, by depth: a panel of its own, since its scale is not ours."""
    table = agreements()
    base = table[table["policy"] == "aligned"].set_index(["model", "depth"])["agreement"]
    table = table[table["policy"] != "aligned"].join(base.rename("aligned"), on=["model", "depth"])
    table = table.assign(change=table["agreement"] - table["aligned"])
    depths, policies, models = sorted(set(table["depth"])), style.order(table["policy"], style.POLICIES), list(table["model"].unique())
    for r in table.itertuples():
        # policies side by side, the models of one policy close together
        x = depths.index(r.depth) + 0.26 * (policies.index(r.policy) - 1) + 0.05 * (models.index(r.model) - 1.5)
        mark(ax, x, r.change, r.model, style.look(style.POLICIES, r.policy).colour, 7)
    ax.axhline(0, color=style.INK, linewidth=0.9, zorder=1)
    ax.set_xticks(range(len(depths)), [str(d) for d in depths])
    ax.set_xlim(-0.6, len(depths) - 0.4)
    ax.grid(axis="x", visible=False)
    ax.set_title("published, GSM8K: agreement")
    style.points(ax.yaxis)
    ax.set_xlabel("draft depth d")
    return handles(table)


def on_speedup(ax, ranked, task: str) -> list:
    """Published speedups on the row of the fastest of our decoders of the same kind, from the tasks nearest to ours."""
    table = speedups()
    das, spec = _NEAREST.get(task, ("gsm8k", "overall"))
    table = table[table["task"].isin((das, spec))]
    shown = []
    for (family, read), part in table.groupby(["decoder", "read"], sort=False):
        rows = [y for y, label in enumerate(ranked) if kind_of(label) == (family, read)]
        for r in part.itertuples() if rows else ():
            mark(ax, r.speedup, rows[0] + 0.45, r.model, size=7)  # below the bar: its end carries our own number
            shown.append(r.Index)
    if shown:
        ax.set_xlim(0, max(ax.get_xlim()[1], 1.08 * table.loc[shown, "speedup"].max()))
    return handles(table.loc[shown])


def kind_of(label: str) -> tuple[str, str]:
    """('DtV', 'deep_kv') of 'DtV d=1 K=8 deep_kv': what a published decoder must share to stand beside it; read aligned if unsaid."""
    words = str(label).split()
    return style.family(label), next((w for w in words if w in style.POLICIES), "aligned")


def main() -> None:
    """Print the back-test, every cell of it."""
    from decoders.backtest import GROUPS, backtest

    table = backtest(load("das"))
    for group, part in table.groupby("group", sort=False):
        print(f"\n{group}: {GROUPS[group]}")
        print(part.drop(columns=["group", "percent"]).to_string(index=False, float_format="{:.2f}".format,
                                                                formatters={"error": "{:+.1%}".format}))


if __name__ == "__main__":
    main()
