"""What a decode returns: Generation, and what it counts.

Counts exclude prefill. `proposed` counts drafts that were compared with a target token; drafts rolled back unseen do
not count, and a block counts up to and including its first mismatch (docs/algorithms.md, 2.3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

class Calls(NamedTuple):
    """Block calls after prefill."""

    recur: int
    prelude: int
    readout: int


class Seconds(NamedTuple):
    prefill: float
    decode: float


class Run(NamedTuple):
    """Drafts accepted in a row, and whether a mismatch ended the run."""

    accepted: int
    rejected: bool


class Event(NamedTuple):
    """One thing that happened to one position. event: run, draft, accept, reject or commit; token: -1 where none."""

    tick: int
    position: int
    depth: int
    event: str
    token: int


LOSSLESS, APPROXIMATE, LOSSY = "lossless", "approximate", "lossy"


@dataclass(frozen=True, eq=False)
class Generation:
    """What one decode returned. `tokens` are the new tokens only, an EOS included.

    fidelity: "lossless" (the tokens of autoregressive decoding), "approximate" (K/V shared between depths) or "lossy"
    (recurrences left out).
    """

    decoder: str
    fidelity: str
    tokens: list[int]
    text: str | None
    calls: Calls
    rows: int
    proposed: int
    accepted: int
    runs: list[Run]
    seconds: Seconds
    trace: list[Event] = field(repr=False)  # long: one event per row and tick
    prompt_length: int
    depth: int

    @property
    def lossless(self) -> bool:
        return self.fidelity == LOSSLESS

    @property
    def alpha(self) -> float:
        """Accepted per proposed draft token; nan where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else float("nan")

    @property
    def accept_lengths(self) -> list[int]:
        """Drafts accepted per run: per block, or between two corrections of a wave."""
        return [run.accepted for run in self.runs]

    def acceptance_by_position(self) -> list[tuple[int, int, int]]:
        """(place in the run, runs that reached it, runs that accepted it), places counting from 1."""
        longest = max((run.accepted + run.rejected for run in self.runs), default=0)
        return [(i, sum(run.accepted + run.rejected >= i for run in self.runs), sum(run.accepted >= i for run in self.runs))
                for i in range(1, longest + 1)]

    def _repr_html_(self) -> str:
        """The text and what it cost, for Jupyter. What a model wrote is text, never markup."""
        from html import escape

        text = self.text if self.text is not None else " ".join(map(str, self.tokens))
        later = len(self.tokens) - 1
        facts = {"decoder": self.decoder, "fidelity": self.fidelity, "new tokens": len(self.tokens),
                 "block calls per token": f"{self.calls.recur / later:.2f} (plain decoding: {self.depth})" if later else "none",
                 "drafts accepted": f"{self.accepted} of {self.proposed}" if self.proposed else "none made",
                 "seconds": f"{self.seconds.prefill:.2f} prefill, {self.seconds.decode:.2f} decoding"}
        rows = "".join(f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
                       for name, value in facts.items())
        return f"<pre style='white-space:pre-wrap'>{escape(text)}</pre><table>{rows}</table>"

    def trace_frame(self, tokenizer=None) -> pd.DataFrame:
        """The trace, one row per event; `token` as text where a tokenizer is given."""
        import pandas as pd

        frame = pd.DataFrame(self.trace, columns=list(Event._fields))
        if tokenizer is not None:
            frame["token"] = [tokenizer.decode([t], skip_special_tokens=False) if t >= 0 else "" for t in frame["token"]]
        return frame


@dataclass(frozen=True, eq=False)
class BatchGeneration:
    """What a batched decode returned. `generations[i]` is what prompt i alone would have given, its own calls included.

    calls, rows: what was run for all of them together, prefill included. seconds: wall time of the whole.
    """

    generations: list[Generation]
    calls: Calls
    rows: int
    seconds: float

    def __len__(self) -> int:
        return len(self.generations)

    def __iter__(self):
        return iter(self.generations)

    def __getitem__(self, index: int) -> Generation:
        return self.generations[index]

    @classmethod
    def of(cls, generations: list[Generation], made: Counter, seconds: float) -> BatchGeneration:
        return cls(generations, Calls(made["recur"], made["prelude"], made["readout"]), made["rows"], seconds)
