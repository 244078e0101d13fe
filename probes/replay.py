"""Replay: what every depth would have drafted along a text, from one teacher-forced full-depth pass.

With aligned K/V a draft made behind right predecessors has exactly the teacher-forced state of its depth, so this table fixes what
Wavefront, draft-then-verify and LoopSpec accept under every setting (docs/algorithms.md, 3, Exact replay); decoders/replay.py draws
the consequences. Where the coda attends (Huginn, Raven, Parcae, Dory), a draft's readout also depends on what its predecessors'
own readouts left in the coda's K/V: at which depth they were last read is up to the decoder. The table holds the draft right behind
verified predecessors; `Pass.read` gives it behind any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.errors import SettingError
from loopscope.records import Result
from loopscope.rows import Chain, Forest
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label

if TYPE_CHECKING:
    from loopscope.cache import DepthCache
    from loopscope.models.looped import LoopedCore


@dataclass(frozen=True, eq=False)
class Pass:
    """A text at every depth. Lane i is new token i as an input: it stands at position prompt_length + i and drafts new token i + 1.

    tokens: the new tokens; the last of them is no input, so lanes are len(tokens) - 1. limit: how many were asked for (the text
    may have ended earlier). drafts [depth, lanes]: the top-1 after each number of recurrences, right behind verified predecessors;
    probability [depth, lanes]: what it was given. attends: whether drafts depend on the predecessors' readouts. live: what `read`
    needs; None where it does not matter, or is gone because the table comes from disk.
    """

    prompt_length: int
    tokens: list[int]
    limit: int
    eos: frozenset[int]
    drafts: Tensor
    probability: Tensor
    attends: bool
    live: _Live | None = None

    @property
    def depth(self) -> int:
        return len(self.drafts)

    @property
    def lanes(self) -> int:
        return self.drafts.shape[1]

    def read(self, lanes: Sequence[int], depths: Sequence[int], verified: Sequence[int], ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Top-1 and its probability for n rows: row j is lane lanes[j] after depths[j] recurrences.

        Its coda attends to the full-depth readouts of the prompt and of the lanes below verified[j], and to those rows of this call,
        itself included, that ancestors [n, n] (bool) names in line j: a predecessor in flight, as it was last read.
        """
        if self.live is None:
            raise SettingError("the states of this replay are gone: tables from disk hold drafts behind verified predecessors only")
        return self.live.read(lanes, depths, verified, ancestors)


@dataclass(frozen=True, eq=False)
class _Live:
    core: LoopedCore
    states: Tensor  # [depth, lanes, d_model (and what the state carries)]
    cache: DepthCache  # its coda holds the full-depth readout of every position
    first: int

    def read(self, lanes: Sequence[int], depths: Sequence[int], verified: Sequence[int], ancestors: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.tensor([self.first + i for i in lanes])
        state = self.states[torch.tensor(depths) - 1, torch.tensor(lanes)]
        rows = Forest(at, torch.tensor([self.first + i for i in verified]), ancestors)
        return _top(self.core.read(state[None], rows, self.cache)[0])


@dataclass(frozen=True, eq=False)
class ReplayResult(Result):
    """One row per prompt, committed token and depth: `draft` is the token's draft, `target` what depth T says, `committed` the token.

    position: of the input, whose output the token is; the first of a prompt is its last token. The drafts are those right behind
    verified predecessors; `attends` (in meta): whether they depend on it.
    """

    passes: tuple[Pass, ...] = ()
    kind = "replay"
    columns = ("model", "task", "prompt", "start", "position", "depth", "draft", "probability", "target", "committed")

    def prompts(self) -> tuple[Pass, ...]:
        """The passes, or what is left of them in a table from disk."""
        return self.passes or tuple(_from_frame(part, self.meta, i) for i, (_, part) in enumerate(self.frame.groupby("prompt")))


@torch.inference_mode()
def replay_table(model: Any, prompts: Iterable[Any], continuations: Sequence[Sequence[int]], *, limit: int | Sequence[int] | None = None,
                 task: str = "", model_name: str | None = None, depth: int | None = None, start_state: str | Tensor | None = None,
                 seed: int = 0, prefix: int = 0, progress: bool = True) -> ReplayResult:
    """Run every prompt with its greedy continuation once at full depth and record the top-1 of each depth.

    model: LoopedCore or LoopedModel. continuations: the new tokens of each prompt, as any lossless greedy decoder gives them
    (decoders.replay makes them). limit: the number of new tokens that were asked for, one or one per prompt; default: as many as
    there are, so a text that ended early at an end-of-text token needs it. depth, start_state, seed, prefix: as for decoding.
    Raises PromptError, DepthError, ContextError, NumericsError, and SettingError where continuations do not fit the prompts or the
    model cannot be decoded in parallel at all. Source: algorithms.md 3 (Exact replay).
    """
    import pandas as pd

    core = core_of(model)
    if core.why_not_lossless:
        raise SettingError(f"there is nothing to replay on this {core.family} model: {core.why_not_lossless}")
    depth, prefix = core.check_depth(depth), core.check_prefix(prefix)
    ids = read_prompts(core, prompts, 1, "a replay")
    limits: list[int | None] = list(limit) if isinstance(limit, Sequence) else [limit] * len(ids)
    if len(continuations) != len(ids) or len(limits) != len(ids):
        raise SettingError(f"{len(ids)} prompts need as many continuations and limits, got {len(continuations)} and {len(limits)}")
    name, start = name_of(core, model_name), start_label(core, start_state)
    rows: list[tuple] = []
    passes = []
    for index, own in enumerate(tqdm(ids, desc=f"replay {name}", unit="prompt", disable=not progress)):
        new = [int(t) for t in continuations[index]]
        asked = len(new) if (given := limits[index]) is None else given
        if not 1 <= len(new) <= asked:
            raise SettingError(f"prompt {index} has {len(new)} new tokens, which must be at least 1 and at most its limit of {asked}")
        done, drafts, probability = _run(core, own, new, asked, depth, start_state, seed, prefix)
        passes.append(done)
        target = drafts[-1].tolist()
        for r in range(1, depth + 1):
            at = zip(drafts[r - 1].tolist(), probability[r - 1].tolist(), target, new)
            rows += [(name, task, index, start, len(own) - 1 + i, r, *values) for i, values in enumerate(at)]
    meta = {"depth": depth, "seed": seed, "prompts": len(ids), "limits": [p.limit for p in passes], "eos": sorted(core.config.eos),
            "attends": len(core.coda) > 0}
    return ReplayResult(pd.DataFrame(rows, columns=list(ReplayResult.columns)), meta, tuple(passes))


def _run(core: LoopedCore, prompt: Tensor, new: list[int], limit: int, depth: int, start_state: str | Tensor | None, seed: int,
         prefix: int) -> tuple[Pass, Tensor, Tensor]:
    """The pass, and top-1 and probability [depth, new tokens]: column i is of the input that gives new token i."""
    ids = core.as_tokens(torch.cat((prompt, prompt.new_tensor(new[:-1]))))
    first, rows = len(prompt), Chain(0, ids.shape[1], prefix=prefix)
    x = core.embed(ids, rows)
    state, states = core.start(x, rows, seed=seed, start_state=start_state), []
    for r in range(1, depth + 1):
        state = core.recur(state, x, rows.at_depth(r))
        states.append(state[0, first - 1 :])
    check_finite(state, "a full-depth pass")
    attends = len(core.coda) > 0
    if not attends:
        tops = [_top(core.read(s[None], Chain(first - 1, len(s)))[0]) for s in states]
    else:
        cache = core.make_cache(ids.shape[1], 1)
        full = _top(core.read(state, rows, cache)[0, first - 1 :])  # leaves every position's full-depth K/V in the coda
        at = torch.arange(first - 1, ids.shape[1])
        alone = Forest(at, at, torch.eye(len(at), dtype=torch.bool))
        tops = [_top(core.read(s[None], alone, cache)[0]) for s in states[:-1]] + [full]
    drafts, probability = (torch.stack(part).cpu() for part in zip(*tops))
    live = _Live(core, torch.stack([s[1:] for s in states]), cache, first) if attends else None
    return Pass(first, new, limit, frozenset(core.config.eos), drafts[:, 1:], probability[:, 1:], attends, live), drafts, probability


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] -> top-1 [n], lowest index on ties, and its probability [n]."""
    best, token = logits.max(-1)
    return token, (best.float() - logits.float().logsumexp(-1)).exp()


def _from_frame(part: Any, meta: Any, index: int) -> Pass:
    """A prompt's pass without its states."""
    part = part.sort_values(["depth", "position"])
    shape = (int(meta["depth"]), -1)
    drafts, probability = (torch.from_numpy(part[name].to_numpy().reshape(shape).copy()) for name in ("draft", "probability"))
    new = part[part.depth == 1].committed.astype(int).tolist()
    return Pass(int(part.position.min()) + 1, new, int(meta["limits"][index]), frozenset(meta["eos"]), drafts[:, 1:], probability[:, 1:],
                bool(meta["attends"]))
