"""Token grid: the top token that each position would give at each depth, with its text, for reading one prompt closely."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result
from loopscope.rows import Chain
from probes.distance import log_probabilities, ranks
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.recording import Recording


@dataclass(frozen=True, eq=False)
class TokenGridResult(Result):
    """One row per prompt, position and depth: not averaged, so for a few short prompts."""

    kind = "token_grid"
    columns = ("model", "task", "prompt", "start", "position", "token", "depth", "top", "top_text", "probability", "final_rank")


@torch.inference_mode()
def token_grid(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
               start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> TokenGridResult:
    """Top token of every position at every depth r = 1..T through the model's own readout, as in `probes.depth_lens`.

    token: text of the input at the position; top, top_text, probability: id, text and probability of the top token at
    this depth; final_rank: rank at this depth, from 1, of the token that is on top at depth T (of equal logits, the lower id
    first). Texts are token ids where the model has no tokenizer.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError.
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 1, "a prediction")
    name, start = name_of(core, model_name), start_label(core, start_state)

    def text(token: int) -> str:
        return str(token) if core.tokenizer is None else core.tokenizer.decode([token])

    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"token grid {name}", unit="prompt", disable=not progress)):
        recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        final, x = recorded.logits.argmax(-1), core.embed(core.as_tokens(ids))
        for r, state in enumerate(recorded.states(), start=1):
            logits = recorded.logits if r == depth else core.read(core.carrying(state[None], x), Chain(0, len(ids), r))[0]
            top = logits.argmax(-1)
            chances = log_probabilities(logits).gather(1, top[:, None])[:, 0].exp()
            rows += [(name, task, index, start, position, text(int(token)), r, int(best), text(int(best)), chance, rank)
                     for position, (token, best, chance, rank) in enumerate(zip(ids, top, chances.tolist(), ranks(logits, final).tolist()))]
    frame = pd.DataFrame(rows, columns=list(TokenGridResult.columns))
    return TokenGridResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens)})
