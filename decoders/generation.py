"""What every decoder shares: the decoding session, what it counts, and the Generation it returns.

Counts exclude prefill. `proposed` counts drafts that were compared with a target token; drafts rolled back unseen do
not count, and a block counts up to and including its first mismatch (docs/algorithms.md, 2.3).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Union

import torch
from torch import Tensor

from loopscope.errors import ContextError, NumericsError, SettingError
from loopscope.rows import ALIGNED, Chain, ReadPolicy, Rows
from loopscope.tap import DRAFT, TARGET, Hooks, Tap, tapped

if TYPE_CHECKING:
    import pandas as pd

    from loopscope.models.looped import LoopedCore

Role = Union[str, Sequence[str]]  # TARGET, DRAFT, or one of them per row
__all__ = ["DRAFT", "TARGET", "Calls", "Decoder", "Event", "Generation", "Run", "Seconds", "Session"]


class Calls(NamedTuple):
    """Block calls after prefill."""

    recur: int
    prelude: int
    readout: int


class Seconds(NamedTuple):
    prefill: float
    decode: float


class Run(NamedTuple):
    """Drafts accepted in a row, and whether a mismatch ended the run."""

    accepted: int
    rejected: bool


class Event(NamedTuple):
    """One thing that happened to one position. event: run, draft, accept, reject or commit; token: -1 where none."""

    tick: int
    position: int
    depth: int
    event: str
    token: int


@dataclass(frozen=True, eq=False)
class Generation:
    """What one decode returned. `tokens` are the new tokens only, an EOS included."""

    decoder: str
    lossless: bool
    tokens: list[int]
    text: str | None
    calls: Calls
    rows: int
    proposed: int
    accepted: int
    runs: list[Run]
    seconds: Seconds
    trace: list[Event]
    prompt_length: int
    depth: int

    @property
    def alpha(self) -> float:
        """Accepted per proposed draft token; nan where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else float("nan")

    @property
    def accept_lengths(self) -> list[int]:
        """Drafts accepted per run: per block, or between two corrections of a wave."""
        return [run.accepted for run in self.runs]

    def acceptance_by_position(self) -> list[tuple[int, int, int]]:
        """(place in the run, runs that reached it, runs that accepted it), places counting from 1."""
        longest = max((run.accepted + run.rejected for run in self.runs), default=0)
        return [(i, sum(run.accepted + run.rejected >= i for run in self.runs), sum(run.accepted >= i for run in self.runs))
                for i in range(1, longest + 1)]

    def trace_frame(self, tokenizer=None) -> pd.DataFrame:
        """The trace, one row per event; `token` as text where a tokenizer is given."""
        import pandas as pd

        frame = pd.DataFrame(self.trace, columns=list(Event._fields))
        if tokenizer is not None:
            frame["token"] = [tokenizer.decode([t], skip_special_tokens=False) if t >= 0 else "" for t in frame["token"]]
        return frame


class Session:
    """One sequence being decoded: its cache, its committed tokens, its counters.

    Position p of `tokens` is committed; the newest token is not materialised yet, so `cache.length` is
    len(tokens) - 1 between steps.
    """

    def __init__(self, model, prompt, max_new_tokens: int, depth: int | None, seed: int, stop: Sequence[str],
                 start_state=None, prefix: int = 0) -> None:
        if not hasattr(model, "core"):
            raise SettingError(f"a decoder runs a LoopedModel or LoopedCore (loopscope.load gives one), got {type(model).__name__}")
        self.model, self.core, self.tap = model, model.core, None
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SettingError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}")
        self.depth = self.core.check_depth(depth)
        self.prompt = self.core.prompt_tokens(prompt)
        self.prompt_length, self.limit = len(self.prompt), max_new_tokens
        self.prefix = self.core.check_prefix(prefix)
        if prefix > self.prompt_length:
            raise SettingError(f"prefix={prefix} is longer than the prompt of {self.prompt_length} tokens; it is part of the prompt")
        # The last new token is never an input, so it needs no position.
        capacity = self.prompt_length + max_new_tokens - 1
        if capacity > self.core.config.context:
            raise ContextError(
                f"a prompt of {self.prompt_length} tokens and {max_new_tokens} new ones need {capacity} positions; this model's "
                f"context is {self.core.config.context}. Shorten the prompt or ask for at most "
                f"{max(self.core.config.context - self.prompt_length + 1, 0)} new tokens")
        self.cache = self.core.make_cache(capacity, self.depth)
        if not isinstance(stop, (str, Sequence)):
            raise SettingError(f"stop must be a string or several, got {stop!r}")
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if self.stop and self.core.tokenizer is None:
            raise SettingError("stop strings need a tokenizer, and this model came without one")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise SettingError(f"stop must be non-empty strings, got {stop!r}")
        self.eos = frozenset(self.core.config.eos)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise SettingError(f"seed must be a whole number, got {seed!r}")
        self.seed, self.start_state = seed, start_state
        self.tokens: list[int] = self.prompt.tolist()
        self.finished = False
        self.counts = {"recur": 0, "prelude": 0, "readout": 0, "rows": 0}
        self.proposed = self.accepted = 0
        self.runs: list[Run] = []
        self._run = 0
        self.trace: list[Event] = []
        self.tick = 0

    # ---- the model, counted ---------------------------------------------------------------------------------

    def embed(self, tokens: Tensor | list[int], rows: Rows, role: Role = TARGET) -> Tensor:
        self.counts["prelude"] += 1
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor([tokens], device=self.core.device)
        return self.core.embed(tokens, rows, self.cache, self._tap(role))

    def start(self, x: Tensor, rows: Rows) -> Tensor:
        return self.core.start(x, rows, seed=self.seed, start_state=self.start_state)

    def recur(self, state: Tensor, x: Tensor, rows: Rows, policy: ReadPolicy = ALIGNED, role: Role = TARGET) -> Tensor:
        counts = self.counts
        counts["recur"] += 1
        counts["rows"] += rows.count
        return self.core.recur(state, x, rows, self.cache, policy, self._tap(role))

    def read(self, state: Tensor, rows: Rows, role: Role = TARGET) -> Tensor:
        """Greedy tokens [n] (int64): the lowest index on ties. Raises NumericsError where logits are NaN."""
        self.counts["readout"] += 1
        best, tokens = self.core.read(state, rows, self.cache, self._tap(role))[0].max(dim=-1)
        if best.isnan().any():
            raise NumericsError(f"the logits at position {rows.positions[int(best.isnan().nonzero()[0])]} are NaN; "
                                "check the weights and the dtype (float16 overflows where float32 does not)")
        return tokens

    def _tap(self, role: Role) -> Tap | None:
        """Hooks see target rows; rows that are only drafts (thrown away whatever comes of them) see none unless asked."""
        return self.tap and (self.tap if role == TARGET else self.tap.as_role(role))

    def prefill(self) -> None:
        """Run the prompt at full depth, commit its K/V and its first token."""
        begin = time.perf_counter()
        rows = Chain(0, self.prompt_length, prefix=self.prefix)
        x = self.embed(self.prompt[None], rows)
        state = self.start(x, rows)
        for r in range(1, self.depth + 1):
            rows = Chain(0, self.prompt_length, r, self.prefix)
            state = self.recur(state, x, rows)
        first = self.read(state, rows)[-1]
        self.cache.commit(self.prompt_length)
        self.counts = dict.fromkeys(self.counts, 0)
        self.commit(int(first))
        self.prefill_seconds = self._elapsed(begin)
        self._decode_begin = time.perf_counter()

    def _elapsed(self, begin: float) -> float:
        if self.core.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    # ---- what is committed ----------------------------------------------------------------------------------

    @property
    def remaining(self) -> int:
        """New tokens that may still be committed."""
        return self.limit - (len(self.tokens) - self.prompt_length)

    @property
    def last_input(self) -> int:
        """The last position whose output can still be committed."""
        return self.prompt_length + self.limit - 2

    def commit(self, token: int) -> bool:
        """Make a token final. Returns whether decoding goes on: EOS, stop strings and the limit act here only."""
        self.tokens.append(token)
        self.event(len(self.tokens) - 1, self.depth, "commit", token)
        if token in self.eos or self.remaining <= 0:
            self.finished = True
        elif self.stop:
            text = self.core.to_string(self.tokens[self.prompt_length :])
            self.finished = any(s in text for s in self.stop)
        return not self.finished

    def settle(self, drafts: Sequence[int], targets: Sequence[int]) -> None:
        """Commit a block: the accepted drafts and then the correction or bonus token, materialising what they follow.

        targets[i] is the target's token after i accepted drafts. What lies behind a committed EOS or stop string is
        neither committed nor counted.
        """
        for i, target in enumerate(targets):
            if i < len(drafts):
                self.judge(drafts[i] == target, len(self.tokens), drafts[i])
            if not self.commit(target) or i >= len(drafts) or drafts[i] != target:
                break
        self.end_run()
        self.cache.commit(len(self.tokens) - 1)

    def judge(self, right: bool, position: int, draft: int) -> None:
        """Count one draft compared with its target; a mismatch ends the run."""
        self.proposed += 1
        self.event(position, self.depth, "accept" if right else "reject", draft)
        if right:
            self.accepted += 1
            self._run += 1
        else:
            self.runs.append(Run(self._run, True))
            self._run = 0

    def end_run(self) -> None:
        """Close a run that no mismatch has ended: a block is over, or decoding is."""
        if self._run:
            self.runs.append(Run(self._run, False))
            self._run = 0

    def event(self, position: int, depth: int, event: str, token: int = -1) -> None:
        self.trace.append(Event(self.tick, position, depth, event, token))

    def ran(self, rows: Rows) -> None:
        """Record one tick of these rows, and count it."""
        self.tick += 1
        tick = self.tick
        self.trace.extend(Event(tick, p, r, "run", -1) for p, r in zip(rows.positions, rows.depths))

    def result(self, decoder: Decoder) -> Generation:
        decode_seconds = self._elapsed(self._decode_begin)
        self.end_run()
        new = self.tokens[self.prompt_length :]
        text = None
        if self.core.tokenizer is not None:
            text = self.core.to_string(new)
            cuts = [text.index(s) for s in self.stop if s in text]
            text = text[: min(cuts)] if cuts else text
        return Generation(
            decoder=decoder.label, lossless=decoder.lossless, tokens=new, text=text,
            calls=Calls(self.counts["recur"], self.counts["prelude"], self.counts["readout"]), rows=self.counts["rows"],
            proposed=self.proposed, accepted=self.accepted, runs=self.runs,
            seconds=Seconds(self.prefill_seconds, decode_seconds), trace=self.trace, prompt_length=self.prompt_length, depth=self.depth)


class Decoder(ABC):
    """A decoder is its settings; `generate` runs it on a model. Subclasses set `lossless` and `label`."""

    lossless: bool = True
    one_by_one: bool = False  # whether every position runs at full depth before the next: then shared K/V slots do no harm

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name with settings, as it appears in tables and plots."""

    @abstractmethod
    def _check(self, core: LoopedCore, depth: int) -> None:
        """Raise SettingError for settings this model or depth cannot run."""

    @abstractmethod
    def _decode(self, session: Session) -> None:
        """Decode until session.finished; the prompt is already prefilled."""

    @torch.inference_mode()
    def generate(self, model, prompt, max_new_tokens: int = 64, depth: int | None = None, seed: int = 0,
                 stop: Sequence[str] = (), start_state=None, fwd_hooks: Hooks = (), hook_drafts: bool = False,
                 prefix: int = 0) -> Generation:
        """Decode greedily.

        model: LoopedModel or LoopedCore. prompt: text, a list of token ids or a 1-d tensor. depth: recurrences of the
        target (default: the model's T). seed: keys the start state. stop: strings that end the text. start_state:
        None, "zero" or a tensor [1, positions, d_model]. fwd_hooks: (name, function) pairs, as for run_with_hooks: they
        see every target row once, at its own depth, so an intervention gives the same tokens under every lossless
        decoder. hook_drafts: let them also see rows that only draft (`hook.ctx["role"]` says which). prefix: how many first
        tokens of the prompt read each other in both directions (PrefixLM models only).
        Raises PromptError, ContextError, DepthError, SettingError, HookError, NumericsError; nothing is returned half-done.
        """
        session = self._open(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix)
        self._run(session, fwd_hooks, hook_drafts)
        return session.result(self)

    def _open(self, model, prompt, max_new_tokens, depth=None, seed=0, stop=(), start_state=None, prefix=0) -> Session:
        """Check everything that can be checked before any work is done."""
        session = Session(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix)
        if session.core.why_not_lossless and not self.one_by_one:
            raise SettingError(f"{self.label} would be approximate on this {session.core.family} model, where "
                               f"{session.core.why_not_lossless}; decode it with Autoregressive()")
        self._check(session.core, session.depth)
        return session

    def _run(self, session: Session, fwd_hooks: Hooks = (), hook_drafts: bool = False) -> None:
        with tapped(session.model, fwd_hooks, hook_drafts, session.depth) as session.tap:
            session.prefill()
            if not session.finished:
                self._decode(session)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"


def at_least(name: str, value: int, low: int = 1) -> int:
    """`value` if it is a whole number >= low; SettingError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise SettingError(f"{name} must be a whole number of at least {low}, got {value!r}")
    return value


def check_draft_depth(draft_depth: int, depth: int) -> None:
    if draft_depth > depth:
        raise SettingError(f"draft_depth {draft_depth} is deeper than the target's {depth} recurrences; use at most {depth}")
