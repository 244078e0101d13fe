"""Which figures a run's tables make: one list, shared by the report and by redrawing."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from figures import dashboard, draw, join, published as papers, ratios, style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# tables in the order a reader meets their figures
TABLES = (
    "convergence", "depth_lens", "settle", "second_candidate", "agreement_runs",
    "token_grid", "attribution", "trajectories", "head_stability", "depth_similarity",
    "block_lens", "layer_fixed_points", "head_attribution", "linear_probe", "patching",
    "prefix_channels", "prefix_effects",
    "depth_grid", "hops", "plan", "miss", "bench", "acceptance", "acceptance_by_depth", "factorial", "trace", "timing",
)  # fmt: skip
_BY_START = ("convergence", "settle", "attribution", "trajectories", "head_stability", "depth_similarity", "prefix_channels",
             "block_lens", "layer_fixed_points", "head_attribution", "linear_probe", "patching",
             "prefix_effects", "depth_grid", "second_candidate", "agreement_runs", "hops")
_LONGEST = 80  # characters of a name in a file name; file systems take 255 bytes with all that is appended
_SCHEDULES = 4  # one per decoder family is enough to see how they differ


@dataclass(frozen=True, eq=False)
class Plate:
    """One figure of a run: its file name, what draws it, and the rows it is drawn from."""

    name: str
    kind: str
    model: str
    frame: pd.DataFrame | dict[str, pd.DataFrame]
    options: Mapping[str, Any] = field(default_factory=dict)
    main: bool = True  # False: a second view, folded away in the report

    def draw(self, published: bool = False) -> Figure:
        """published: with the papers' values, where this kind of figure can carry them."""
        return draw(self.kind, self.frame, model=self.model, **self.options, published=published and self.kind in papers.KINDS)


def in_order(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables in the order in which a reader meets them, those without a figure last."""
    return {kind: tables[kind] for kind in (*TABLES, *sorted(set(tables) - set(TABLES))) if kind in tables}


def models(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Every model named in the tables, in the order of appearance."""
    return list(dict.fromkeys(str(m) for t in tables.values() if "model" in t.columns for m in t["model"].unique()))


def plates(tables: Mapping[str, pd.DataFrame]) -> Iterator[Plate]:
    """The figures of every model, the dashboard first. Empty tables make none."""
    files = slugs(models(tables))
    for model, file in files.items():
        own = {k: t[t["model"].astype(str) == model] for k, t in tables.items() if "model" in t.columns}
        own = {k: t for k, t in own.items() if len(t)}
        shown = {k: own[k] for k in dashboard.TABLES if k in own}
        if shown:
            yield Plate(f"{file}_dashboard", "dashboard", model, shown)
        for kind in TABLES:
            if kind in own and not (kind == "bench" and not ratios.has_pairs(own[kind])):
                yield from _of_table(kind, own[kind], model, file)
            if kind == "acceptance" and len(joined := join.table(own)):  # after acceptance: what the probes knew of it
                yield Plate(f"{file}_join", "join", model, joined)


def _of_table(kind: str, frame: pd.DataFrame, model: str, file: str) -> Iterator[Plate]:
    stem = f"{file}_{'schedule' if kind == 'trace' else 'speedup' if kind == 'bench' else kind}"
    if kind == "trace":
        task = style.order(frame["task"], style.TASKS)[0]
        here = frame[frame["task"].astype(str) == task]
        by_family: dict[str, str] = {}
        for decoder in style.decoders_in_order(here["decoder"]):
            by_family.setdefault(style.family(decoder), decoder)
        ends = slugs(by_family.values())
        for i, decoder in enumerate(sorted(by_family.values(), key=_waves_first)[:_SCHEDULES]):
            options = {"task": task, "decoder": decoder}
            yield Plate(f"{stem}_{ends[decoder]}", kind, model, here[here["decoder"] == decoder], options, i == 0)
    elif kind in _BY_START:
        for i, start in enumerate(style.order(frame["start"], style.STARTS)):
            part, end = frame[frame["start"].astype(str) == start], f"_{start}" if i else ""
            yield Plate(f"{stem}{end}", kind, model, part, {"start": start}, i == 0)
            if kind == "convergence" and (part["metric"] == "rel_l2").any():
                yield Plate(f"{stem}_distance{end}", kind, model, part, {"start": start, "metric": "rel_l2"}, False)
    elif kind == "factorial":
        for i, task in enumerate(style.order(frame["task"], style.TASKS)):
            own = frame[frame["task"].astype(str) == task]
            yield Plate(f"{stem}{f'_{slug(task)}' if i else ''}", kind, model, own, {"task": task}, i == 0)
    elif not (kind == "miss" and set(frame["decoder"]) <= {"AR"}):
        yield Plate(stem, kind, model, frame, {}, kind != "timing")


def _waves_first(decoder: str) -> tuple[int, str]:
    rank = ("WFD", "DAS-Wave", "DtV", "AR")
    return (rank.index(style.family(decoder)) if style.family(decoder) in rank else len(rank), decoder)


def slug(name: str) -> str:
    """A file name from a model's or decoder's name: 'org/Model 1' -> 'org-model-1'.

    Where letters of other scripts, or most of a long name, had to be dropped, a few digits of the whole name's hash stand for them.
    """
    plain = re.sub(r"[^a-z0-9.]+", "-", str(name).lower()).strip("-.")
    if plain and str(name).isascii() and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST].strip('-.') or 'model'}-{_digest(name)}"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """name -> file name, no two alike: names that differ in case or punctuation only ('A b', 'a-b') are told apart by a hash."""
    plain = {str(name): slug(name) for name in names}
    shared = Counter(plain.values())
    return {name: file if shared[file] == 1 or file == name else f"{file}-{_digest(name)}" for name, file in plain.items()}


def _digest(name: str) -> str:
    return hashlib.sha256(str(name).encode("utf-8", "surrogatepass")).hexdigest()[:8]
