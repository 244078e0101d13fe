"""Passes in which every token has a depth of its own. All are lossy: their logits are not those of depth T.

    adaptive_forward   all loops run, and each token is read at the depth where a rule stops it: Ouro's own way; no compute is saved
    adaptive_step      one token, run until the rule stops it; what it leaves at deeper depths is what it last wrote
    weighted_logits    the mean of all depths' logits under Ouro's exit distribution
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from loopscope.errors import HookError, PromptError, SettingError
from loopscope.exits import ExitRule, check_gate, exit_rule
from loopscope.rows import Chain

if TYPE_CHECKING:
    import pandas as pd

    from loopscope.cache import DepthCache
    from loopscope.models.looped import LoopedCore
    from loopscope.models.ouro import OuroCore


@dataclass(frozen=True, eq=False)
class AdaptiveLogits:
    """logits [batch, n, vocab], each token's read at its own exit_depth [batch, n] (1..depth; `depth` where nothing stopped it)."""

    logits: Tensor
    exit_depth: Tensor
    depth: int  # the most recurrences any token was allowed
    ran: int  # recurrences that were computed
    rule: str
    start: int = 0  # position of the first token; in a padded batch its column
    lossless: bool = False

    @property
    def label(self) -> str:
        return f"T={self.depth}, exit at {self.rule} (lossy)"

    def to_frame(self) -> pd.DataFrame:
        """One row per token: batch row, position, exit depth in recurrences."""
        import pandas as pd

        batch, n = self.exit_depth.shape
        return pd.DataFrame({"row": [b for b in range(batch) for _ in range(n)], "position": [*range(self.start, self.start + n)] * batch,
                             "exit_depth": self.exit_depth.flatten().tolist(), "depth": self.depth, "rule": self.rule})


def adaptive_forward(core: LoopedCore, tokens: Tensor, rule: str | ExitRule, depth: int | None = None, *, seed: int = 0,
                     start_state: str | Tensor | None = None, cache: DepthCache | None = None, prefix: int = 0,
                     attention_mask: Tensor | None = None) -> AdaptiveLogits:
    """A full pass of all loops, read at each token's own exit depth (default depth: T). The other arguments: LoopedCore.forward.

    K/V are those of a full pass at every depth; only the coda sees each token's exit state. No compute is saved. A rule that
    reads logits judges depth r by the readout of all tokens at depth r. Raises SettingError where the model cannot run the rule.
    """
    core, rule = _bare(core), exit_rule(rule)
    rule.check(core)
    depth = core.trained_depth(depth)
    tokens, rows = core.open_rows(tokens, cache, prefix, attention_mask)
    return _run(core, tokens, rows, rule, depth, cache, seed, start_state, save=False)


def adaptive_step(core: LoopedCore, tokens: Tensor, cache: DepthCache, rule: str | ExitRule, depth: int | None = None, *, seed: int = 0,
                  start_state: str | Tensor | None = None) -> AdaptiveLogits:
    """tokens [batch, 1] at position cache.length: run until the rule stops them, at most `depth` recurrences (default: T).

    Deeper readers find the K/V of a token's last recurrence (DepthCache.fill_deeper). Greedy decoding by it, after a prompt
    at full depth, is what decoders with the same rule are compared with. Rows of a batch stop one by one; the loop ends with the
    last. Raises PromptError for more than one position, SettingError for a batch on shared K/V slots.
    """
    core, rule = _bare(core), exit_rule(rule)
    rule.check(core)
    depth = core.check_depth(depth)
    tokens, rows = core.open_rows(tokens, cache)
    if rows.count != 1:
        raise PromptError(f"adaptive_step runs one position at a time, since later ones read what earlier ones leave; got {rows.count}")
    if len(tokens) > 1 and cache.slots < depth:
        raise SettingError(f"rows of a batch stop at depths of their own, but {depth} depths share {cache.slots} K/V slot(s) here, where "
                           "rows that run on overwrite what rows that stopped have left; run one sequence at a time, or a slot per depth")
    return _run(core, tokens, rows, rule, depth, cache, seed, start_state, save=True)


def weighted_logits(core: LoopedCore, tokens: Tensor, depth: int | None = None, *, attention_mask: Tensor | None = None) -> Tensor:
    """sum_t p_t logits_t [batch, n, vocab], p the exit distribution over depths 1..depth (Ouro; docs/families.md, section 2).

    Raises SettingError on a model without an exit gate.
    """
    core = _bare(core)
    check_gate(core)
    depth = core.trained_depth(depth)
    tokens, rows = core.open_rows(tokens, None, 0, attention_mask)
    x = core.embed(tokens, rows)
    states = [core.start(x, rows)]
    for r in range(1, depth + 1):
        states.append(core.recur(states[-1], x, rows.at_depth(r)))
    weights = cast("OuroCore", core).exit_pdf(torch.stack(states[1:]))
    logits = torch.zeros((), dtype=core.dtype, device=core.device)
    for r, state in enumerate(states[1:], 1):
        logits = logits + weights[..., r - 1, None] * core.read(state, rows.at_depth(r))
    return logits


def _run(core: LoopedCore, tokens: Tensor, rows: Chain, rule: ExitRule, depth: int, cache: DepthCache | None, seed: int,
         start_state: str | Tensor | None, save: bool) -> AdaptiveLogits:
    """save: end when every row has stopped, and leave what it last wrote to deeper readers."""
    x = core.embed(tokens, rows, cache)
    state = chosen = core.start(x, rows, seed=seed, start_state=start_state)
    memory = rule.begin(core, *tokens.shape)
    exit_depth = torch.zeros_like(tokens)  # 0: still running
    logits = None
    for r in range(1, depth + 1):
        rows, before = rows.at_depth(r), state
        state = core.recur(before, x, rows, cache)
        if rule.reads:
            logits = core.read(state, rows, cache)
        stop, memory = rule.update(memory, state, before, logits, core)
        running = exit_depth == 0
        chosen = torch.where(running[..., None], state, chosen)
        exit_depth = exit_depth.masked_fill(running & (stop | (r == depth)), r)
        if save and (exit_depth > 0).all():
            break
    if logits is None or (exit_depth != rows.depth).any():
        logits = core.read(chosen, rows, cache)  # also leaves the coda's K/V of the exit states
    if cache is not None:
        if save:
            cache.fill_deeper(rows.positions, exit_depth)
        cache.commit(rows.start + rows.count)
    return AdaptiveLogits(logits, exit_depth, depth, rows.depth, rule.label, rows.start)


def _bare(model) -> LoopedCore:
    """The core; HookError if hooks wait on the model, since none would fire."""
    if model.core is not model and model.tap() is not None:
        raise HookError("hooks do not fire in adaptive passes; remove them with reset_hooks() first")
    return model.core
