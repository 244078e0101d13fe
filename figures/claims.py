"""The claims page: what the papers claim and what this run found, as a picture, as rows of the report, and as a Markdown table."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import intervals, style
from loopscope.records import write_text

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("claim", "sentence", "source", "model", "task", "part", "measure", "value", "low", "high", "unit", "n_prompts", "verdict",
           "note", "table", "command")
_LOOKS = {  # verdict -> (mark, fill, ink)
    "holds": ("✓", "#CDEBDD", style.INK),
    "does not hold": ("✗", "#F7CDB8", style.INK),
    "undecided": ("?", "#E8E8E8", style.INK),
    "no interval": ("–", "#F4F4F4", style.QUIET),
    "not measured in this run": ("", "#FFFFFF", style.QUIET),
    "cannot be tested here": ("", "#FFFFFF", style.QUIET),
}
_WIDTH, _ROW = 2.0, 0.5  # inches of a cell


def draw(frame, *, model=None):
    """frame: a claims table, or {table name: table} to make it of. A row per claim, a column per model and task."""
    frame = _as_frame(frame)
    style.check(frame, COLUMNS, "claims")
    if model is not None:
        frame, model = style.choose(frame, "model", model, "claims")
    table, heads = rows(frame), columns(frame)
    fig = style.figure(5.4 + _WIDTH * len(heads), 1.9 + _ROW * len(table))
    ax = fig.subplots()
    for y, row in enumerate(table):
        for x, head in enumerate(heads):
            cell = row["cells"].get(head)
            mark, fill, ink = _LOOKS[cell["verdict"]] if cell else ("", "#FFFFFF", style.QUIET)
            ax.add_patch(_box(x, y, fill, hatch="" if cell and mark else "//"))
            if cell:
                words = [f"{mark} {cell['verdict']}".strip(), cell["number"]]
                ax.text(x, y, "\n".join(w for w in words if w), ha="center", va="center", fontsize=style.TICK - 0.5, color=ink,
                        linespacing=1.25, bbox=None if mark else {"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    ax.set_xlim(-0.52, len(heads) - 0.48)
    ax.set_ylim(len(table) - 0.48, -0.52)
    ax.set_xticks(range(len(heads)), ["\n".join(w for w in head if w) for head in heads])
    ax.set_yticks(range(len(table)), [textwrap.fill(r["label"], 44, break_on_hyphens=False) for r in table])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
    return style.finish(
        fig,
        f"{model + ': w' if model else 'W'}hat the papers claim, and what was found here",
        f"Numbers: mean or ratio and its 95 % bootstrap interval over prompts ({intervals.DAGGER}: fewer than {intervals.FEW} of them, too "
        "narrow to rely on); a verdict is read off the interval. Hatched: no verdict, the "
        "number is ours and stands beside a claim about another model or machine. A claim that holds here says nothing of the papers' "
        "models.",
        _alt(table, heads),
    )


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict per claim and part: label, sentence, source, tables, commands, cells {(model, task): measure, number, verdict, note}."""
    out = []
    for (claim, part), group in frame.groupby([frame["claim"], _parts(frame)], sort=False):
        first = group.iloc[0]
        cells = {(r.model, r.task): {"measure": r.measure, "number": number(r), "verdict": r.verdict, "note": r.note}
                 for r in group.itertuples()}
        out.append({"label": f"{first.sentence} ({part})" if part else first.sentence, "claim": claim, "part": part,
                    "sentence": first.sentence, "source": first.source, "cells": cells,
                    "tables": list(dict.fromkeys(group["table"])), "commands": [c for c in dict.fromkeys(group["command"]) if c]})
    return out


def columns(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(model, task), in the order of the table."""
    return list(dict.fromkeys(zip(frame["model"], frame["task"])))


def number(row) -> str:
    """'2.43x [2.33, 2.60]', '+0.8 points [+0.3, +1.4]', '' where nothing was measured."""
    if row.value != row.value:
        return ""
    shown = {"x": "{:.2f}", "points": "{:+.1f}", "cosine": "{:+.3f}", "tokens": "{:+.2f}", "share": "{:.0%}"}[row.unit]
    unit = {"x": "x", "points": " points", "tokens": " tokens"}.get(row.unit, "")
    between = intervals.words(row.low + 0.0, row.high + 0.0, row.n_prompts, shown)
    return f"{shown.format(row.value + 0.0)}{unit} {between}".rstrip()


def markdown(frame: pd.DataFrame) -> str:
    """The claims as a Markdown document: one table, and below it the commands that make each number again."""
    heads = columns(frame)
    lines = ["# What the papers claim, and what was found here", "", _READING, ""]
    lines.append("| claim | source | " + " | ".join(_plain(", ".join(w for w in head if w)) for head in heads) + " |")
    lines.append("|---|---|" + "---|" * len(heads))
    for row in rows(frame):
        cells = [row["cells"].get(head) for head in heads]
        told = [_plain(": ".join(w for w in (c["verdict"], c["number"]) if w)) if c else "" for c in cells]
        lines.append(f"| {_plain(row['label'])} | {_plain(row['source'])} | " + " | ".join(told) + " |")
    lines += ["", "## What was compared, and how to get it again", ""]
    for row in rows(frame):
        lines.append(f"- {row['label']}")
        for (model, task), cell in row["cells"].items():
            said = "; ".join(w for w in (cell["measure"], cell["note"]) if w)
            lines.append(f"  - {_plain(model)}, {_plain(task or 'prompts')}: {_plain(said)}")
        lines += [f"  - `{command}`" for command in row["commands"]]
    return "\n".join(lines) + "\n"


_READING = (
    "A verdict is read off the 95 % bootstrap interval over prompts: *holds* above the claim's threshold, *does not hold* below it, "
    "*undecided* where the interval contains it. Equality of tokens is decided by counterexample. The best decoder of each kind is "
    "chosen on the same prompts. Where a claim is about a model or a machine that is not here, our own number stands beside it without "
    "a verdict."
)


def export(frame: pd.DataFrame, path: str | os.PathLike) -> Path:
    """Write the Markdown document; returns its path. Raises RunFolderError."""
    return write_text(markdown(frame), Path(path))


def section(tables: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """(the claims table of a run, what the report's template shows of it), or None where no table names a model and a task."""
    from decoders.claims import VERDICTS, claims

    frame = claims(tables, manifest.get("commands"), manifest.get("sources")).frame
    if frame.empty:
        return None
    counted = frame["verdict"].value_counts()
    heads = columns(frame)
    shown = [{**row, "cells": [row["cells"].get(head) for head in heads]} for row in rows(frame)]
    return frame, {"heads": [", ".join(w for w in head if w) for head in heads], "rows": shown, "reading": _READING.replace("*", ""),
                   "counts": [(v, int(counted[v])) for v in VERDICTS if v in counted]}


def _as_frame(frame):
    if not isinstance(frame, Mapping):
        return frame
    from decoders.claims import claims

    return claims(frame).frame


def _parts(frame):
    """The part of a claim that a row is about; where a model has no such measurement its row ('') joins the first part there is."""
    named = frame.groupby("claim", sort=False)["part"].agg(lambda parts: next((p for p in parts if p), ""))
    return frame["part"].where(frame["part"] != "", frame["claim"].map(named))


def _box(x, y, fill, hatch):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.49, y - 0.46), 0.98, 0.92, facecolor=fill, edgecolor=style.GRID, hatch=hatch, linewidth=0.6, zorder=0.5)


def _plain(text: str) -> str:
    """Text in a Markdown cell: bars and line breaks would end it."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def _alt(table, heads):
    said = []
    for row in table:
        found = "; ".join(f"{', '.join(w for w in head if w)}: {' '.join(w for w in (c['verdict'], c['number']) if w)}"
                          for head in heads if (c := row["cells"].get(head)))
        said.append(f"{row['label']}: {found}.")
    return f"A table of {len(table)} claims. " + " ".join(said)


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("claims"))
