"""The gallery: every figure of the shipped run as a small picture, with what it shows and the command that draws it.

    python -m figures.gallery_page            # all pictures and the page (make gallery)
    python -m figures.gallery_page --page     # the page alone: its words follow from the list of figures

Pictures are drawn from docs/gallery/run, whose manifest says how its tables were made; no model is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from figures import command, kinds, words
from loopscope.errors import LoopscopeError
from loopscope.records import write_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL, TASK = "tiny-huginn", "code"
COLOURS = 200  # of a picture's palette: a third of the bytes
# kind -> what its command says beyond model and task
_MATHS = (  # what the run has of these is maths
    "attribution", "trajectories", "token_grid", "head_stability", "depth_similarity", "head_attribution", "block_lens", "second_candidate",
    "agreement_runs", "layer_fixed_points", "acceptance_by_depth", "factorial",
)  # fmt: skip
_SUMS = ("linear_probe", "patching")  # and of these, built-in sums
_MORE: dict[str, dict[str, Any]] = {"trace": {"ticks": 40}, **{kind: {"task": "maths"} for kind in _MATHS},
                                    **{kind: {"task": "sums"} for kind in _SUMS}}
_WORDS = {
    "dashboard": ("A model on one page", "The six panels that a report begins with: what was probed, what follows, and what it brought."),
    "claims": ("What the papers claim", "Each claim beside what this run found, with a verdict that is read off an interval."),
    "concept": ("The idea of Mature-V", "Where a shallow draft finds the prefix's keys and values. No data."),
    "grid": ("Every schedule, predicted and measured", "How near the plan is to what was measured, and what its pick loses."),
}
_SAME = {"speedup": "bench", "predicted_vs_measured": "plan", "schedule": "trace"}  # kinds that the report knows by their table


def figures_of_page() -> list[str]:
    """One kind for every figure file, in the order of `figures.kinds()`."""
    from figures import _MODULES

    named = {module: kind for kind, module in reversed(_MODULES.items())}  # the first kind of a module
    return [kind for kind in kinds() if named[_MODULES[kind]] == kind]


def choices(kind: str) -> dict[str, Any]:
    """The options of a figure's command in the gallery."""
    offered = command._options(kind)
    wanted = {"model": MODEL, "task": TASK} | _MORE.get(kind, {})
    return {name: value for name, value in wanted.items() if name in offered}


def command_line(kind: str, out: str = "pdf") -> str:
    """What a reader types to get this figure."""
    from figures import _MODULES

    module = _MODULES[kind]
    told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in choices(kind).items())
    run = "" if kind == "concept" else " docs/gallery/run"
    return f"python -m figures.{module}{run}{' ' * bool(told)}{told} --out {module}.{out}"


def told(kind: str) -> tuple[str, str]:
    """(heading, what to look for), as in the report; else the first line of the figure's file."""
    known = words.READING.get(_SAME.get(kind, kind)) or _WORDS.get(kind)
    if known:
        return known
    from figures import _MODULES

    first = (import_module(f"figures.{_MODULES[kind]}").__doc__ or kind).strip().split("\n")[0]
    head, _, rest = first.partition(": ")
    return head, rest[:1].upper() + rest[1:]


def page(docs: Path = DOCS) -> str:
    """The Markdown of docs/gallery.md."""
    from figures import _MODULES

    facts = json.loads((docs / "gallery" / "run" / "manifest.json").read_text(encoding="utf-8"))
    lines = ["# Gallery", "", "<!-- written by `make gallery`; change figures/gallery_page.py, not this page -->", "",
             f"Every figure of the project, drawn from the tables of a small run that comes with it (`docs/gallery/run`): {facts['about']} "
             "Each command below draws its figure from those tables, without a model. With `--preset single` or `--preset double` it takes "
             "the width of a paper's column ([how to](howto/figures.md)); columns and units of the tables: [tables.md](tables.md).", ""]
    for kind in figures_of_page():
        module, (head, text) = _MODULES[kind], told(kind)
        lines += [f"## {head}", ""]
        if (docs / "gallery" / f"{module}.png").exists():
            lines += [f"![{head}](gallery/{module}.png)", ""]
        else:
            table = command.TABLES.get(kind, kind)
            lines += [f"*No picture here: the shipped run has no table `{table}`. {command.maker(table, 'RUN')} makes it.*", ""]
        lines += [text, "", "```sh", command_line(kind), "```", ""]
    return "\n".join(lines)


def picture(kind: str, docs: Path = DOCS) -> Path:
    """Draw one figure of the shipped run into docs/gallery, with few colours. Raises what the command raises."""
    from PIL import Image

    from figures import _MODULES

    preset = "page" if kind in ("dashboard", "claims") else "notebook"  # these two are pages, and taken apart they say less
    figure = command.figure_of(kind, docs / "gallery" / "run", preset, **choices(kind))
    file = command.write(figure, docs / "gallery" / f"{_MODULES[kind]}.png", preset)
    with Image.open(file) as image:
        small = image.convert("RGB")
    small.thumbnail((1200, 2400))
    # the palette that leaves no colour far from its own: median cut spends it on shades of white and gives two channels one colour
    few = small.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    return file


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m figures.gallery_page", description=__doc__.split("\n")[0])
    made.add_argument("--page", action="store_true", help="write docs/gallery.md only, and draw nothing")
    made.add_argument("--only", nargs="+", metavar="KIND", help="draw these figures only")
    asked = made.parse_args(arguments)
    for kind in [] if asked.page else asked.only or figures_of_page():
        try:
            print(picture(kind))
        except LoopscopeError as error:
            print(f"{kind}: no picture ({error})", file=sys.stderr)
    print(write_text(page(), DOCS / "gallery.md"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
