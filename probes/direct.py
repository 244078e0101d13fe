"""Direct logit attribution by recurrence: what every component, at every depth, adds to a token's logit.

Notable: TransformerLens's decompose_resid takes the stream for a sum; in a looped model norms on the sum, norms that
close a loop and the adapter rescale and mix what was added before them. Here they are carried along, so that the
components add up to the logit (to rounding), which is checked for every prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.errors import NumericsError, SettingError
from loopscope.records import Result
from probes.frozen import FrozenRun, Share
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

TARGETS = ("next", "top")
# How far the components may be from the logit, as a share of the sum of their sizes: some hundred roundings of the run's own dtype.
_SHARE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, eq=False)
class AttributionResult(Result):
    """One row per prompt and component; the `value_logits` of a prompt add up to its `logit`."""

    kind = "attribution"
    columns = ("model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "branch", "value_logits",
               "logit", "n_positions")


@torch.inference_mode()
def attribution(model: Any, prompts: Iterable[Any], *, target: str | int = "next", against: str | int | None = None,
                positions: str = "all", task: str = "", model_name: str | None = None, depth: int | None = None,
                start_state: str | Tensor | None = None, seed: int = 0, progress: bool = True) -> AttributionResult:
    """What each component adds to a token's logit after `depth` recurrences, averaged over positions.

    Definition. Take the run and hold every norm's scale at the value that it had there. Write the residual stream with
    the components' outputs as sources: the embedding, the start state, what each attention and each MLP puts in at
    each depth (after a norm of that branch's own). Between sources the stream meets only linear maps of one position:
    residual sums, norms with held scales, the adapter, the readout matrix, the head. A component's contribution is its
    output times the product of those maps from it to the logit. It is the direct path only: what later attention or
    MLPs make of a component is counted at those, since their outputs are sources. Nothing on these paths has a bias,
    so that the contributions add up to the logit. Where the stream is fed back (Huginn, Raven, Parcae, Dory), rows of
    embedding and prelude are counted once for each recurrence that injects them: `depth` says which (0: as the start
    state). Dory's step towards a branch, a (branch - x), is a source a branch, and a factor 1 - a on the stream.

    target: "next" (the text's own next token), "top" (the run's top token) or a token id. against: None, "mean" (of
    all logits, which takes out what moves every logit alike) or a token id: then contributions to the difference of
    logits. positions: "all" (with "next", those that have a next token), or "last". depth: T by default.

    Raises PromptError, DepthError, ContextError, SettingError, and NumericsError where the components do not add up.
    Source: direct logit attribution (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits).
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    tokens = read_explained(core, prompts, target, against, positions)
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    for index, ids in enumerate(tqdm(tokens, desc=f"attribution {name}", unit="prompt", disable=not progress)):
        run = FrozenRun(core, ids, depth, start_state=start_state, seed=seed)
        found = explain(run, ids, target, against, positions)
        values = torch.stack([s.value[: len(found.logit)] for s in found.shares])
        check_sum(values, found.logit, core.dtype, "the logit")
        means, whole = values[:, found.kept].mean(1).tolist(), float(found.logit[found.kept].mean())
        rows += [(name, task, index, start, str(target), "" if against is None else str(against), s.part, s.depth, s.cycle, s.layer,
                  s.branch, value, whole, found.averaged) for s, value in zip(found.shares, means)]
    meta = {"depth": depth, "seed": seed, "prompts": len(tokens), "target": target, "against": against, "positions": positions}
    return AttributionResult(pd.DataFrame(rows, columns=list(AttributionResult.columns)), meta)


class Explained(NamedTuple):
    """A run's contributions at every position, the logit [n] that they make, and the positions that are averaged."""

    shares: list[Share]
    logit: Tensor
    kept: slice

    @property
    def averaged(self) -> int:
        return self.kept.stop - self.kept.start


def read_explained(core: LoopedCore, prompts: Iterable[Any], target: Any, against: Any, positions: str) -> list[Tensor]:
    """Token ids of prompts that `explain` can take. Raises PromptError and SettingError."""
    if positions not in ("all", "last"):
        raise SettingError(f"positions {positions!r} is unknown; use 'all' or 'last'")
    for what, value, words in (("target", target, TARGETS), ("against", against, (None, "mean"))):
        _check_token(core, what, value, words)
    return read_prompts(core, prompts, 2 if target == "next" else 1, "a next token")


def explain(run: FrozenRun, ids: Tensor, target: str | int, against: str | int | None, positions: str) -> Explained:
    """What adds to the logit of the target at each of its positions, as `attribution` defines it."""
    check_finite(run.logits, "a pass to depth %d" % run.depth)
    wanted = _targets(run.logits, ids, target)
    kept = slice(0, len(wanted)) if positions == "all" else slice(len(wanted) - 1, len(wanted))
    g, logit = run.directions(wanted), run.logits[: len(wanted)].double().gather(1, wanted[:, None])[:, 0]
    if against is not None:
        other, less = ((run.mean_direction(), run.logits.double().mean(-1)) if against == "mean"
                       else (run.directions(torch.tensor([against], device=wanted.device)), run.logits[:, against].double()))
        g, logit = g - other, logit - less[: len(wanted)]
    if len(wanted) < len(ids):  # the last position has no next token
        g = torch.cat((g, torch.zeros_like(g[:1])))
    return Explained(run.shares(g), logit, kept)


def _check_token(core: LoopedCore, what: str, value: Any, words: tuple) -> None:
    vocabulary = core.config.vocab_size
    if value in words and not isinstance(value, int):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise SettingError(f"{what} {value!r} is unknown; use {', '.join(map(repr, words))} or a token id from 0 to {vocabulary - 1}")


def _targets(logits: Tensor, ids: Tensor, target: str | int) -> Tensor:
    """The token whose logit is explained, position by position; one fewer than ids for the next tokens of the text."""
    if target == "next":
        return ids[1:].to(logits.device)
    return logits.argmax(-1) if target == "top" else torch.full_like(logits[:, 0], int(target), dtype=torch.long)


def check_sum(values: Tensor, whole: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raises NumericsError where values [components, n] do not add up to whole [n], which is `what`."""
    gap, size = (values.sum(0) - whole).abs(), values.abs().sum(0) + whole.abs() + 1
    worst = int((gap / size).argmax())
    if not bool((gap <= _SHARE.get(dtype, 0.1) * size).all()):
        raise NumericsError(f"at position {worst} the components add up to {float(values.sum(0)[worst]):.6g}, but {what} is "
                            f"{float(whole[worst]):.6g}: rounding of {dtype} alone does not explain that; use float32 or float64")
