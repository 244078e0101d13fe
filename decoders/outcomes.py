"""What decoders do on replayed texts, as a table: kept with the findings, so that a plan can be made again without the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from decoders.generation import Generation
from decoders.replay_counts import Outcome
from loopscope.records import Result

_PLAIN = ("recur", "prelude", "readout", "rows", "proposed", "accepted", "exact", "rows_exact", "note")
_NESTED = ("runs", "widths", "branched", "fresh")  # as JSON


@dataclass(frozen=True, eq=False)
class OutcomesResult(Result):
    """One row per text and decoder; the columns are those of decoders.replay_counts.Outcome, runs, widths, branched and fresh as JSON."""

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
        """The outcomes again; which drafts were accepted is not kept."""
        out = {}
        for row in self.frame.itertuples(index=False):
            plain = {name: getattr(row, name) for name in _PLAIN}
            plain = {k: v if isinstance(v, str) else bool(v) if k in ("exact", "rows_exact") else int(v) for k, v in plain.items()}
            by_rows = {name: {float(w) if "." in w else int(w): n for w, n in json.loads(getattr(row, name)).items()}
                       for name in _NESTED[1:]}
            out[int(row.prompt), str(row.decoder)] = Outcome(**plain, runs=json.loads(row.runs), accepts={}, **by_rows)
        return out


def _text(value: list | dict) -> str:
    return json.dumps(value if isinstance(value, list) else {str(k): v for k, v in value.items()})


def counted(generation: Generation) -> Outcome:
    """The outcome of a decode that was run: its own counts, rows per call by its trace; which drafts were accepted is not kept."""
    at_tick: dict[int, list[int]] = {}
    for event in generation.trace:
        if event.event == "run":
            at_tick.setdefault(event.tick, []).append(event.position)
    widths = Counter(len(positions) for positions in at_tick.values())
    branched = Counter(len(positions) for positions in at_tick.values() if len(set(positions)) < len(positions))
    fresh = Counter(len(positions) for tick, positions in at_tick.items() if positions != at_tick.get(tick - 1))
    if generation.decoder.startswith("DAS"):  # its rounds plan anew on the same rows too; a check is the T calls before a commit
        checks = {event.tick - generation.depth for event in generation.trace if event.event == "commit"}
        inside = {start + i for start in checks for i in range(2, generation.depth + 1)}
        fresh = Counter(len(positions) for tick, positions in at_tick.items() if tick not in inside)
    by_rows = {name: dict(sorted(counts.items())) for name, counts in (("widths", widths), ("branched", branched), ("fresh", fresh))}
    return Outcome(*generation.calls, generation.rows, generation.proposed, generation.accepted, generation.accept_lengths, {}, **by_rows)
