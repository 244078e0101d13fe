"""Depth lens: what the model would say if it stopped at each depth, read through its own coda and head."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.records import Result, read_table
from loopscope.rows import Chain
from probes.distance import entropy_nats, kl_nats, log_probabilities
from probes.inputs import check_finite, chosen, core_of, name_of, read_prompts, start_label
from probes.recording import Recording


@dataclass(frozen=True, eq=False)
class SettleResult(Result):
    """How many positions of a prompt settle at each depth: the first depth from which on the top-1 never changes."""

    kind = "settle"
    columns = ("model", "task", "prompt", "start", "settle_depth", "positions")


@dataclass(frozen=True, eq=False)
class DepthLensResult(Result):
    """One row per prompt and depth, averaged over positions; `settle` is the second table, saved beside it."""

    settle: SettleResult | None = None
    kind = "depth_lens"
    columns = ("model", "task", "prompt", "start", "depth", "agreement", "kl_nats", "entropy_nats", "margin_logits",
               "loss_nats", "n_positions")

    def save(self, folder: str | os.PathLike) -> Path:
        """Write FOLDER/depth_lens.parquet and, if there is one, FOLDER/settle.parquet."""
        if self.settle is not None:
            self.settle.save(folder)
        return super().save(folder)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> DepthLensResult:
        """Read what `save` wrote. Raises RunFolderError for a missing, broken or foreign table."""
        frame, meta = read_table(Path(folder) / f"{cls.kind}.parquet")
        has_settle = (Path(folder) / f"{SettleResult.kind}.parquet").exists()
        return cls(frame, meta, SettleResult.load(folder) if has_settle else None)


@torch.inference_mode()
def depth_lens(model: Any, prompts: Iterable[Any], *, task: str = "", model_name: str | None = None, depth: int | None = None,
               start_state: str | Tensor | None = None, seed: int = 0, only: Container[int] | None = None,
               each: Callable[[int, Mapping[str, list]], None] | None = None, progress: bool = True) -> DepthLensResult:
    """Logits at each depth r = 1..T through the model's own readout, compared with those at T.

    model: LoopedCore or LoopedModel. prompts: texts or token ids, at least 2 tokens each. Columns: top-1 agreement
    with depth T, KL(depth T || depth r), entropy, top1 - top2 margin in logits, and the next-token loss on the text
    itself (over one position less). `.settle` counts positions by settle depth.

    This is the classical lens: the whole sequence is read out at depth r. Where the coda has attention (Huginn) a row
    therefore attends to coda keys and values of depth r, while a decoder keeps those of verified positions at full
    depth. For what a decoder's draft would see use interventions.prefix_channels.

    only, each: as in convergence.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: algorithms.md 3 (Depth lens).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_prompts(core, prompts, 2, "a next-token loss")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    settled: list[tuple] = []
    for index in tqdm(chosen(tokens, only), desc=f"depth lens {name}", unit="prompt", disable=not progress):
        ids, found = tokens[index], []
        recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
        full = recorded.logits
        check_finite(full, "a full-depth pass")
        log_full = log_probabilities(full)
        top, x = [], core.embed(core.as_tokens(ids))
        for r, state in enumerate(recorded.states(), start=1):
            logits = full if r == depth else core.read(core.carrying(state[None], x), Chain(0, len(ids), r))[0]
            found.append((name, task, index, start, r, *_measure(logits, log_full, ids), len(ids)))
            top.append(logits.argmax(-1))
        counts = torch.bincount(settle_depths(torch.stack(top)), minlength=depth + 1)[1:].tolist()
        counted = [(name, task, index, start, r, count) for r, count in enumerate(counts, start=1)]
        rows, settled = rows + found, settled + counted
        if each is not None:
            each(index, {DepthLensResult.kind: found, SettleResult.kind: counted})
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens)}
    settle = SettleResult(pd.DataFrame(settled, columns=list(SettleResult.columns)), meta)
    return DepthLensResult(pd.DataFrame(rows, columns=list(DepthLensResult.columns)), meta, settle)


def _measure(logits: Tensor, log_full: Tensor, ids: Tensor) -> tuple[float, ...]:
    """(agreement, KL, entropy, margin, loss) of logits [n, vocab] against full-depth log-probabilities, means over positions."""
    log_p = log_probabilities(logits)
    best = log_p.topk(2, dim=-1).values  # a margin in log-probabilities is one in logits: the normaliser cancels
    loss = -log_p[:-1].gather(1, ids[1:, None])
    measured = ((log_p.argmax(-1) == log_full.argmax(-1)).double(), kl_nats(log_full, log_p), entropy_nats(log_p),
                best[:, 0] - best[:, 1], loss)
    return tuple(float(m.double().mean()) for m in measured)


def settle_depths(top: Tensor) -> Tensor:
    """top [depth, n] (top-1 token at each depth) -> [n]: the first depth from which on it equals the last one for good."""
    wrong = top != top[-1]
    last_wrong = torch.arange(1, len(top) + 1, device=top.device)[:, None] * wrong
    return last_wrong.amax(0) + 1
