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
from tqdm.auto import tqdm

from loopscope.records import Result
from probes.candidates import SecondCandidateResult, candidate_rows, top_tokens
from probes.inputs import core_of, name_of, read_prompts, start_label


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

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a reading at each depth")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"agreement runs {name}", unit="prompt", disable=not progress)):
        top = top_tokens(core, ids, 1, depth=depth, start_state=start_state, seed=seed)[..., 0]
        rows += run_rows((name, task, index, start), top)
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens)}
    return AgreementRunsResult(pd.DataFrame(rows, columns=list(AgreementRunsResult.columns)), meta)


@torch.inference_mode()
def candidates_and_runs(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                        start_state: str | Tensor | None = None, seed: int = 0,
                        progress: bool = True) -> tuple[SecondCandidateResult, AgreementRunsResult]:
    """What second_candidate and agreement_runs give, from one reading of each prompt instead of two. Errors as theirs."""
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a reading at each depth")
    name, start = name_of(core, model_name), start_label(core, start_state)
    candidates: list[tuple] = []
    runs: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"second candidate {name}", unit="prompt", disable=not progress)):
        best = top_tokens(core, ids, 2, depth=depth, start_state=start_state, seed=seed)
        candidates += candidate_rows((name, task, index, start), best)
        runs += run_rows((name, task, index, start), best[..., 0])
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens)}
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
