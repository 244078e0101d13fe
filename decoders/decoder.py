"""Decoder: the settings of a way to decode, and the three ways to run it: generate, generate_batch, stream."""

from __future__ import annotations

import inspect
import time
from collections import deque
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from decoders.calls import Steps, advance, advance_together
from decoders.generation import LOSSLESS, BatchGeneration, Generation
from decoders.session import Session
from decoders.static import run_static
from decoders.streaming import Stream
from loopscope.errors import ContextError, PromptError, SettingError
from loopscope.memory import check_room
from loopscope.tap import Hooks, tapped

if TYPE_CHECKING:
    from decoders.graphs import Captured, Eager
    from decoders.static import Turn
    from loopscope.cache import DepthCache
    from loopscope.models.looped import LoopedCore


class Decoder(ABC):
    """A decoder is its settings; `generate`, `generate_batch` and `stream` run it on a model.

    Subclasses set `label` and, where they are not lossless, `fidelity` ("approximate" or "lossy").
    """

    fidelity: str = LOSSLESS
    one_by_one: bool = False  # whether every position runs at full depth before the next: then the model's own shared slots do no harm
    slots: int | None = None  # K/V slots that the core's depths share; None: the model's own
    runs_behind: bool = False  # whether a static decode may read what a turn came to while the next one runs

    def __new__(cls, *args: Any, **settings: Any):
        takes = inspect.signature(cls.__init__).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        if wrong := [] if anything else sorted(set(settings) - set(takes)):
            raise SettingError(f"{cls.__name__} does not take {', '.join(wrong)}; it takes {', '.join([*takes][1:]) or 'no settings'}")
        return super().__new__(cls)

    @property
    def lossless(self) -> bool:
        return self.fidelity == LOSSLESS

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name with settings, as it appears in tables and plots."""

    @abstractmethod
    def _check(self, core: LoopedCore, depth: int) -> None:
        """Raise SettingError for settings this model or depth cannot run."""

    @abstractmethod
    def _decode(self, session: Session) -> Steps:
        """Yield the session's calls until session.finished; the prompt is already prefilled."""

    def spare(self, depth: int) -> int:
        """Cells of the cache beyond the last position that branches need."""
        return 0

    def why_not_static(self, session: Session) -> str:
        """What of these settings keeps a decode from running statically (decoders/static.py); "" if nothing does."""
        return "its calls depend on what the host reads"

    def static_turn(self, session: Session, cache: DepthCache, runner: Eager | Captured) -> Turn:
        """The decoder's turn on the device, for sessions like this one, on this cache."""
        raise NotImplementedError

    @torch.inference_mode()
    def generate(self, model, prompt, max_new_tokens: int = 64, depth: int | None = None, seed: int = 0,
                 stop: str | Sequence[str] = (), start_state=None, fwd_hooks: Hooks = (), hook_drafts: bool = False,
                 prefix: int = 0, sampling=None, static: bool = False) -> Generation:
        """Decode one prompt.

        model: LoopedModel or LoopedCore. prompt: text, a list of token ids or a 1-d tensor. depth: recurrences of the
        target (default: the model's T). seed: keys the start state and the sampling noise. stop: strings that end the text.
        start_state: None, "zero" or a tensor [1, positions, d_model]. fwd_hooks: (name, function) pairs, as for
        run_with_hooks: they see every target row once, at its own depth, so an intervention gives the same tokens under every
        lossless decoder. hook_drafts: let them also see rows that only draft (`hook.ctx["role"]` says which). prefix: how many
        first tokens of the prompt read each other in both directions (PrefixLM models only). sampling: None (greedy) or a
        decoders.Sampling. static: run whole turns on the device, as CUDA graphs where there is a GPU, with the same tokens, calls and
        K/V: greedy Autoregressive, Wavefront whose draft_depth divides depth and DASWave on deep K/V, without hooks.
        Raises PromptError, ContextError, DepthError, SettingError, HookError, NumericsError; nothing is returned half-done.
        """
        session = self._open(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix, sampling)
        self._run(session, fwd_hooks, hook_drafts, static)
        return session.result(self)

    @torch.inference_mode()
    def generate_batch(self, model, prompts: Sequence[Any], max_new_tokens: int | Sequence[int] = 64, depth: int | None = None,
                       seed: int | Sequence[int] = 0, stop: str | Sequence[str] = (), start_state=None, fwd_hooks: Hooks = (),
                       hook_drafts: bool = False, prefix: int = 0, sampling=None) -> BatchGeneration:
        """Decode several prompts of any lengths together; each gives what `generate` gives for it alone.

        Every sequence accepts on its own, runs ahead as far as it may and leaves the calls when it ends. max_new_tokens and seed:
        one for all, or one per prompt. Hooks are told the sequence in `hook.ctx["sequence"]`. Options and errors as for `generate`;
        an error names the prompt it is about, counting from 1.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise SettingError(f"prompts must be several prompts in a list, got {prompts!r}")
        limits, seeds = (_per_prompt(name, value, len(prompts)) for name, value in (("max_new_tokens", max_new_tokens), ("seed", seed)))
        begin = time.perf_counter()
        sessions: list[Session] = []
        for i, prompt in enumerate(prompts):
            try:
                sessions.append(self._open(model, prompt, limits[i], depth, seeds[i], stop, start_state, prefix, sampling, index=i))
            except (PromptError, ContextError, SettingError) as error:
                if type(error) is SettingError and not i:
                    raise  # a setting that all prompts share
                raise type(error)(f"prompt {i + 1} of {len(prompts)}: {error}") from error
        self._check_room(sessions)
        with tapped(model, fwd_hooks, hook_drafts, sessions[0].depth) as tap:
            for session in sessions:
                session.tap = tap
            made = advance_together(sessions, [self._steps(session) for session in sessions])
        return BatchGeneration.of([session.result(self) for session in sessions], made, time.perf_counter() - begin)

    @staticmethod
    def _check_room(sessions: Sequence[Session]) -> None:
        """OutOfMemoryError where caches that fit one by one do not fit together: none of them has been written to yet."""
        first = sessions[0]
        if not first.core.placement:
            check_room(first.core.config, sum(s.cache.cells for s in sessions), slots=first.cache.slots, depth=first.depth,
                       dtype=first.cache.dtype, device=first.cache.device)

    def stream(self, model, prompt, max_new_tokens: int = 64, depth: int | None = None, seed: int = 0,
               stop: str | Sequence[str] = (), start_state=None, fwd_hooks: Hooks = (), hook_drafts: bool = False,
               prefix: int = 0, sampling=None) -> Stream:
        """Decode one prompt piece by piece: an iterator over committed text only (decoders/streaming.py).

        Options and errors as for `generate`; what can be wrong with the arguments is said here, before the first piece.
        """
        session = self._open(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix, sampling)
        return Stream(self, session, self._steps(session), fwd_hooks, hook_drafts)

    def _open(self, model, prompt, max_new_tokens, depth=None, seed=0, stop=(), start_state=None, prefix=0, sampling=None,
              index=None) -> Session:
        """Check everything that can be checked before any work is done."""
        spare = self.spare(model.core.check_depth(depth)) if hasattr(model, "core") else 0
        session = Session(model, prompt, max_new_tokens, depth, seed, stop, start_state, prefix, sampling, slots=self.slots, spare=spare,
                          index=index)
        if session.core.why_not_lossless and not self.one_by_one:
            raise SettingError(f"{self.label} would be approximate on this {session.core.family} model, where "
                               f"{session.core.why_not_lossless}; decode it with Autoregressive()")
        self._check(session.core, session.depth)
        return session

    def _run(self, session: Session, fwd_hooks: Hooks = (), hook_drafts: bool = False, static: bool = False, **how: Any) -> None:
        with tapped(session.model, fwd_hooks, hook_drafts, session.depth) as session.tap:
            if static:
                run_static(self, session, lambda: deque(advance(session, session.prefill()), maxlen=0), **how)
                return
            for _ in advance(session, self._steps(session)):
                pass

    def _steps(self, session: Session) -> Steps:
        yield from session.prefill()
        if not session.finished:
            yield from self._decode(session)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"


def _per_prompt(name: str, value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if len(values) != count:
        raise SettingError(f"{name} must be one number or one for each of the {count} prompts, got {len(values)} numbers")
    return values


def at_least(name: str, value: int, low: int = 1) -> int:
    """`value` if it is a whole number >= low; SettingError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise SettingError(f"{name} must be a whole number of at least {low}, got {value!r}")
    return value


def check_draft_depth(draft_depth: int, depth: int) -> None:
    if draft_depth > depth:
        raise SettingError(f"draft_depth {draft_depth} is deeper than the target's {depth} recurrences; use at most {depth}")
