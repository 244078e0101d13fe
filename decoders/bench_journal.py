"""What a benchmark keeps while it runs, so that one that was killed goes on where it stopped.

    with Journal("runs/x.partial") as journal:
        result = bench(model, prompts, decoders, journal=journal)
        result.save("runs/x")
        journal.discard()

Every prompt and repeat is appended as one line and forced to the disk before the next one begins, so a kill costs at most the one
in hand. Rows of different runs may only be put together if nothing differs that could change them: a journal holds what it was
begun with (model, weights, settings, prompts, code, versions, machine), and goes on only with the same. One process writes at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import RunFolderError
from loopscope.records import manifest, write_text

if TYPE_CHECKING:
    from decoders.decoder import Decoder

FACTS, GROUPS, LOCK = "facts.json", "groups.jsonl", "lock"
_AFRESH = "run it as it was begun, choose another folder (--out), or start afresh and lose them (--fresh, Journal(..., fresh=True))"


@dataclass
class Group:
    """All decoders on one prompt, once. places, depths: acceptance, and tokens (of each decoder) in the first repeat only."""

    prompt: int
    repeat: int
    rows: list[Sequence[Any]] = field(default_factory=list)
    places: list[Sequence[Any]] = field(default_factory=list)
    depths: list[Sequence[Any]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)


class Journal:
    """The folder of an unfinished benchmark. fresh: throw away what an earlier run left there.

    `sittings` counts the runs that wrote it. Raises RunFolderError where the folder cannot be made, is in use by another run, holds
    something else, or is damaged before its last line.
    """

    def __init__(self, folder: str | os.PathLike, fresh: bool = False) -> None:
        self.folder, self.fresh = Path(os.path.abspath(os.path.expanduser(folder))), fresh
        self.groups: dict[tuple[int, int], Group] = {}
        self.sittings = 1
        self._lock: int | None = None
        self._file: int | None = None

    def __enter__(self) -> Journal:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            other = sorted(p.name for p in self.folder.iterdir() if p.name.removesuffix(".part") not in (FACTS, GROUPS, LOCK))
            if other:
                raise RunFolderError(f"{self.folder} should hold an unfinished benchmark, and holds {', '.join(other[:3])}; choose "
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
        facts = json.loads(json.dumps(facts))
        known = self._read_facts()
        if known is not None:
            found = self._read_groups()
            self._refuse_other(known["facts"], facts, len(found))
            self.groups, self.sittings = {(g.prompt, g.repeat): g for g in found}, known["sittings"] + 1
        else:
            self._remove(GROUPS)
        write_text(json.dumps({"facts": facts, "sittings": self.sittings}, indent=1) + "\n", self.folder / FACTS)
        self._file = os.open(self.folder / GROUPS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._sync_folder()

    def add(self, group: Group) -> None:
        """Append a group; it is on the disk when this returns. Raises RunFolderError, and then keeps all earlier ones."""
        if self._file is None:
            raise RunFolderError(f"{self.folder}: a journal must have begun before a group is added to it")
        line = (json.dumps(asdict(group), default=_plain) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise RunFolderError(f"{self.folder / GROUPS} could not be written: {error.strerror or error}; what was measured before is "
                                 "kept, and the same command goes on from there") from error
        self.groups[group.prompt, group.repeat] = group

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
        raise RunFolderError(f"{path} should say what an unfinished benchmark was begun with, and cannot be read; {_AFRESH}")

    def _read_groups(self) -> list[Group]:
        """The groups that are complete. What a kill left half written at the end is cut off."""
        path, found, good = self.folder / GROUPS, [], 0
        try:
            raw = path.read_bytes() if path.exists() else b""
            lines = raw.splitlines(keepends=True)
            for number, line in enumerate(lines, 1):
                try:
                    found.append(_group(line))
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
        different = [f"{name} was {_short(known.get(name))}, is {_short(facts.get(name))}" for name in dict.fromkeys((*known, *facts))
                     if known.get(name) != facts.get(name)]
        if different:
            raise RunFolderError(f"{self.folder} holds {groups} finished prompts of a benchmark that was begun otherwise: "
                                 f"{'; '.join(different)}. To go on, {_AFRESH}")

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


def _group(line: bytes) -> Group:
    if not line.endswith(b"\n"):
        raise ValueError("cut off")
    group = Group(**json.loads(line))
    tables = [group.rows, group.places, group.depths]
    if not (isinstance(group.prompt, int) and isinstance(group.repeat, int) and isinstance(group.tokens, dict)
            and all(isinstance(table, list) and all(isinstance(row, list) for row in table) for table in tables)):
        raise ValueError("not a group")
    return group


def _plain(value: Any) -> Any:
    """A tensor's or numpy's number as Python's."""
    return value.item()


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return "not said" if value is None else str(value)


# ---- what may not differ ----------------------------------------------------------------------------------------


def facts_of(core, *, prompts: Sequence[Any], decoders: Sequence[Decoder], start_state, **settings: Any) -> dict[str, Any]:
    """Everything that rows depend on, in words a refusal can quote: the model, its prompts, decoders and settings, code and machine."""
    import torch

    start = _hash(start_state) if isinstance(start_state, torch.Tensor) else start_state
    return {"family": core.family, "weights": weights_hash(core), "dtype": str(core.dtype), "device": str(core.device),
            "prompts": len(prompts), "prompt tokens": prompts_hash(core, prompts), "decoders": [_settings(d) for d in decoders],
            "start_state": start, **settings, "code": code_hash(), "torch": torch.__version__, "python": platform.python_version(),
            "machine": _machine(), "threads": torch.get_num_threads()}


@cache
def _machine() -> str:
    hardware = manifest()["hardware"]
    return f"{hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores"


def _settings(decoder: Decoder) -> str:
    """A label, and after it what the label may leave out."""
    own = {name: value for name, value in vars(decoder).items() if isinstance(value, (bool, int, float, str)) and not name.startswith("_")}
    return f"{decoder.label} {json.dumps(own, sort_keys=True)}"


def _hash(*parts: Any) -> str:
    """sha256 in hex, 16 digits, of bytes, texts and tensors."""
    import torch

    seen = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        part = part if isinstance(part, bytes) else str(part).encode()
        seen.update(f"{len(part)} ".encode() + part)
    return seen.hexdigest()[:16]


def weights_hash(core, most: int = 4096) -> str:
    """Of every tensor's name, shape, type and up to `most` evenly spread values: a sample, which any further training changes."""
    parts: list[Any] = []
    for name, tensor in sorted(core.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        parts += [f"{name} {list(tensor.shape)} {tensor.dtype}", flat[:: max(1, -(-len(flat) // most))]]
    return _hash(*parts)


def prompts_hash(core, prompts: Iterable[Any]) -> str:
    """Of the prompts' token ids."""
    return _hash(*(core.prompt_tokens(p).tolist() for p in prompts))


@cache
def code_hash() -> str:
    """Of the modules that a decode runs, as they are when this process first asks: a repaired decoder may count and time otherwise."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(f for room in ("loopscope", "decoders") for f in (root / room).rglob("*.py") if "cli" not in f.parts)
    return _hash(*(part for file in files for part in (str(file.relative_to(root)), file.read_bytes())))
