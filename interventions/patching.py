"""Activation patching over (depth, layer, position, head): which activation carries what tells two prompts apart.

A clean and a corrupted prompt of the same length differ in what the model should answer. The corrupted prompt is run with
one activation replaced by the clean run's, and the share of the difference in logits that this brings back is noted. Many
patches run as rows of one batch, from the first recurrence that any of them touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor
from tqdm.auto import tqdm

from loopscope.errors import PromptError, SettingError
from loopscope.hook_names import SHORT_NAMES, block_prefix
from loopscope.records import Result
from loopscope.rows import Chain
from loopscope.tap import RecordingTap, Tap
from probes.inputs import check_finite, check_names, core_of, name_of, read_prompts, start_label

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

STREAM = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
BY_HEAD = ("q", "k", "v", "z")
SITES = (*STREAM, *BY_HEAD)
ALL = -1  # in the table: at all depths, layers, positions or heads at once
Which = Union[None, str, Iterable[Union[int, None]]]


class Patch(NamedTuple):
    """Where the clean run's activation goes: a site at a depth (1..T), core layer, position and head; None is all of them at once."""

    site: str
    depth: int | None = None
    layer: int | None = None
    position: int | None = None
    head: int | None = None


@dataclass(frozen=True, eq=False)
class PatchingResult(Result):
    """One row per pair of prompts and patch."""

    kind = "patching"
    columns = ("model", "task", "prompt", "start", "site", "depth", "layer", "position", "head", "token", "corrupted_token",
               "difference_logits", "clean_logits", "corrupted_logits", "restored")


@torch.inference_mode()
def activation_patching(model: Any, pairs: Iterable[tuple[Any, Any]], sites: Iterable[str] = ("resid_post", "z", "mlp_out"), *,
                        depths: Which = None, layers: Which = None, positions: Which = None, heads: Which = None,
                        answers: Sequence[tuple[int, int]] | None = None, batch: int = 32, task: str = "", model_name: str | None = None,
                        depth: int | None = None, start_state: str | Tensor | None = None, seed: int = 0,
                        progress: bool = True) -> PatchingResult:
    """The share of a logit difference that one clean activation brings back to a corrupted run, patch by patch.

    model: LoopedCore or LoopedModel. pairs: (clean, corrupted) prompts, texts or token ids, of as many tokens each. answers:
    for every pair the token ids (clean answer, corrupted answer); by default what the model itself puts on top after each.
    The metric is d = logit(clean answer) - logit(corrupted answer) at the last position, at full depth, and
    restored = (d patched - d corrupted) / (d clean - d corrupted): 0 for a patch that does nothing, 1 for one that brings
    all of it back; it may leave that range. NaN where clean and corrupted have the same d. Give the prompts the other way
    round to see what a corrupted activation breaks (noising) instead.

    sites: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out" (the whole width), and by head "q", "k", "v", "z"
    (q and k before the rotary embedding; k and v have the model's key-value heads). depths, layers, positions, heads:
    "each" (one patch for each), "all" (all in one patch; -1 in the table), or a list of numbers, one patch for each (from 0,
    depths from 1; None in a list is "all"). Default: layers, heads and positions each, but for sites by head all positions
    together; every depth, and all of them together (where the input is fed back, later recurrences may undo a patch at one
    of them). depth: T. HRM-Text: the slow stack's blocks.
    Parcae's coda looks up the prompt's own tokens, which no patch touches. batch: patches that run as rows of one call.

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: Wang et al. 2022 (Interpretability in
    the Wild), Heimersheim and Nanda 2024 (How to use and interpret activation patching); the axis of depth is ours.
    """
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    sites = check_names(sites, SITES, "site")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise SettingError(f"batch must be a whole number of patches of at least 1, got {batch!r}")
    tokens = read_pairs(core, pairs)
    if answers is not None and len(answers) != len(tokens):
        raise SettingError(f"answers are one (clean, corrupted) pair of token ids for each pair of prompts; got {len(answers)} for "
                           f"{len(tokens)}")
    name, start = name_of(core, model_name), start_label(core, start_state)

    def text(ids: Tensor, position: int | None) -> str:
        if position is None:
            return ""
        return str(int(ids[position])) if core.tokenizer is None else core.tokenizer.decode([int(ids[position])])

    rows: list[tuple] = []
    for index, (clean, corrupted) in enumerate(tqdm(tokens, desc=f"patching {name}", unit="pair", disable=not progress)):
        patches = sweep(core, sites, depth, len(clean), depths, layers, positions, heads)
        pair = Pair(core, clean, corrupted, depth, patches, start_state=start_state, seed=seed)
        right, wrong = check_answers(core, pair, None if answers is None else answers[index], index)
        logits = pair.run(patches, batch)
        found = (logits[:, right] - logits[:, wrong]).double().tolist()
        best, worst = (float(x[right].double() - x[wrong].double()) for x in (pair.clean_logits, pair.corrupted_logits))
        for p, value in zip(patches, found):
            place = (ALL if at is None else at for at in (p.depth, p.layer, p.position, p.head))
            restored = (value - worst) / (best - worst) if best != worst else float("nan")
            rows.append((name, task, index, start, p.site, *place, text(clean, p.position), text(corrupted, p.position), value, best,
                         worst, restored))
    frame = pd.DataFrame(rows, columns=list(PatchingResult.columns))
    return PatchingResult(frame, {"depth": depth, "seed": seed, "prompts": len(tokens), "direction": "clean into corrupted"})


class Pair:
    """Two prompts [n] of one length: the clean run's activations, the corrupted run's states, and patches between them.

    `clean_logits`, `corrupted_logits` [vocab]: of the last position. patches: what `run` may be asked for later.
    """

    def __init__(self, core: LoopedCore, clean: Tensor, corrupted: Tensor, depth: int, patches: Iterable[Patch], *,
                 start_state: str | Tensor | None = None, seed: int = 0) -> None:
        self.core, self.depth, self.count = core, depth, len(clean)
        tap = RecordingTap({name for p in patches for name in names_of(core, p, depth)})
        self.clean_logits = core(clean, depth, start_state=start_state, seed=seed, tap=tap)[0, -1]
        self._clean = tap
        self._x = core.embed(core.as_tokens(corrupted))
        states = [core.start(self._x, seed=seed, start_state=start_state)]
        for r in range(1, depth + 1):
            states.append(core.recur(states[-1], self._x, Chain(0, self.count, r)))
        self._states = states
        self.corrupted_logits = core.read(states[-1], Chain(0, self.count, depth))[0, -1]
        for logits in (self.clean_logits, self.corrupted_logits):
            check_finite(logits, "a full-depth pass")

    def run(self, patches: Sequence[Patch], batch: int = 32) -> Tensor:
        """Logits [patches, vocab] at the last position of the corrupted prompt, each with one patch."""
        out = self.corrupted_logits.new_empty(len(patches), len(self.corrupted_logits))
        order = sorted(range(len(patches)), key=lambda i: patches[i].depth or 1)
        for first, places in groupby(order, key=lambda i: patches[i].depth or 1):
            whole = list(places)
            for part in (whole[i : i + batch] for i in range(0, len(whole), batch)):
                tap = _PatchTap(self.core, self._clean, [patches[i] for i in part], self.depth)
                x, state = (t.expand(len(part), -1, -1) for t in (self._x, self._states[first - 1]))
                for r in range(first, self.depth + 1):
                    state = self.core.recur(state, x, Chain(0, self.count, r), tap=tap)
                out[part] = self.core.read(state, Chain(0, self.count, self.depth))[:, -1]
        return out


class _PatchTap(Tap):
    """Row i of a call gets the clean activation where patch i says so."""

    def __init__(self, core: LoopedCore, clean: RecordingTap, patches: Sequence[Patch], depth: int) -> None:
        super().__init__()
        self._clean = clean
        self._rows: dict[str, list[tuple[int, Patch]]] = {}
        for row, patch in enumerate(patches):
            for name in names_of(core, patch, depth):
                self._rows.setdefault(name, []).append((row, patch))

    def wants(self, name: str) -> bool:
        return name in self._rows

    def fire(self, name: str, tensor: Tensor, context: dict[str, Any]) -> Tensor:
        tensor, clean = tensor.clone(), self._clean[name][0]
        for row, patch in self._rows[name]:
            where = (slice(None) if patch.position is None else patch.position,) + (() if patch.head is None else (patch.head,))
            tensor[(row, *where)] = clean[where]
        return tensor


def names_of(core: LoopedCore, patch: Patch, depth: int) -> list[str]:
    """The hooks that a patch replaces at."""
    depths = range(1, depth + 1) if patch.depth is None else (patch.depth,)
    layers = range(core.config.n_core) if patch.layer is None else (patch.layer,)
    return [block_prefix("blocks", layer, r) + SHORT_NAMES[patch.site] for r in depths for layer in layers]


def sweep(core: LoopedCore, sites: Iterable[str], depth: int, count: int, depths: Which = None, layers: Which = None,
          positions: Which = None, heads: Which = None) -> list[Patch]:
    """Every patch of a grid. Raises SettingError for a number outside it."""
    c, patches = core.config, []
    for site in sites:
        by_head = site in BY_HEAD
        n_heads = c.n_heads if site in "qz" else c.n_kv_heads
        axes: list[list] = [
            _axis("depths", [*range(1, depth + 1), None] if depths is None else depths, range(1, depth + 1)),
            _axis("layers", layers, range(c.n_core)),
            _axis("positions", "all" if positions is None and by_head else positions, range(count)),
            _axis("heads", heads, range(n_heads)) if by_head else [None]]
        patches += [Patch(site, *at) for at in product(*axes)]
    return patches


def _axis(what: str, which: Which, known: range) -> list[int | None]:
    if which is None or (isinstance(which, str) and which == "each"):
        return list(known)
    if isinstance(which, str) and which == "all":
        return [None]
    numbers = [] if isinstance(which, str) else list(which)
    wrong = [n for n in numbers if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n not in known)]
    if not numbers or wrong:
        found = repr(wrong[0] if wrong else which)
        raise SettingError(f"{what} are 'each', 'all', or a list of numbers from {known[0]} to {known[-1]}; got {found}")
    return numbers


def read_pairs(core: LoopedCore, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Tensor, Tensor]]:
    """Token ids of (clean, corrupted) prompts. Raises PromptError where there is none, or their lengths differ."""
    tokens = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PromptError(f"pairs are (clean, corrupted) prompts; pair {index} is {repr(pair)[:60]}")
        clean, corrupted = read_prompts(core, pair, 1, "a prediction")
        if len(clean) != len(corrupted):
            raise PromptError(f"pair {index}: the clean prompt has {len(clean)} tokens and the corrupted one {len(corrupted)}; patching "
                              "goes position by position, so write two prompts of as many tokens")
        tokens.append((clean, corrupted))
    if not tokens:
        raise PromptError("no pairs were given; pass a list with at least one (clean, corrupted)")
    return tokens


def check_answers(core: LoopedCore, pair: Pair, given: tuple[int, int] | None, index: int) -> tuple[int, int]:
    """(clean answer, corrupted answer) as token ids. Raises SettingError where the two are one."""
    if given is None:
        right, wrong = int(pair.clean_logits.argmax()), int(pair.corrupted_logits.argmax())
        if right == wrong:
            raise SettingError(f"pair {index}: the model puts the same token on top after both prompts ({right}), so nothing tells them "
                               "apart; choose prompts that it answers differently, or say answers=[(clean, corrupted), ...]")
        return right, wrong
    right, wrong = given
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < core.config.vocab_size:
            raise SettingError(f"pair {index}: answers are token ids from 0 to {core.config.vocab_size - 1}, got {token!r}")
    if right == wrong:
        raise SettingError(f"pair {index}: both answers are token {right}; their logits differ by nothing")
    return right, wrong
