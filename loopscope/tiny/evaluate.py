"""The numbers of a shipped model's card: loss, agreement with full depth and accuracy, each by depth.

Everything is teacher-forced on held-out data, in fp32. A worked answer counts as right when every one of its tokens
is the model's first choice, which is the same as greedy decoding reproducing the whole text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tokenizers
import torch
from torch import Tensor

from loopscope.tiny import tasks
from loopscope.tiny.data import IGNORE, Validation

#: Validation rows computed at once.
CHUNK = 32


def logits_by_depth(
    core: Any, tokens: Tensor, depth: int, start: str = "keyed", seed: int = 0
) -> Iterator[Tensor]:
    """Logits [batch, seq, vocab] after 1, 2, ... ``depth`` recurrences of one pass over ``tokens`` [batch, seq].

    ``start`` is ``"keyed"``, ``"zero"``, or ``"none"`` for a model without a start state.
    """
    with torch.no_grad():
        e = core.embed(tokens)
        s = core.start(e, seed=seed, start_state="zero" if start == "zero" else None)
        for _ in range(depth):
            s = core.recur(s, e)
            yield core.read(s)


def _scores(
    core: Any, inputs: Tensor, targets: Tensor, depth: int, start: str
) -> tuple[list[float], list[float], Tensor]:
    """Mean loss and top-1 agreement with full depth at each depth, and hits [depth, batch, seq] (True where not counted)."""
    counted = targets != IGNORE
    loss, choices = torch.zeros(depth, dtype=torch.float64), []
    for x, y in zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True):
        rows = []
        for r, logits in enumerate(logits_by_depth(core, x, depth, start)):
            logits = logits.float()
            loss[r] += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            rows.append(logits.argmax(-1))
        choices.append(torch.stack(rows))
    chosen = torch.cat(choices, 1)
    agree = (chosen == chosen[-1])[:, counted].double().mean(1)
    return (loss / counted.sum()).tolist(), agree.tolist(), (chosen == targets) | ~counted


def _accuracy(hits: Tensor, cells: list[tuple[str, int]]) -> dict[str, list[float]]:
    """``"task difficulty"`` -> share of rows that are right throughout, by depth."""
    right = hits.all(-1).double()  # [depth, batch]
    rows = defaultdict(list)
    for i, (task, difficulty) in enumerate(cells):
        rows[f"{task} {difficulty}"].append(i)
    return {cell: right[:, index].mean(1).tolist() for cell, index in rows.items()}


def evaluate(
    core: Any, tokenizer: tokenizers.Tokenizer, depth: int, starts: tuple[str, ...] = ("keyed",), scale: float = 1.0
) -> dict[str, Any]:
    """All numbers of a card.

    Args:
        depth: full depth, against which agreement is measured.
        starts: start states to report (``("keyed", "zero")`` for a model that has one).
        scale: shrinks the validation sets, for a quick look.

    Returns:
        start -> {"loss", "agreement": {set: [by depth]}, "accuracy": {cell: [by depth]}, "tokens": {set: count}}.
    """
    validation = Validation(tokenizer)
    sets = {"code": validation.code(max(1, int(64 * scale))), "maths": validation.maths(max(1, int(128 * scale)))}
    worked, direct = validation.cells("worked", max(1, int(16 * scale))), validation.direct(max(1, int(40 * scale)))
    result: dict[str, Any] = {}
    for start in starts:
        loss: dict[str, list[float]] = {}
        agreement: dict[str, list[float]] = {}
        accuracy: dict[str, list[float]] = {}
        for name, (x, y) in sets.items():
            loss[name], agreement[name], _ = _scores(core, x, y, depth, start)
        for name, (x, y, problems) in (("worked", worked), ("direct", direct)):
            _, agreed, hits = _scores(core, x, y, depth, start)
            accuracy |= _accuracy(hits, [(p.task, p.difficulty) for p in problems])
            if name == "direct":
                agreement[name] = agreed
        result[start] = {"loss": loss, "agreement": agreement, "accuracy": accuracy}
    result["tokens"] = {name: int((y != IGNORE).sum()) for name, (_, y) in sets.items()}
    result["problems_per_cell"] = {
        f"{t} {d}": sum((p.task, p.difficulty) == (t, d) for p in worked[2] + direct[2])
        for kind in ("worked", "direct")
        for t, d in tasks.every_cell(kind)
    }
    return result
