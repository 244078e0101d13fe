"""Block lens: the rank of the final token after every block of the unrolled core, one block application after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.hook_names import STATE, block_prefix
from loopscope.records import Result
from loopscope.rows import Chain
from loopscope.tap import RecordingTap
from probes.distance import log_probabilities, ranks
from probes.inputs import check_finite, check_names, core_of, name_of, read_prompts, start_label

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

LENSES = ("coda", "logit")
_POST = "hook_resid_post"


@dataclass(frozen=True, eq=False)
class BlockLensResult(Result):
    """One row per prompt, lens and block of the unrolled core; averaged over positions."""

    kind = "block_lens"
    columns = ("model", "task", "prompt", "start", "lens", "depth", "cycle", "layer", "block", "rank", "probability", "agreement",
               "n_positions")


@torch.inference_mode()
def block_lens(model: Any, prompts: Iterable[Any], *, lenses: Iterable[str] = LENSES, task: str = "", model_name: str | None = None,
               depth: int | None = None, start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> BlockLensResult:
    """Rank and probability of the full-depth top token, read after every core block of every recurrence.

    model: LoopedCore or LoopedModel. prompts: texts or token ids. What block l of recurrence r leaves is treated as if it
    were the state: it goes through the norm that closes a loop, where there is one, and is then read by a lens:
      coda   the model's own readout: coda, final norm, head. Read from it, a recurrence's last block is `probes.depth_lens`
      logit  the same without the coda's blocks. A model that has none gives the rows of "coda" only
    rank: from 1 (of equal logits, the lower id first), a geometric mean over positions; agreement: share of positions at
    rank 1. block counts block applications from 1; cycle: inner cycle of HRM-Text's fast stack, 0 for the core itself.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source of the two lenses and of following
    the rank: Lu et al. 2025 (Latent Chain-of-Thought? Decoding the Depth-Recurrent Transformer, arXiv 2507.02199).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    lenses = check_names(lenses, LENSES, "lens")
    if not len(core.coda):
        lenses = ("coda",)  # the two are one
    tokens = read_prompts(core, prompts, 1, "a prediction")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"block lens {name}", unit="prompt", disable=not progress)):
        wanted = [block_prefix("blocks", layer, r, cycle) + _POST for r, cycle, layer in unrolled_blocks(core, depth)]
        tap = RecordingTap({*wanted, f"depth.{depth}.{STATE}"})
        logits = core(ids, depth, start_state=start_state, seed=seed, tap=tap)[0]
        check_finite(logits, "a full-depth pass")
        final, x = logits.argmax(-1), core.embed(core.as_tokens(ids))
        for block, ((r, cycle, layer), hook) in enumerate(zip(unrolled_blocks(core, depth), wanted), start=1):
            for lens in lenses:
                read = read_block(core, tap[hook], x, r, lens)[0]
                found = ranks(read, final)
                chance = log_probabilities(read).gather(1, final[:, None]).exp()
                rows.append((name, task, index, start, lens, r, cycle, layer, block, float(found.double().log().mean().exp()),
                             float(chance.double().mean()), float((found == 1).double().mean()), len(ids)))
    frame = pd.DataFrame(rows, columns=list(BlockLensResult.columns))
    return BlockLensResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens)})


def unrolled_blocks(core: LoopedCore, depth: int) -> Iterator[tuple[int, int, int]]:
    """(depth, cycle, layer) of every block application of the core, in the order in which they run."""
    for r in range(1, depth + 1):
        for cycle in (*range(1, core.config.inner_cycles + 1), 0):
            for layer in range(core.config.n_core):
                yield r, cycle, layer


def read_block(core: LoopedCore, h: Tensor, x: Tensor, depth: int, lens: str = "coda") -> Tensor:
    """h [batch, n, d_model], what a core block left -> logits [batch, n, vocab]. x: what `embed` gave for these rows."""
    closed = core.norm(h) if core.family == "hrm_text" else core.close_loop(h)  # HRM-Text's norm closes every stack
    if lens == "coda":
        return core.read(core.carrying(closed, x), Chain(0, h.shape[1], depth))
    if core.family == "parcae":  # wires its readout inside `read`
        return core.unembed(core.norm(core.readout(closed)))  # type: ignore[operator]
    return core.unembed(core.before_head(core.before_coda(closed)))
