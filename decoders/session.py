"""One sequence being decoded: its cache, its committed tokens, its counters. Decoders work on it and yield its calls."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Union

import torch
from torch import Tensor

from decoders.calls import Embed, Read, Recur, Steps
from decoders.generation import Calls, Event, Generation, Run, Seconds
from decoders.sampling import Greedy, Sampling, chooser
from loopscope.errors import ContextError, NumericsError, SettingError
from loopscope.memory import PREFILL
from loopscope.rows import ALIGNED, Chain, ReadPolicy, Rows
from loopscope.tap import DRAFT, TARGET, Tap

GUESS, SECOND = "guess", "second"  # drafts too: one judged as certain; a second proposal beside a first
Role = Union[str, Sequence[str]]  # TARGET, DRAFT, GUESS or SECOND, or one of them per row


class Session:
    """One sequence being decoded.

    Position p of `tokens` is committed; the newest token is not materialised yet, so `cache.length` is
    len(tokens) - 1 between steps. slots: K/V slots that the core's depths share (None: the model's own). spare: cells
    of the cache beyond the last position, for branches. index: which sequence of a batch this is, if any.
    """

    def __init__(self, model, prompt, max_new_tokens: int, depth: int | None = None, seed: int = 0, stop: str | Sequence[str] = (),
                 start_state=None, prefix: int = 0, sampling: Sampling | None = None, *, slots: int | None = None, spare: int = 0,
                 index: int | None = None) -> None:
        if not hasattr(model, "core"):
            raise SettingError(f"a decoder runs a LoopedModel or LoopedCore (loopscope.load gives one), got {type(model).__name__}")
        self.model, self.core, self.tap, self.index = model, model.core, None, index or 0
        self._whose = "" if index is None else f" of prompt {index + 1}"
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
            room = self.core.config.context - self.prompt_length + 1
            cure = (f"Shorten the prompt or ask for at most {room} new tokens" if room > 0 else
                    f"The prompt alone is too long: shorten it by {1 - room} tokens or more")
            raise ContextError(
                f"a prompt of {self.prompt_length} tokens and {max_new_tokens} new ones need {capacity} positions; this model's "
                f"context is {self.core.config.context}. {cure}")
        self.stop = self._check_stop(stop)
        self.eos = frozenset(self.core.config.eos)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise SettingError(f"seed must be a whole number, got {seed!r}")
        self.seed, self.start_state = seed, start_state
        self.chooser = chooser(sampling, seed)
        self._greedy = type(self.chooser) is Greedy
        self._doubts: list[tuple[Tensor, Read]] = []  # which rows' logits were NaN, of readouts the host has not asked about
        self.cache = self.core.make_cache(capacity, self.depth, slots=slots, spare=spare)
        self.tokens: list[int] = self.prompt.tolist()
        self.finished = False
        self.counts = {"recur": 0, "prelude": 0, "readout": 0, "rows": 0}
        self.proposed = self.accepted = 0
        self.runs: list[Run] = []
        self.rounds: list[int] = []  # of each block, where a decoder refines blocks
        self.ahead = 0  # block calls that were made beyond the end of the text, by a static decode whose host ran behind
        self._run = 0
        self._trace: list[Any] = []  # events, and (tick, rows) for what ran
        self.tick = 0
        self._begin = time.perf_counter()

    def _check_stop(self, stop) -> tuple[str, ...]:
        if not isinstance(stop, (str, Sequence)):
            raise SettingError(f"stop must be a string or several, got {stop!r}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if stop and self.core.tokenizer is None:
            raise SettingError("stop strings need a tokenizer, and this model came without one")
        if any(not isinstance(s, str) or not s for s in stop):
            raise SettingError(f"stop must be non-empty strings, got {stop!r}")
        return stop

    # ---- the model's calls: decoders yield these, the driver runs and counts them -------------------------------

    def embed(self, tokens: Tensor | list[int], rows: Rows, role: Role = TARGET) -> Embed:
        """A prelude call; gives x [1, n, d_model]."""
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor([tokens], device=self.core.device)
        return Embed(self, rows, role, tokens)

    def start(self, x: Tensor, rows: Rows) -> Tensor:
        """Start states of the rows: no call, needs no yield."""
        return self.core.start(x, rows, seed=self.seed, start_state=self.start_state)

    def recur(self, state: Tensor, x: Tensor, rows: Rows, policy: ReadPolicy = ALIGNED, role: Role = TARGET) -> Recur:
        """A block call; gives the state [1, n, d_model]."""
        return Recur(self, rows, role, state, x, policy)

    def read(self, state: Tensor, rows: Rows, role: Role = TARGET, drafts: Sequence[Sequence[int]] | None = None,
             keys: Sequence[Hashable] | None = None, on_device: bool = False, last: int | None = None) -> Read:
        """A readout; gives the n tokens chosen for the rows, lowest index on ties: the one thing that the host waits for.

        drafts: for each TARGET row, in order, the proposals for its token; it accepts one by being equal to it. keys: what a
        draft is remembered by until it is judged; default: its position. The request keeps the `logits` [n, vocab] it gave.
        on_device: give a tensor [n] (int64) that nobody waits for, in place of a list. last: tokens of the last so many rows only;
        the head, whose logits are the largest tensor there is, does not run on the others.
        Raises NumericsError where they are NaN; of a tensor's, when the host reads next.
        """
        return Read(self, rows, role, state, () if drafts is None else drafts, keys, on_device, last)

    def choose(self, logits: Tensor, read: Read) -> Tensor:
        """The token of every row [n] (int64), from logits [n, vocab]. Whether they are NaN is left to `to_host`."""
        if self._greedy:
            best, tokens = logits.max(dim=-1)
            self._doubts.append((best.isnan(), read))
            return tokens
        self._doubts.append((logits.isnan().any(-1), read))
        positions = [p + 1 for p in read.rows.positions][read.rows.count - len(logits) :]
        keys = list(positions if read.keys is None else read.keys)
        roles = [read.role] * len(positions) if isinstance(read.role, str) else list(read.role)
        tokens = torch.empty(len(roles), dtype=torch.long, device=logits.device)
        for role in dict.fromkeys(roles):
            at = [i for i, r in enumerate(roles) if r == role]
            own = logits if len(at) == len(roles) else logits[at]
            where, known = [positions[i] for i in at], [keys[i] for i in at]
            if role == TARGET:
                drafts = read.drafts or [()] * len(at)
                chosen = self.chooser.target(own, where, drafts, known)
            else:
                pick = {DRAFT: self.chooser.draft, GUESS: self.chooser.guess, SECOND: self.chooser.second}[role]
                chosen = pick(own, where, known)
            tokens[at] = chosen
        return tokens

    def to_host(self, values: Tensor) -> list:
        """`values` [n] on the host, and with them whether any logits since the last time were NaN: one wait for both.

        Raises NumericsError if they were.
        """
        return self.to_host_together([self], [values])[0]

    @staticmethod
    def to_host_together(sessions: Sequence[Session], values: Sequence[Tensor]) -> list[list]:
        """As `to_host`, for several sequences: still one wait."""
        flat = torch.cat([part for session, own in zip(sessions, values) for part in (own, *(bad for bad, _ in session._doubts))]).tolist()
        out, at = [], 0
        for session, own in zip(sessions, values):
            out.append(flat[at : at + len(own)])
            at += len(own)
            doubts, session._doubts = session._doubts, []
            for bad, read in doubts:
                if any(flat[at : at + len(bad)]):
                    first = next(i for i in range(len(bad)) if flat[at + i])
                    session.refuse_nan(read.rows.positions[read.rows.count - len(bad) + first])
                at += len(bad)
        return out

    def refuse_nan(self, position: int) -> None:
        raise NumericsError(f"the logits{self._whose} at position {position} are NaN; "
                            "check the weights and the dtype (float16 overflows where float32 does not)")

    def tap_as(self, role: Role) -> Tap | None:
        """Hooks see target rows; rows that are only drafts (thrown away whatever comes of them) see none unless asked."""
        if self.tap is None or role == TARGET:
            return self.tap
        return self.tap.as_role((TARGET if role == TARGET else DRAFT) if isinstance(role, str)
                                else [TARGET if r == TARGET else DRAFT for r in role])

    def prefill(self) -> Steps:
        """Run the prompt at full depth, commit its K/V and its first token.

        A long prompt is read PREFILL positions at a time, each stretch at all depths before the next: what a call makes does not
        grow with the prompt. Only the last row's logits matter, but coda layers must write the K/V of all.
        """
        # A prefix that reads itself both ways is one call's; and where depths share slots, a later stretch would find the earlier ones
        # as their deepest recurrence left them, while a prompt is read unshared (docs/algorithms.md, 2.3).
        stretch = self.prompt_length if self.prefix or self.cache.slots < self.depth else PREFILL
        first: list[int] = []
        for begin in range(0, self.prompt_length, stretch):
            count = min(stretch, self.prompt_length - begin)
            rows = Chain(begin, count, prefix=self.prefix)
            x = yield self.embed(self.prompt[None, begin : begin + count], rows)
            state = self.start(x, rows)
            for r in range(1, self.depth + 1):
                rows = Chain(begin, count, r, self.prefix)
                state = yield self.recur(state, x, rows)
            first = yield self.read(state, rows, last=int(begin + count == self.prompt_length))
            self.cache.commit(begin + count)
        self.begin(first[-1])

    def begin(self, first: int) -> None:
        """Decode from here: the prompt's K/V are in the cache, and its pass gave this token. Counts and clock start anew."""
        self.counts = dict.fromkeys(self.counts, 0)
        self.commit(first)
        self.prefill_seconds = self._elapsed(self._begin)
        self._decode_begin = time.perf_counter()

    def _elapsed(self, begin: float) -> float:
        if self.core.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    # ---- what is committed ----------------------------------------------------------------------------------

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

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
            text = self.core.to_text(self.new_tokens)
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
        self._trace.append(Event(self.tick, position, depth, event, token))

    def ran(self, rows: Rows) -> None:
        """Record one tick of these rows, and count it."""
        self.tick += 1
        self._trace.append((self.tick, rows))

    @property
    def trace(self) -> list[Event]:
        """What happened, event by event; the rows of a tick are spelled out when somebody looks."""
        out: list[Event] = []
        for entry in self._trace:
            if isinstance(entry, Event):
                out.append(entry)
            else:
                tick, rows = entry
                out += [Event(tick, p, r, "run", -1) for p, r in zip(rows.positions, rows.depths)]
        return out

    def result(self, decoder: Any) -> Generation:
        """What has been committed so far, as `decoder` (its label and fidelity) gave it."""
        decode_seconds = self._elapsed(self._decode_begin)
        self.end_run()
        text = None
        if self.core.tokenizer is not None:
            text = self.core.to_text(self.new_tokens)
            cuts = [text.index(s) for s in self.stop if s in text]
            text = text[: min(cuts)] if cuts else text
        return Generation(
            decoder=decoder.label, fidelity=decoder.fidelity, tokens=self.new_tokens, text=text,
            calls=Calls(self.counts["recur"], self.counts["prelude"], self.counts["readout"]), rows=self.counts["rows"],
            proposed=self.proposed, accepted=self.accepted, runs=list(self.runs),
            seconds=Seconds(self.prefill_seconds, decode_seconds), trace=self.trace, prompt_length=self.prompt_length,
            depth=self.depth)


__all__ = ["DRAFT", "GUESS", "SECOND", "TARGET", "Role", "Session"]
