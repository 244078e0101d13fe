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

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopscope import fingerprint, journal
from loopscope.fingerprint import digest, machine, prompts_hash, weights_hash
from loopscope.journal import FACTS, GROUPS, LOCK

if TYPE_CHECKING:
    from decoders.decoder import Decoder

__all__ = ["FACTS", "GROUPS", "LOCK", "Group", "Journal", "code_hash", "facts_of", "prompts_hash", "weights_hash"]


@dataclass
class Group:
    """All decoders on one prompt, once. places, depths: acceptance, and tokens (of each decoder) in the first repeat only."""

    prompt: int
    repeat: int
    rows: list[Sequence[Any]] = field(default_factory=list)
    places: list[Sequence[Any]] = field(default_factory=list)
    depths: list[Sequence[Any]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)


class Journal(journal.Journal[Group]):
    """The folder of an unfinished benchmark; an entry is a Group. See loopscope.journal.Journal."""

    what = "benchmark"
    unit = "finished passes over a prompt"

    @staticmethod
    def read(line: bytes) -> Group:
        group = Group(**json.loads(line))
        tables = [group.rows, group.places, group.depths]
        if not (isinstance(group.prompt, int) and isinstance(group.repeat, int) and isinstance(group.tokens, dict)
                and all(isinstance(table, list) and all(isinstance(row, list) for row in table) for table in tables)):
            raise ValueError("not a group")
        return group

    @staticmethod
    def key(entry: Group) -> tuple[int, int]:
        return entry.prompt, entry.repeat


def facts_of(core, *, prompts: Sequence[Any], decoders: Sequence[Decoder], start_state, **settings: Any) -> dict[str, Any]:
    """Everything that rows depend on, in words a refusal can quote: the model, its prompts, decoders and settings, code and machine."""
    import torch

    start = digest(start_state) if isinstance(start_state, torch.Tensor) else start_state
    return {"family": core.family, "weights": weights_hash(core), "dtype": str(core.dtype), "device": core.device.type,
            "prompts": len(prompts), "prompt tokens": prompts_hash(core, prompts), "decoders": [_settings(d) for d in decoders],
            "start_state": start, **settings, "code": code_hash(), "torch": torch.__version__, "python": platform.python_version(),
            "machine": machine(), "threads": torch.get_num_threads()}


def _settings(decoder: Decoder) -> str:
    """A label, and after it what the label may leave out."""
    own = {name: value for name, value in vars(decoder).items() if isinstance(value, (bool, int, float, str)) and not name.startswith("_")}
    return f"{decoder.label} {json.dumps(own, sort_keys=True)}"


def code_hash() -> str:
    """Of the modules that a decode runs: a repaired decoder may count and time otherwise."""
    return fingerprint.code_hash("loopscope", "decoders")
