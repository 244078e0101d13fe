"""`loopscope figures`: a run's figures and report again, from its tables and manifest. A run that cannot be drawn stays as it is.

A folder that another command saved has figures and no report, and is given none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopscope.cli.folder import run_folder
from loopscope.errors import RunFolderError

_WORDS = ("model", "topic", "task", "start", "verdict")  # of a finding, beside its sentence


def redraw(folder: str, out: str | None, published: bool = False) -> str:
    """Figures and report.html again; returns a line that says where.

    In place, everything is drawn beside the old figures first, and the tables and the manifest are not written. published: with
    the papers' values over the figures that can carry them. Raises RunFolderError, which names the file, for a folder that does not
    hold what `loopscope report` writes.
    """
    from figures.drawing import cores
    from figures.gallery import in_order
    from figures.redraw import drawing, read_tables, staged
    from figures.report import write_report
    from loopscope.cli.report import commands, finish
    from loopscope.cli.study import draw

    source = Path(folder)
    tables = in_order(read_tables(source))
    facts, findings = _read_manifest(source / "manifest.json")
    if findings is None and not (source / "report.html").exists():
        return _redraw_study(source, out, lambda part: draw(tables, part, published))
    if isinstance(facts.get("size"), dict) and {"seed", "threads"} <= set(facts):  # a run made before its manifest held the commands
        facts = facts | {"commands": facts.get("commands") or commands(facts)}
    if out is None:
        with staged(source) as part, drawing(source):
            write_report(part, tables, facts, findings or [], published, cores())
        return f"report: {source / 'report.html'}"
    with run_folder(out) as part, drawing(source):
        finish(part, tables, facts, findings or [], published=published)
        _copy(source, part, "predictions", "findings")
    return f"report: {Path(out) / 'report.html'}"


def _redraw_study(source: Path, out: str | None, draw: Callable[[Path], None]) -> str:
    """The figures of a folder that `loopscope probe`, `bench` or another command saved."""
    from figures.redraw import drawing, staged

    if out is None:
        with staged(source) as part, drawing(source):
            draw(part)
        return f"figures: {source / 'figures'}"
    with run_folder(out) as part, drawing(source):
        draw(part)
        _copy(source, part, "tables", "manifest.json")
    return f"figures: {Path(out) / 'figures'}"


def _copy(source: Path, part: Path, *names: str) -> None:
    """What no drawing changes. Raises RunFolderError."""
    try:
        for name in names:
            if (source / name).is_dir():
                shutil.copytree(source / name, part / name)
            elif (source / name).exists():
                shutil.copyfile(source / name, part / name)
    except (OSError, shutil.Error) as error:
        raise RunFolderError(f"{source} cannot be copied: {error}") from error


def _read_manifest(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """(facts, findings), with everything that a report reads from them of the right type. None: there is no word of findings."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; give a folder that `loopscope report` made") from error
    _check(isinstance(facts, dict), path, "a JSON object", facts)
    findings = facts.pop("findings", None)
    _check(findings is None or isinstance(findings, list), path, "a list of findings", findings)
    for finding in findings or ():
        good = isinstance(finding, dict) and isinstance(finding.get("sentence"), str)
        good = good and all(finding.get(word) is None or isinstance(finding[word], str) for word in _WORDS)
        _check(good, path, "findings that have a text 'sentence'", finding)
    told, command = facts.get("approximate"), facts.get("command")
    _check(command is None or isinstance(command, str), path, "a text as command", command)
    for name, by in (("commands", "table"), ("sources", "model")):
        named = facts.get(name)
        _check(named is None or isinstance(named, Mapping) and _texts(named.values()), path, f"{name} by {by} name", named)
    _check(told is None or isinstance(told, list) and _texts(told), path, "a list of sentences as approximate", told)
    return facts, findings


def _texts(values) -> bool:
    return all(isinstance(value, str) for value in values)


def _check(good: bool, path: Path, wanted: str, found: Any) -> None:
    if not good:
        raise RunFolderError(f"{path} should hold {wanted}, found {type(found).__name__} {str(found)[:60]}")
