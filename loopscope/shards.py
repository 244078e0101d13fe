"""One run shared by several processes: which prompts are whose, and what all of them must agree on.

Prompt i of a run belongs to process i mod N. The processes never talk to each other: each measures its own prompts and keeps them in a
folder of its own, so one that dies costs the others nothing, and they may run at once (torchrun), as jobs of a cluster, or one after
the other. What they share is FOLDER/shards.json, the facts that the first of them began with; a process with other ones is refused
before it measures anything. `loopscope.merge` puts the folders together.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.errors import RunFolderError, SettingError

SHARDS = "shards.json"
SUFFIX = ".shards"
_NAME = re.compile(r"shard-(\d+)-of-(\d+)(\.partial)?")


@dataclass(frozen=True)
class Share:
    """The prompts of one process: those whose index is `rank` modulo `world`. Raises SettingError for numbers that mean nothing."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise SettingError(f"process {self.rank} of {self.world} does not exist: RANK must be 0 to WORLD_SIZE - 1")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Share:
        """What torchrun says in RANK and WORLD_SIZE; the whole run where it did not start this process. Raises SettingError."""
        known = os.environ if environment is None else environment
        given = [known.get(name) for name in ("RANK", "WORLD_SIZE")]
        if None in given:
            return cls()
        try:
            return cls(*(int(str(number)) for number in given))
        except ValueError:
            raise SettingError(f"RANK={given[0]!r} and WORLD_SIZE={given[1]!r} should be whole numbers, as torchrun sets them; unset both "
                               "to run in one process") from None

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index % self.world == self.rank

    def of(self, prompts: int) -> list[int]:
        """Its indices among so many prompts, in order; none where there are fewer prompts than processes."""
        return list(range(self.rank, prompts, self.world))

    @property
    def shared(self) -> bool:
        return self.world > 1

    @property
    def name(self) -> str:
        return f"shard-{self.rank}-of-{self.world}"


def shards_folder(out: str | os.PathLike) -> Path:
    """Where the processes of the run OUT keep their parts: OUT.shards beside it."""
    return Path(os.path.abspath(os.path.expanduser(f"{os.fspath(out).rstrip(os.sep)}{SUFFIX}")))


def share_of(name: str) -> tuple[Share, bool] | None:
    """(whose folder this is, whether it is finished), by a folder's name; None for other names."""
    found = _NAME.fullmatch(name)
    if found is None or not 0 <= int(found[1]) < int(found[2]):
        return None
    return Share(int(found[1]), int(found[2])), found[3] is None


def agree(folder: Path, share: Share, facts: Mapping[str, Any]) -> None:
    """Write FOLDER/shards.json, or compare with what another process wrote there. Raises RunFolderError, naming what differs."""
    mine = {"world": share.world, "facts": json.loads(json.dumps(facts))}
    path = folder / SHARDS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f"{SHARDS}.part-", dir=folder)
        try:
            os.fchmod(handle, 0o644)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(mine, indent=1) + "\n")
            os.link(part, path)  # unlike a rename, a link never replaces: exactly one process is the first
            return
        except FileExistsError:
            pass
        finally:
            os.unlink(part)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror or error}; choose another --out") from error
    theirs = read_shards(folder)
    if theirs["world"] != share.world:
        raise RunFolderError(f"{folder} holds a run that is shared by {theirs['world']} processes, not {share.world}: start it again with "
                             f"{theirs['world']}, choose another --out, or remove that folder")
    if different := differences(theirs["facts"], mine["facts"]):
        raise RunFolderError(f"process {share.rank} of {share.world} would not measure what {folder} was begun for: {different}. All "
                             "processes must run the same command on the same model, code and kind of machine; run it as it was begun, "
                             "choose another --out, or remove that folder")


def read_shards(folder: Path) -> dict[str, Any]:
    """{"world": processes, "facts": ...}. Raises RunFolderError where FOLDER is no shared run or its file is damaged."""
    path = folder / SHARDS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{folder} has no {SHARDS}, so it is not the folder of a run that several processes share") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    if not (isinstance(found, dict) and isinstance(found.get("facts"), dict) and isinstance(found.get("world"), int)
            and found["world"] >= 1):
        raise RunFolderError(f"{path} should say how many processes share a run and what they measure; it does not")
    return found


def differences(known: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """'seed was 0, is 1; ...' for what is not the same in both; '' where nothing differs."""
    return "; ".join(f"{name} was {_short(known.get(name))}, is {_short(facts.get(name))}" for name in dict.fromkeys((*known, *facts))
                     if known.get(name) != facts.get(name))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return "not said" if value is None else str(value)
