"""What decoders do on replayed texts, as a table: kept with the findings, so that a plan can be made again without the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from decoders.replay_counts import Outcome
from loopscope.errors import RunFolderError
from loopscope.records import Result

_PLAIN = ("recur", "prelude", "readout", "rows", "proposed", "accepted", "checks", "unread", "exact", "rows_exact", "note")
_NESTED = ("runs", "widths", "branched", "fresh", "embedded", "read")  # as JSON


@dataclass(frozen=True, eq=False)
class OutcomesResult(Result):
    """One row per text and decoder; the columns are those of decoders.replay_counts.Outcome, runs and calls by rows as JSON."""

    kind = "outcomes"
    columns = ("model", "task", "prompt", "decoder", *_PLAIN, *_NESTED)

    @classmethod
    def of(cls, outcomes: Mapping[tuple[int, str], Outcome], model: str, task: str) -> OutcomesResult:
        """outcomes: (text, label of the decoder) -> what it does there."""
        import pandas as pd

        rows = [(model, task, index, label, *(getattr(o, name) for name in _PLAIN), *(_text(getattr(o, name)) for name in _NESTED))
                for (index, label), o in outcomes.items()]
        return cls(pd.DataFrame(rows, columns=list(cls.columns)))

    def by_text(self) -> dict[tuple[int, str], Outcome]:
        """The outcomes again; which drafts were accepted is not kept. Raises RunFolderError for cells that hold something else."""
        out = {}
        for number, row in enumerate(self.frame.itertuples(index=False)):
            try:
                plain = {name: int(getattr(row, name)) for name in _PLAIN[:-1]}
                plain |= {name: bool(plain[name]) for name in ("exact", "rows_exact")}
                by_rows = {name: {int(w): int(n) for w, n in json.loads(getattr(row, name)).items()} for name in _NESTED[1:]}
                runs = [int(n) for n in json.loads(row.runs)]
                out[int(row.prompt), str(row.decoder)] = Outcome(**plain, note=str(row.note), runs=runs, accepts={}, **by_rows)
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                raise RunFolderError(f"row {number} of the outcomes table cannot be read, so it is damaged: {error}; take its name out "
                                     "of the manifest, or collect the findings again") from error
        return out


def _text(value: list | dict) -> str:
    return json.dumps(value if isinstance(value, list) else {str(k): v for k, v in value.items()})
