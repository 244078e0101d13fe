"""What a long run keeps while it runs, so that one that was killed goes on where it stopped.

    with Journal("runs/x.partial") as journal:
        journal.begin(facts)
        ...
        journal.add(entry)
        journal.discard()

Every entry is appended as one line and forced to the disk before the next one begins, so a kill costs at most the one in hand.
Entries of different runs may only be put together if nothing differs that could change them: a journal holds the facts it was
begun with, and goes on only with the same. One process writes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from loopscope.errors import RunFolderError
from loopscope.records import write_text
from loopscope.shards import differences

FACTS, GROUPS, LOCK = "facts.json", "groups.jsonl", "lock"
_AFRESH = "run it as it was begun, choose another folder (--out), or start afresh and lose them (--fresh, Journal(..., fresh=True))"
Entry = TypeVar("Entry")


class Journal(Generic[Entry]):
    """The folder of an unfinished run. Subclasses say what an entry is: `what`, `unit`, `read` and `key`; entries are dataclasses.

    fresh: throw away what an earlier run left there. agree: called with the facts before anything is written; it may refuse them.
    `groups`: what was measured, by key. `sittings` counts the runs that wrote it. Raises RunFolderError where the folder cannot be
    made, is in use by another run, holds something else, or is damaged before its last line.
    """

    what: ClassVar[str] = "run"
    unit: ClassVar[str] = "finished prompts"

    @staticmethod
    def read(line: bytes) -> Any:
        """The entry of one line. Raises ValueError or TypeError for anything else."""
        raise NotImplementedError

    @staticmethod
    def key(entry: Any) -> Hashable:
        """What tells entries apart."""
        raise NotImplementedError

    def __init__(self, folder: str | os.PathLike, fresh: bool = False, agree: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.folder, self.fresh, self.agree = Path(os.path.abspath(os.path.expanduser(folder))), fresh, agree
        self.groups: dict[Any, Entry] = {}
        self.facts: dict[str, Any] = {}
        self.sittings = 1
        self._lock: int | None = None
        self._file: int | None = None

    def __enter__(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            other = sorted(p.name for p in self.folder.iterdir() if p.name.removesuffix(".part") not in (FACTS, GROUPS, LOCK))
            if other:
                raise RunFolderError(f"{self.folder} should hold an unfinished {self.what}, and holds {', '.join(other[:3])}; choose "
                                     "another --out")
            self._take_lock()
            if self.fresh:
                self._remove(FACTS, GROUPS)
        except OSError as error:
            self.close()
            raise RunFolderError(f"{self.folder} cannot be made or locked: {error.strerror or error}; choose another --out") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error) -> None:
        kept = self.folder / GROUPS
        if self._lock is not None and not (kept.exists() and kept.stat().st_size):
            self.discard()  # nothing was measured: nothing to go on from
        self.close()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Read what was measured with the same facts. Raises RunFolderError where any differs, naming it."""
        facts = self.facts = json.loads(json.dumps(facts))
        if self.agree is not None:
            self.agree(facts)
        known = self._read_facts()
        if known is not None:
            found = self._read_groups()
            self._refuse_other(known["facts"], facts, len(found))
            self.groups, self.sittings = {self.key(entry): entry for entry in found}, known["sittings"] + 1
        else:
            self._remove(GROUPS)
        write_text(json.dumps({"facts": facts, "sittings": self.sittings}, indent=1) + "\n", self.folder / FACTS)
        self._file = os.open(self.folder / GROUPS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._sync_folder()

    def add(self, group: Entry) -> None:
        """Append an entry; it is on the disk when this returns. Raises RunFolderError, and then keeps all earlier ones."""
        if self._file is None:
            raise RunFolderError(f"{self.folder}: a journal must have begun before anything is added to it")
        line = (json.dumps(asdict(group), default=_plain) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise RunFolderError(f"{self.folder / GROUPS} could not be written: {error.strerror or error}; what was measured before is "
                                 "kept, and the same command goes on from there") from error
        self.groups[self.key(group)] = group

    def discard(self) -> None:
        """Remove the journal: its rows are saved elsewhere."""
        with contextlib.suppress(OSError):
            self._remove(GROUPS, FACTS, LOCK)
            self.folder.rmdir()

    def close(self) -> None:
        """Let others write."""
        for handle in (self._file, self._lock):
            if handle is not None:
                os.close(handle)
        self._file = self._lock = None

    # ---- files --------------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        import fcntl

        path = self.folder / LOCK
        while True:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
                raise RunFolderError(f"{self.folder} is in use by another run ({owner or 'just begun'}); wait for it, or choose another "
                                     "--out") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), os.stat(path)):
                    break
            os.close(self._lock)  # a run that ended meanwhile took the file away
            self._lock = None
            self.folder.mkdir(parents=True, exist_ok=True)
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"process {os.getpid()} on {platform.node()}\n".encode())

    def _read_facts(self) -> dict[str, Any] | None:
        path = self.folder / FACTS
        if not path.exists():
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(known["facts"], dict) and isinstance(known["sittings"], int):
                return known
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise RunFolderError(f"{path} should say what an unfinished {self.what} was begun with, and cannot be read; {_AFRESH}")

    def _read_groups(self) -> list[Entry]:
        """The entries that are complete. What a kill left half written at the end is cut off."""
        path, found, good = self.folder / GROUPS, [], 0
        try:
            raw = path.read_bytes() if path.exists() else b""
            lines = raw.splitlines(keepends=True)
            for number, line in enumerate(lines, 1):
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("cut off")
                    found.append(self.read(line))
                except (ValueError, TypeError, RecursionError):
                    if number < len(lines):
                        raise RunFolderError(f"{path}, line {number} is damaged: expected what was measured on one prompt, found "
                                             f"{line[:40]!r}; {_AFRESH}") from None
                    os.truncate(path, good)
                    break
                good += len(line)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
        return found

    def _refuse_other(self, known: Mapping[str, Any], facts: Mapping[str, Any], groups: int) -> None:
        different = differences(known, facts)
        if different:
            raise RunFolderError(f"{self.folder} holds {groups} {self.unit} of a {self.what} that was begun otherwise: "
                                 f"{different}. To go on, {_AFRESH}")

    def _remove(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            (self.folder / f"{name}.part").unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _plain(value: Any) -> Any:
    """A tensor's or numpy's number as Python's."""
    return value.item()
