"""Second candidates: where a depth's top token is wrong, how often its runner-up is the one that full depth will say.

This is what a second proposal (LoopSpec, arXiv 2609.17184) lives on when both come from one readout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result
from loopscope.rows import Chain
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.recording import Recording


@dataclass(frozen=True, eq=False)
class SecondCandidateResult(Result):
    """One row per prompt and depth. first, second: shares of positions whose full-depth token is this depth's top token, its runner-up."""

    kind = "second_candidate"
    columns = ("model", "task", "prompt", "start", "depth", "first", "second", "n_positions")


@torch.inference_mode()
def second_candidate(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
                     start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> SecondCandidateResult:
    """Rank of the full-depth token among the two best of each depth r = 1..T, read as the depth lens reads (probes.depth_lens).

    model: LoopedCore or LoopedModel. prompts: texts or token ids. second / (1 - first) is the hit rate: of the positions where the top
    token is wrong, the share that a second proposal would save. Raises PromptError, DepthError, ContextError, NumericsError. Source:
    algorithms.md 2.4.
    """
    import pandas as pd

    meta, read = readings(model, prompts, 2, "second candidate", task=task, model_name=model_name, depth=depth, start_state=start_state,
                          seed=seed, progress=progress)
    rows = [row for key, best in read for row in candidate_rows(key, best)]
    return SecondCandidateResult(pd.DataFrame(rows, columns=list(SecondCandidateResult.columns)), meta)


def candidate_rows(key: tuple, best: Tensor) -> list[tuple]:
    """The table's rows of one prompt. best [depth, n, 2 or more]: top_tokens; key: the columns before depth."""
    hits = (best[..., :2] == best[-1, :, :1]).double().mean(1)  # [depth, 2]
    return [(*key, r, *shares, best.shape[1]) for r, shares in enumerate(hits.tolist(), start=1)]


def readings(model: Any, prompts: Iterable[Any], count: int, what: str, *, task: str, model_name: str | None, depth: int | None,
             start_state: str | Tensor | None, seed: int, progress: bool) -> tuple[dict[str, Any], Iterator[tuple[tuple, Tensor]]]:
    """(meta of the table, an iterator over prompts): the columns model, task, prompt and start, and its `top_tokens`, read when asked for.

    what: the probe's name on the progress bar. Raises what the probes say they raise.
    """
    core = core_of(model)
    full = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a reading at each depth")
    name, start = name_of(core, model_name), start_label(core, start_state)

    def read() -> Iterator[tuple[tuple, Tensor]]:
        for index, ids in enumerate(tqdm(tokens, desc=f"{what} {name}", unit="prompt", disable=not progress)):
            yield (name, task, index, start), top_tokens(core, ids, count, depth=full, start_state=start_state, seed=seed)

    return {"depth": full, "seed": seed, "prompts": len(tokens)}, read()


def top_tokens(core: Any, ids: Tensor, count: int, *, depth: int, start_state: str | Tensor | None, seed: int) -> Tensor:
    """ids [n] -> the `count` best tokens of every depth and position, best first: [depth, n, count]; the top one as argmax gives it."""
    recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
    check_finite(recorded.logits, "a full-depth pass")
    x, best = core.embed(core.as_tokens(ids)), []
    for r, state in enumerate(recorded.states(), start=1):
        logits = recorded.logits if r == depth else core.read(core.carrying(state[None], x), Chain(0, len(ids), r))[0]
        first = logits.argmax(-1, keepdim=True)
        rest = logits.scatter(-1, first, float("-inf")).topk(count - 1, -1).indices if count > 1 else first[:, :0]
        best.append(torch.cat((first, rest), -1))
    return torch.stack(best)
