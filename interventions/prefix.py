"""Prefix channels: what a shallow draft gains or loses by reading the prefix's keys or values at full depth.

The four read policies of DAS (arXiv 2609.34538, section 3) on the same positions, so that differences are paired. Own
K/V are current under every policy; only the verified prefix is read from another depth. docs/algorithms.md 1 and 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from interventions.controls import CONTROLS, from_other, noise, shuffled
from interventions.drafts import Target, anchors_of, compare, deep_values, greedy_continuation, target_pass, with_deep_values
from loopscope.errors import DepthError, SettingError
from loopscope.records import Result
from loopscope.rows import POLICIES, ReadPolicy
from probes.inputs import check_names, chosen, core_of, name_of, read_prompts, start_label
from probes.nulls import generator

if TYPE_CHECKING:
    from interventions.effects import EffectsResult

DEPTHS = (1, 2, 4, 8)
LAGS = (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class PrefixChannelsResult(Result):
    """One row per prompt, draft depth, lag, policy and control; averaged over the prompt's anchors."""

    kind = "prefix_channels"
    columns = ("model", "task", "prompt", "start", "depth", "lag", "policy", "control", "agreement", "kl_nats", "n_positions")

    def effects(self, **options: Any) -> EffectsResult:
        """Paired differences to the aligned policy with bootstrap intervals: interventions.effects.paired_effects."""
        from interventions.effects import paired_effects

        return paired_effects(self.frame, meta=self.meta, **options)


@torch.inference_mode()
def prefix_channels(model: Any, prompts: Iterable[Any], depths: Iterable[int] | None = None, policies: Iterable[str] = POLICIES,
                    lags: Iterable[int] = LAGS, controls: Iterable[str] = CONTROLS, *, task: str = "", model_name: str | None = None,
                    depth: int | None = None, start_state: str | Tensor | None = None, seed: int = 0, new_tokens: int = 0,
                    max_positions: int = 96, only: Container[int] | None = None,
                    each: Callable[[int, Mapping[str, list]], None] | None = None, progress: bool = True) -> PrefixChannelsResult:
    """Agreement and KL of drafts at depth d against the full-depth target, by read policy and lag.

    model: LoopedCore or LoopedModel. prompts: texts or token ids. new_tokens: 0 measures on the prompts themselves;
    otherwise each is first continued greedily at full depth and the anchors lie in the continuation, where decoders work.
    depths: draft depths (default: those of 1, 2, 4 and 8 below T); those above T are left out with a warning. depth: T.
    lags: the draft g positions after the last verified token; the g - 1 rows in between are drafts of the same depth
    with the text's own tokens. max_positions: at most so many anchors per prompt, evenly spread; all policies and lags
    use the same anchors, n_positions says how many.
    controls (with the deep_v policy only): the prefix's full-depth values "shuffled_v" over positions, taken from the
    next prompt ("other_prompt_v"; left out with a warning if there is one prompt only), or replaced by Gaussian noise of
    the same norm per position and head ("noise_v").

    only: measure these prompts (by index; default: all); the next prompt, whose values a control reads, is still the next of all.
    each: called with a prompt's index and {table: its rows} as soon as it is measured.

    Prelude and coda K/V of the prefix are those of full depth, as in a decoder. At depth T the aligned draft is the
    target itself; a deep policy is not, because its recurrences before T read another depth.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: algorithms.md 3.
    """
    import pandas as pd

    core = core_of(model)
    full = core.check_depth(depth)
    draft_depths = draft_depths_of(depths, full)
    policies = check_names(policies, POLICIES, "read policy")
    controls = check_names(controls, CONTROLS, "control") if "deep_v" in policies else ()
    lags = _lags(lags)
    tokens = read_prompts(core, prompts, max(lags) + 1, f"a draft at lag {max(lags)} behind one verified token")
    if "other_prompt_v" in controls and len(tokens) == 1:
        warnings.warn("the control 'other_prompt_v' needs a second prompt and is left out", stacklevel=2)
        controls = tuple(c for c in controls if c != "other_prompt_v")
    name, start = name_of(core, model_name), start_label(core, start_state)

    def run(index: int) -> Target:
        ids = greedy_continuation(core, tokens[index], new_tokens, full, start_state, seed)
        return target_pass(core, ids, full, start_state, seed)

    rows: list[tuple] = []
    ahead: tuple[int, Target] | None = None  # the next prompt was read as the other one of this prompt
    for index in tqdm(chosen(tokens, only), desc=f"prefix channels {name}", unit="prompt", disable=not progress):
        target = ahead[1] if ahead is not None and ahead[0] == index else run(index)
        after = (index + 1) % len(tokens)
        following = run(after) if len(tokens) > 1 else target
        ahead, found = (after, following), []
        anchors = anchors_of(target.length, max(lags), max_positions, len(tokens[index]) if new_tokens else 1)
        for policy, control, used in _conditions(target, following, policies, controls, seed, index):
            measured = compare(core, used, anchors, draft_depths, lags, ReadPolicy.named(policy, full))
            found += [(name, task, index, start, d, g, policy, control, *pair, len(anchors)) for (d, g), pair in measured.items()]
        rows += found
        if each is not None:
            each(index, {PrefixChannelsResult.kind: found})
    frame = pd.DataFrame(rows, columns=list(PrefixChannelsResult.columns))
    return PrefixChannelsResult(frame, {"depth": full, "seed": seed, "prompts": len(tokens), "new_tokens": new_tokens,
                                        "max_positions": max_positions})


def _conditions(target: Target, other: Target, policies: tuple[str, ...], controls: tuple[str, ...], seed: int,
                index: int) -> Iterator[tuple[str, str, Target]]:
    """(policy, control, the target whose cache is read)."""
    for policy in policies:
        yield policy, "none", target
    if not controls:
        return
    values, others = deep_values(target), deep_values(other)
    for control in controls:
        draw = generator(seed, control, index)
        if control == "shuffled_v":
            order = torch.randperm(target.length, generator=draw)
            wrong = [shuffled(v, order) for v in values]
        elif control == "other_prompt_v":
            wrong = [from_other(v, o) for v, o in zip(values, others)]
        else:
            wrong = [noise(v, draw) for v in values]
        yield "deep_v", control, with_deep_values(target, wrong)


def draft_depths_of(depths: Iterable[int] | None, full: int) -> tuple[int, ...]:
    """Increasing draft depths within 1..T; those beyond T are dropped with a warning. Raises DepthError if none is left."""
    if depths is None:
        return tuple(d for d in DEPTHS if d < full) or (1,)  # at T a draft is the target itself
    wanted = sorted(set(depths))
    bad = [d for d in wanted if isinstance(d, bool) or not isinstance(d, int) or d < 1]
    if bad or not wanted:
        raise DepthError(f"draft depths are whole numbers of recurrences from 1 to {full}, got {bad[0] if bad else 'none'}")
    kept = tuple(d for d in wanted if d <= full)
    dropped = [d for d in wanted if d > full]
    if not kept:
        raise DepthError(f"no draft depth is within full depth {full}: {', '.join(map(str, dropped))}")
    if dropped:
        warnings.warn(f"draft depths beyond full depth {full} are left out: {', '.join(map(str, dropped))}", stacklevel=3)
    return kept


def _lags(lags: Iterable[int]) -> tuple[int, ...]:
    lags = tuple(sorted(set(lags)))
    if not lags or any(isinstance(g, bool) or not isinstance(g, int) or g < 1 for g in lags):
        raise SettingError(f"lags are whole numbers of at least 1 (1: right behind the verified prefix), got {lags or 'none'}")
    return lags
