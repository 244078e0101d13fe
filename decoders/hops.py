"""The per-hop curve of carried refinement: how often the guess so many places behind the anchor is right after so many rounds.

A guess can become right only after the one before it, its input, is right: one hop. So the curve of hop i after j rounds is what the
frontier law (docs/algorithms.md, section 4) is about, measured: `chain` at (i, j) is the chance that a block of j rounds accepts i drafts
or more, and its sum over i is E[A].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from decoders.das_wave import DASWave
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    from decoders.carried import Refinements

ROUNDS, ANCHORS = 12, 8


@dataclass(frozen=True, eq=False)
class HopsResult(Result):
    """One row per prompt, hop (place of the guess behind the anchor, from 1) and round (from 1), averaged over the prompt's anchors.

    agreement: share of anchors whose guess there is the text's token; chain: whose guesses up to there all are. n_positions: anchors.
    """

    kind = "hops"
    columns = ("model", "task", "prompt", "start", "policy", "updates", "hop", "round", "agreement", "chain", "n_positions")


@torch.inference_mode()
def hops(refinements: Refinements, decoder: DASWave | None = None, *, anchors: int = ANCHORS, task: str = "", model_name: str = "",
         start: str = "") -> HopsResult:
    """Refine blocks from at most `anchors` places of every text, evenly spread, as `decoder` would (default: 12 rounds of one recurrence,
    or what its full depth allows), and compare every round's guesses with the text.

    Raises SettingError for a decoder that these refinements do not cover.
    """
    import pandas as pd

    decoder = decoder or DASWave(min(ROUNDS, refinements.rounds), 1)
    if decoder.rounds > refinements.rounds:
        raise SettingError(f"these refinements have at most {refinements.rounds} rounds, and {decoder.label} has {decoder.rounds}")
    rows: list[tuple] = []
    for index, text in enumerate(refinements.texts):
        last = len(text.tokens) - 1  # the last token is no input
        places = sorted({int(p) for p in torch.linspace(1, last, min(anchors, last), dtype=torch.float64).round()}) if last > 0 else []
        right: dict[tuple[int, int], list[tuple[bool, bool]]] = {}
        for at in places:
            history, truth = refinements.rounds_from(index, at, decoder), text.tokens[at:]
            for j, guesses in enumerate(history[: decoder.rounds], start=1):
                whole = True
                for i, (guess, token) in enumerate(zip(guesses, truth), start=1):
                    whole &= guess == token
                    right.setdefault((i, j), []).append((guess == token, whole))
        rows += [(model_name, task, index, start, decoder.read, decoder.updates, i, j, *_means(seen), len(seen))
                 for (i, j), seen in sorted(right.items())]
    facts: dict[str, Any] = {"decoder": decoder.label, "rounds": decoder.rounds, "anchors": anchors}
    return HopsResult(pd.DataFrame(rows, columns=list(HopsResult.columns)), facts)


def _means(seen: list[tuple[bool, bool]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(seen) for column in zip(*seen))
