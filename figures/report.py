"""The report: one self-contained page that a reader who has not read the papers can follow from top to bottom.

Everything is inlined (style, figures as SVG with alternative text); links point into the run folder only. Text that came
from a prompt or a file is escaped. The page says what the tables say: nothing in it is assumed about a model.
"""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import advice, claims, draw, intervals, predicted, save, style, summaries, words
from figures.drawing import Drawn, drawn
from figures.gallery import Plate, models, plates, slugs
from loopscope.records import write_text

if TYPE_CHECKING:
    import pandas as pd

    from figures.style import Note

_LARGE_SVG = 700_000  # bytes; beyond, a PNG reads the same and keeps the page light

COMMANDS = {  # how to get a table again; {model} is filled in
    "convergence": "loopscope probe {model}",
    "depth_lens": "loopscope probe {model}",
    "settle": "loopscope probe {model}",
    "prefix_channels": "loopscope intervene {model}",
    "prefix_effects": "loopscope intervene {model}",
    "depth_grid": "loopscope intervene {model}",
    "factorial": "loopscope factorial {model} --task {task}",
}
AGAIN = ("convergence", "prefix_effects", "bench", "plan")  # tables whose numbers stand in sentences, their commands below
GROUPS = (
    ("What was seen inside", ("convergence", "depth_lens", "settle", "second_candidate", "agreement_runs")),
    ("Does Mature-V hold?", ("prefix_channels", "prefix_effects", "depth_grid")),
    (
        "Which decoder follows, and how fast it was",
        ("hops", "plan", "miss", "bench", "acceptance", "acceptance_by_depth", "join", "factorial", "trace", "timing"),
    ),
)


def write_report(
    folder: str | os.PathLike, tables: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any], findings: Sequence[Mapping[str, Any]] = (),
    published: bool = False, workers: int = 1,
) -> Path:
    """Draw every figure into FOLDER/figures and write FOLDER/report.html; returns its path.

    tables: name -> frame (docs/tables.md). manifest: what loopscope.records.manifest gives; `commands` (table -> command line)
    and `approximate` (list of sentences) are used where present. findings: dicts with `model` and `sentence`, and optionally `topic`
    ("mature_v", "decoder", "approximate" or any other; default "mature_v"), `task`, `start`, `verdict`, and, of topic "decoder", `decoder`:
    the label that the plan picked.
    published: lay the papers' values over the figures that can carry them. workers: processes that draw (figures.drawing).
    Raises RunFolderError where something cannot be written, SettingError where a table cannot be drawn.
    """
    folder = Path(folder)
    tables = {k: t for k, t in tables.items() if t is not None and len(t)}
    if "plan" in tables:
        tables["plan"] = advice.marked(tables["plan"], findings)
    if "plan" in tables and "bench" in tables:
        tables["plan"] = predicted.remeasured(tables["plan"], tables["bench"])
    shown = {model: {"dashboard": None, "kinds": {}} for model in models(tables)}
    wanted = list(plates(tables))
    for plate, made in zip(wanted, drawn(wanted, folder / "figures", published, workers)):
        entry = _entry(plate, made, manifest)
        if plate.kind == "dashboard":
            shown[plate.model]["dashboard"] = entry
        else:
            shown[plate.model]["kinds"].setdefault(plate.kind, []).append(entry)
    sections = [_section(model, parts, tables, findings, manifest) for model, parts in shown.items()]
    concept = draw("concept", None)
    claimed = _claims(folder, tables, manifest)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title="Looped models: what settles, what can be read early, and how fast that decodes",
            concept=_image(concept.note, concept.get_size_inches(), save(concept, None, folder / "figures", "concept")),
            sections=sections,
            claims=claimed,
            reading=words.READING,
            few=intervals.FEW,
            dagger=intervals.DAGGER,
            # how long the run took is known only when this page is there: a redrawn page must not say more than the first
            manifest=_flat({k: v for k, v in manifest.items() if k not in ("seconds", "stages")}),
            asked=_asked(tables, manifest),
            files=[(k, len(t), list(map(str, t.columns))) for k, t in tables.items()],
            decoders=summaries.families(tables),
            command=manifest.get("command"),
            git=manifest.get("git"),
        )
    )
    return write_text(page, folder / "report.html")


def _claims(folder: Path, tables, manifest) -> dict[str, Any] | None:
    """The claims page: its figure and table in FOLDER/figures, there also as claims.md, and what the template shows of it."""
    found = claims.section(tables, manifest)
    if found is None:
        return None
    frame, shown = found
    figure = draw("claims", frame)
    claims.export(frame, folder / "figures" / "claims.md")
    return shown | {"image": _image(figure.note, figure.get_size_inches(), save(figure, frame, folder / "figures", "claims"))}


def _environment():
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("figures", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _entry(plate: Plate, made: Drawn, manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": plate.name,
        "kind": plate.kind,
        "main": plate.main,
        "image": _image(made.note, made.size, made.files),
        "caption": made.note.caption,
        "title": made.note.title,
        "commands": _commands(plate, manifest),
        "varies": plate.kind in ("bench", "dashboard", "factorial", "plan", "timing"),
        "table": None if plate.kind == "dashboard" else f"figures/{plate.name}.parquet" if plate.kind == "join"
        else f"tables/{plate.kind}.parquet",
    }


def _commands(plate: Plate, manifest: Mapping[str, Any]) -> list[str]:
    """The command lines that measure a figure's rows again: one for each task and start state in it."""
    command = (manifest.get("commands") or {}).get(plate.kind) or COMMANDS.get(plate.kind) or manifest.get("command")
    if not command or "{model}" not in command:
        return [command] if command else []
    source, frame = (manifest.get("sources") or {}).get(plate.model, plate.model), plate.frame
    out = []
    for task in style.order(frame["task"], style.TASKS) if "task" in frame else [""]:
        own = frame[frame["task"] == task] if "task" in frame else frame
        timed = style.decoders_in_order(own["decoder"]) if "decoder" in own else []
        decoders = " ".join(f"--decoder {shlex.quote(d)}" for d in timed if d != "AR")
        for start in style.order(own["start"], style.STARTS) if "start" in own else [""]:
            named = "zero" if start == "zero" else "keyed"  # a model that has no start state takes its own under either name
            out.append(command.format(model=shlex.quote(str(source)), task=shlex.quote(task), start=named, decoders=decoders).strip())
    return list(dict.fromkeys(out))


def _image(note: Note, inches: Sequence[float], files: Sequence[Path]) -> dict[str, str]:
    """The saved SVG (or, if that is heavy, the PNG) as a data address, with its alternative text and size."""
    kinds = {file.suffix: file for file in files}
    kind, data = "svg+xml", kinds[".svg"].read_bytes()
    if len(data) > _LARGE_SVG:
        kind, data = "png", kinds[".png"].read_bytes()
    width, height = (str(round(length * 100)) for length in inches)
    return {
        "source": f"data:image/{kind};base64,{base64.b64encode(data).decode()}",
        "alt": note.alt,
        "width": width,
        "height": height,
    }


def _section(model: str, parts: dict[str, Any], tables, findings, manifest) -> dict[str, Any]:
    own = {k: t[t["model"].astype(str) == model] for k, t in tables.items() if "model" in t.columns}
    own = {k: t for k, t in own.items() if len(t)}
    mine = [{"topic": "mature_v", "verdict": "", "task": "", **f} for f in findings if str(f.get("model", "")) == model]
    told = [f["sentence"] for f in mine if f["topic"] == "approximate"]
    mature, planned = [f for f in mine if f["topic"] == "mature_v"], summaries.plan_rows(own)
    return {
        "model": model,
        "id": slugs(models(tables))[model],
        "dashboard": parts["dashboard"],
        "groups": [(name, [(kind, parts["kinds"][kind]) for kind in kinds if kind in parts["kinds"]]) for name, kinds in GROUPS],
        "mature_v": mature,
        "mature_v_short": [f for f in mature if f.get("start") != "zero"] or mature,
        "follows": [f for f in mine if f["topic"] == "decoder"],
        "others": [f for f in mine if f["topic"] not in ("mature_v", "approximate", "decoder")],
        "again": {kind: (parts["kinds"].get(kind) or [{"commands": []}])[0]["commands"] for kind in AGAIN},
        "predictions": _predictions(model, manifest),
        "speeds": summaries.speeds(own),
        "advice": summaries.advice_rows(own),
        "fast": summaries.speed_sentences(own),
        "kept": summaries.kept_sentences(own),
        "settled": summaries.settled_sentences(own),
        "busy": summaries.busy_sentences(own),
        "equality": summaries.equality_sentences(own),
        "plan": [row for row in planned if row["measured"]],
        "untimed": [row for row in planned if not row["measured"]],
        "effects": summaries.effect_rows(own),
        "definitions": summaries.definitions(own),
        "approximate": [*told, *summaries.approximate(own), *(manifest.get("approximate") or ())],
    }


def _predictions(model: str, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was written down before a model was timed: task, time, (file, SHA-256) of each, and the folder of what it was made of."""
    out, told = [], manifest.get("predictions")
    for key, record in told.items() if isinstance(told, Mapping) else ():
        name, _, task = str(key).rpartition(", ")
        if name == model and isinstance(record, Mapping) and isinstance(record.get("files"), Mapping):
            files = [(str(file), str(sha)) for file, sha in record["files"].items()]
            held = manifest.get("planned_from")
            out.append({"task": task, "written": record.get("written", ""), "files": files,
                        "findings": str(held.get(key, "")) if isinstance(held, Mapping) else ""})
    return out


def _asked(tables, manifest) -> list[str]:
    """What the run set out to measure, read off its tables."""
    prompts: dict[str, int] = {}
    for table in tables.values():
        if {"task", "prompt"} <= set(table.columns):
            for task, n in table.groupby("task", observed=True)["prompt"].nunique().items():
                prompts[str(task)] = max(prompts.get(str(task), 0), int(n))
    depths = {
        m: int(t["depth"].max()) for k in ("depth_lens", "convergence") if k in tables for m, t in tables[k].groupby("model", observed=True)
    }
    lines = [f"Models: {', '.join(f'{m} ({depths[m]} recurrences per token)' if m in depths else m for m in models(tables))}."]
    if prompts:
        timed = tables["bench"].groupby("task", observed=True)["prompt"].nunique() if "bench" in tables else {}
        lines.append("Prompts: " + ", ".join(
            f"{prompts[task]} of {task or 'no named task'}" + (f" ({int(timed[task])} of them timed)" if task in timed else "")
            for task in style.order(prompts, style.TASKS)) + ".")
    starts = sorted({str(s) for t in tables.values() if "start" in t.columns for s in t["start"].unique()})
    if starts:
        lines.append(f"Start states: {', '.join(style.look(style.STARTS, s).label for s in starts)}.")
    if "bench" in tables:
        lines.append(f"Decoders timed against each other: {', '.join(style.decoders_in_order(tables['bench']['decoder']))}.")
    if manifest.get("seed") is not None:
        lines.append(f"Seed: {manifest['seed']}.")
    return lines


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The manifest as (name, value) lines, nested names joined by dots."""
    out = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append(
                (
                    f"{prefix}{key}",
                    ", ".join(map(str, value)) if isinstance(value, list | tuple) else "none" if value is None else str(value),
                )
            )
    return out
