"""What a command does that several processes share: each keeps its own part of the run in OUT.shards."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.folder import refuse_existing, run_folder
from loopscope.errors import SettingError
from loopscope.journal import Journal
from loopscope.shards import Share, agree, shards_folder

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore
    from loopscope.records import Result


class AlreadyThere(Exception):
    """This process's part of the run is complete."""


@dataclass(frozen=True)
class Part:
    """Where one process of a shared run keeps what it measures. Raises SettingError without an OUT, RunFolderError where OUT exists."""

    share: Share
    folder: Path

    @classmethod
    def of_this_process(cls, out: str | None) -> Part | None:
        """None where this process does the whole run."""
        share = Share.from_environment()
        if not share.shared:
            return None
        if out is None:
            raise SettingError(f"this is process {share.rank} of {share.world} of a shared run, which must keep its part somewhere; "
                               "add --out DIR")
        refuse_existing(out)
        return cls(share, shards_folder(out))

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.share.name}.partial"

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse facts that other processes began otherwise. Raises AlreadyThere where nothing is left to do."""
        agree(self.folder, self.share, facts)
        if (self.folder / self.share.name).exists():
            raise AlreadyThere

    def save(self, results: Iterable[Result], journal: Journal, count: int, **facts: Any) -> None:
        """The tables of this part of `count` prompts, under its name once they are complete; says how to put all parts together."""
        from loopscope.records import manifest, write_text

        with run_folder(self.folder / self.share.name) as part:
            for result in results:
                result.save(part / "tables")
            tables = {file.stem: _rows(file) for file in sorted((part / "tables").glob("*.parquet"))}
            shard = {"rank": self.share.rank, "world": self.share.world, "prompts": self.share.of(count), "facts": journal.facts,
                     "sittings": journal.sittings}
            write_text(json.dumps(manifest(shard=shard, tables=tables, **facts), indent=1, default=str) + "\n", part / "manifest.json")
        self.say_done()

    def say_done(self) -> None:
        print(f"process {self.share.rank} of {self.share.world} is done. When all are: loopscope merge {self.folder}", file=sys.stderr)


def _rows(path: Path) -> int:
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows


# ---- studies ----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What one instrument measured on one prompt: table -> rows."""

    prompt: int
    step: str
    tables: dict[str, list[Sequence[Any]]]


class StudyJournal(Journal[Measured]):
    """The folder of an unfinished study; an entry is Measured."""

    what = "study"
    unit = "finished measurements of a prompt"

    @staticmethod
    def read(line: bytes) -> Measured:
        found = Measured(**json.loads(line))
        if not (isinstance(found.prompt, int) and isinstance(found.step, str) and isinstance(found.tables, dict)
                and all(isinstance(rows, list) and all(isinstance(row, list) for row in rows) for rows in found.tables.values())):
            raise ValueError("not what was measured on a prompt")
        return found

    @staticmethod
    def key(entry: Measured) -> tuple[int, str]:
        return entry.prompt, entry.step

    def run(self, instrument: Callable[..., Result], core: LoopedCore, prompts: list, share: Share, **options: Any) -> Result:
        """The instrument's result over this share of the prompts; those that the journal holds already are not measured again."""
        step = instrument.__name__
        left = [i for i in share.of(len(prompts)) if (i, step) not in self.groups]
        measured = instrument(core, prompts, only=left, each=lambda i, tables: self.add(Measured(i, step, dict(tables))), **options)
        held = [entry for (_, name), entry in sorted(self.groups.items()) if name == step]
        return _with_rows(measured, held)


def _with_rows(result: Result, held: list[Measured]) -> Result:
    """The result with all rows that are held, and so for the further tables that it carries."""
    import pandas as pd

    from loopscope.records import Result

    further = {f.name: _with_rows(value, held) for f in fields(result) if isinstance(value := getattr(result, f.name), Result)}
    rows = [row for entry in held for row in entry.tables.get(result.kind, [])]
    return replace(result, frame=pd.DataFrame(rows, columns=list(result.columns)), **further)


@contextmanager
def shared_study(part: Part, core: LoopedCore, prompts: list, **settings: Any) -> Iterator[StudyJournal]:
    """A journal for this process's part, which has begun. Raises AlreadyThere, RunFolderError; Ctrl-C says what is kept."""
    with StudyJournal(part.journal, agree=part.agree) as journal:
        journal.begin(_facts(core, prompts, settings))
        try:
            yield journal
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; {len(journal.groups)} {journal.unit} are kept in {journal.folder}: the same command "
                                    "goes on from there") from None
        journal.discard()


def _facts(core: LoopedCore, prompts: list, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the values of a study depend on. Not the machine: no time is measured."""
    import platform

    import torch

    from loopscope.fingerprint import code_hash, prompts_hash, weights_hash

    return {"family": core.family, "weights": weights_hash(core), "dtype": str(core.dtype), "device": core.device.type,
            "prompts": len(prompts), "prompt tokens": prompts_hash(core, prompts), **settings,
            "code": code_hash("loopscope", "probes", "interventions", "decoders"), "torch": torch.__version__,
            "python": platform.python_version()}


def only_alone(command: str) -> None:
    """Raises SettingError where torchrun started this command as one of several processes: they would all do the same."""
    share = Share.from_environment()
    if share.shared:
        raise SettingError(f"loopscope {command} runs in one process, and this is process {share.rank} of {share.world}; start it without "
                           "torchrun (unset RANK and WORLD_SIZE). bench, probe and intervene can be shared"
                           + ("; verify has --workers" if command == "verify" else ""))


def local_device(device: str) -> str:
    """'cuda' as the card of this process, where torchrun started one process per card."""
    rank = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{rank}" if device == "cuda" and rank.isdigit() else device
