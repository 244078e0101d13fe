"""Puts together what several processes measured of one run, and refuses what is not exactly that run.

Every prompt must be there once, from a process that measured the same prompts and settings with the same model and code. Anything else
would be an average over runs that nobody made.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import RunFolderError
from loopscope.records import SCHEMA_VERSION, read_table
from loopscope.shards import SHARDS, Share, differences, read_shards, share_of, shards_folder

if TYPE_CHECKING:
    import pandas as pd

ORDER = ("repeat", "prompt")  # rows in the order that one process measures them in
_PER_PROCESS = ("sittings",)  # facts of a table that may differ between the processes of a run


@dataclass(frozen=True)
class Merged:
    """A whole run: tables by name as (frame, facts), what was agreed on, and each process's manifest."""

    folder: Path
    tables: dict[str, tuple[pd.DataFrame, dict[str, Any]]]
    facts: dict[str, Any]
    manifests: list[dict[str, Any]]


def merge(folder: str | os.PathLike) -> Merged:
    """Read FOLDER, or FOLDER.shards, where several processes left their parts of a run.

    Raises RunFolderError where a process has not finished or its folder is gone, where one measured something else, and for a
    prompt that is missing or there twice, a table that is damaged, and a folder of another version.
    """
    folder = _find(Path(os.path.expanduser(folder)))
    run = read_shards(folder)
    world, facts = run["world"], run["facts"]
    _check_folders(folder, world)
    manifests = [_manifest(folder, Share(rank, world), facts) for rank in range(world)]
    _check_prompts(folder, manifests, facts)
    for manifest in manifests:
        if list(manifest["tables"]) != list(manifests[0]["tables"]) or not manifest["tables"]:
            raise RunFolderError(f"the parts of {folder} should all have the same tables; they have "
                                 f"{' and '.join(sorted({', '.join(map(str, m['tables'])) or 'none' for m in manifests}))}")
    tables = {name: _table(folder, name, manifests) for name in manifests[0]["tables"]}
    return Merged(folder, tables, facts, manifests)


def _find(folder: Path) -> Path:
    beside = shards_folder(folder)
    if not (folder / SHARDS).exists() and beside.is_dir():
        return beside
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is no folder; name the one that the processes of a run left, OUT.shards")
    return folder


def _check_folders(folder: Path, world: int) -> None:
    try:
        found = {entry.name: share for entry in sorted(folder.iterdir()) if (share := share_of(entry.name)) is not None}
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror or error}") from error
    other = [name for name, (share, _) in found.items() if share.world != world]
    if other:
        raise RunFolderError(f"{folder} is shared by {world} processes and also holds {', '.join(other)}, of a run that was shared "
                             "otherwise; remove what does not belong to it")
    ready = {share.rank for share, finished in found.values() if finished}
    begun = {share.rank for share, finished in found.values() if not finished} - ready
    if missing := [rank for rank in range(world) if rank not in ready]:
        said = ", ".join(f"{rank} ({'unfinished' if rank in begun else 'nothing'})" for rank in missing)
        raise RunFolderError(f"{folder} lacks {len(missing)} of {world} parts, those of process {said}. Run the same command again: it "
                             "goes on where they stopped, and leaves the others alone. Or run one alone: "
                             f"RANK={missing[0]} WORLD_SIZE={world} loopscope ...")


def _manifest(folder: Path, share: Share, facts: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / share.name / "manifest.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; remove {path.parent} and run the same command again") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA_VERSION:
        raise RunFolderError(f"{path} was not written by this version of loopscope (schema {SCHEMA_VERSION} expected)")
    part = found.get("shard")
    if not (isinstance(part, dict) and isinstance(part.get("facts"), dict) and _whole(part.get("prompts"))
            and isinstance(found.get("tables"), dict)):
        raise RunFolderError(f"{path} should say which prompts of a shared run are in {share.name}; it does not")
    if (part.get("rank"), part.get("world")) != (share.rank, share.world):
        raise RunFolderError(f"{path.parent} holds the part of process {part.get('rank')} of {part.get('world')}, not what its name says: "
                             "it was renamed or copied; remove it and run the same command again")
    if different := differences(facts, part["facts"]):
        raise RunFolderError(f"{path.parent} was measured otherwise than {folder} was begun: {different}; remove it and run the same "
                             "command again")
    return found


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)


def _check_prompts(folder: Path, manifests: list[dict[str, Any]], facts: Mapping[str, Any]) -> None:
    count = facts.get("prompts")
    if not isinstance(count, int) or count < 1:
        raise RunFolderError(f"{folder / SHARDS} should say how many prompts the run has; it does not")
    seen = Counter(prompt for manifest in manifests for prompt in manifest["shard"]["prompts"])
    twice = sorted(prompt for prompt, n in seen.items() if n > 1)
    strange = sorted(prompt for prompt in seen if not 0 <= prompt < count)
    missing = [prompt for prompt in range(count) if prompt not in seen]
    for prompts, wrong in ((twice, "more than once"), (strange, f"though the run has only {count}"), (missing, "not at all")):
        if prompts:
            raise RunFolderError(f"{folder} should hold each of {count} prompts once; it holds prompt {_some(prompts)} {wrong}")


def _table(folder: Path, name: str, manifests: list[dict[str, Any]]) -> tuple[pd.DataFrame, dict[str, Any]]:
    import pandas as pd

    frames, metas = [], []
    for rank, manifest in enumerate(manifests):
        path = folder / Share(rank, len(manifests)).name / "tables" / f"{name}.parquet"
        frame, meta = read_table(path)
        _check_rows(path, frame, manifest)
        frames.append(frame)
        metas.append({k: v for k, v in meta.items() if k not in _PER_PROCESS})
        if metas[-1] != metas[0]:
            raise RunFolderError(f"{path} was measured otherwise than the same table of another process: "
                                 f"{differences(metas[0], metas[-1])}; remove {path.parent.parent} and run the same command again")
    frame = pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)
    by = [column for column in ORDER if column in frame]
    return frame.sort_values(by, kind="stable", ignore_index=True), metas[0]


def _check_rows(path: Path, frame: pd.DataFrame, manifest: Mapping[str, Any]) -> None:
    """The rows that the manifest promises, of its own prompts, none twice."""
    again = f"remove {path.parent.parent} and run the same command again"
    if "prompt" not in frame:
        raise RunFolderError(f"{path} has no column 'prompt', so its rows cannot be counted; {again}")
    if len(frame) != manifest["tables"][path.stem]:
        raise RunFolderError(f"{path} should have {manifest['tables'][path.stem]} rows, as its manifest says, found {len(frame)}; {again}")
    foreign = sorted(set(frame["prompt"]) - set(manifest["shard"]["prompts"]))
    if foreign:
        raise RunFolderError(f"{path} holds prompt {_some(foreign)}, which its manifest leaves to another process; {again}")
    identity = [c for c in frame.columns if not str(frame[c].dtype).startswith("float")]
    twice = frame.loc[frame.duplicated(identity), "prompt"]
    if len(twice):
        raise RunFolderError(f"{path} holds rows of prompt {_some(sorted(set(twice)))} more than once; {again}")


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
