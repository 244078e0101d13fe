"""Runs of agreement: how many positions in a row a depth says what full depth says, between two where it does not.

The mean agreement says how long runs would be if positions failed independently of each other; failures come in clusters, and then runs
are longer, which is worth drafts to every decoder that drafts ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopscope.records import Result
from probes.candidates import SecondCandidateResult, candidate_rows, readings


@dataclass(frozen=True, eq=False)
class AgreementRunsResult(Result):
    """One row per prompt, depth, length that occurs, and whether the text's end cut those runs. runs: how many there are."""

    kind = "agreement_runs"
    columns = ("model", "task", "prompt", "start", "depth", "length", "cut", "runs")


@torch.inference_mode()
def agreement_runs(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                   start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> AgreementRunsResult:
    """Lengths of runs in which the top token of depth r = 1..T is that of T, read as the depth lens reads (probes.depth_lens).

    model: LoopedCore or LoopedModel. prompts: texts or token ids. A run lies between two positions that disagree, and may be empty;
    the last of a prompt is cut where the prompt ends, and is counted apart. Depth T agrees throughout: one cut run. Raises PromptError,
    DepthError, ContextError, NumericsError.
    """
    import pandas as pd

    meta, read = readings(model, prompts, 1, "agreement runs", task=task, model_name=model_name, depth=depth, start_state=start_state,
                          seed=seed, progress=progress)
    rows = [row for key, best in read for row in run_rows(key, best[..., 0])]
    return AgreementRunsResult(pd.DataFrame(rows, columns=list(AgreementRunsResult.columns)), meta)


@torch.inference_mode()
def candidates_and_runs(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                        start_state: str | Tensor | None = None, seed: int = 0,
                        progress: bool = True) -> tuple[SecondCandidateResult, AgreementRunsResult]:
    """What second_candidate and agreement_runs give, from one reading of each prompt instead of two. Errors as theirs."""
    import pandas as pd

    meta, read = readings(model, prompts, 2, "second candidate", task=task, model_name=model_name, depth=depth, start_state=start_state,
                          seed=seed, progress=progress)
    candidates: list[tuple] = []
    runs: list[tuple] = []
    for key, best in read:
        candidates += candidate_rows(key, best)
        runs += run_rows(key, best[..., 0])
    return (SecondCandidateResult(pd.DataFrame(candidates, columns=list(SecondCandidateResult.columns)), meta),
            AgreementRunsResult(pd.DataFrame(runs, columns=list(AgreementRunsResult.columns)), meta))


def run_rows(key: tuple, top: Tensor) -> list[tuple]:
    """The table's rows of one prompt. top [depth, n]: the top token of every depth; key: the columns before depth."""
    rows: list[tuple] = []
    for r, agrees in enumerate((top == top[-1]).tolist(), start=1):
        counted = Counter(run_lengths(agrees))
        rows += [(*key, r, length, cut, n) for (length, cut), n in sorted(counted.items())]
    return rows


def run_lengths(agrees: Sequence[bool]) -> list[tuple[int, bool]]:
    """(length, whether the end cut it) of every run; empty ones between two disagreements too, but none of no length at the end."""
    runs, run = [], 0
    for right in agrees:
        if right:
            run += 1
        else:
            runs.append((run, False))
            run = 0
    return [*runs, (run, True)] if run else runs
