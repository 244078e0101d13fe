"""A plain cached loop, as a user of transformers would write it: the baseline that autoregressive decoding is held against.

It runs the model's own modules token by token, T recurrences each, and keeps K/V in transformers' own DynamicCache, one of its layers
for every (layer, depth): key and value tensors that grow by a copy at each token. Nothing is preallocated, counted or traced.
A speedup over AR is only worth something if AR is no slower than this; `loopscope bench --plain-loop` says so in the same run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoders.decoder import Decoder
from decoders.generation import Calls, Generation, Seconds
from decoders.session import Session
from loopscope.attention import Plan, readable
from loopscope.errors import SettingError
from loopscope.models.looped import LoopedCore
from loopscope.rows import Chain


class PlainLoop(Decoder):
    """Greedy decoding of one prompt. Takes what the benchmark passes; hooks, sampling, batches and streams are for Autoregressive."""

    one_by_one = True
    label = "plain loop"  # type: ignore[assignment]

    @torch.inference_mode()
    def generate(self, model, prompt, max_new_tokens: int = 64, depth: int | None = None, seed: int = 0,
                 stop: str | Sequence[str] = (), start_state=None, **options) -> Generation:
        """As Decoder.generate, for these arguments only. Raises SettingError for others that are set."""
        if unknown := [name for name, value in options.items() if value]:
            raise SettingError(f"the plain loop is a baseline and takes no {', '.join(unknown)}; use Autoregressive()")
        session = Session(model, prompt, max_new_tokens, depth, seed, stop, start_state)  # checks the arguments; its cache is not used
        core, depth, tokens = session.core, session.depth, session.tokens
        loop = _LOOPS.get(core.family, _Loop)(core, depth)
        begin = time.perf_counter()
        new = [int(loop.step(session.prompt[None], 0, seed, start_state))]
        middle = _now(core)
        while new[-1] not in session.eos and len(new) < max_new_tokens and not _stopped(session, new):
            position = len(tokens) + len(new) - 1
            new.append(int(loop.step(torch.tensor([new[-1:]], device=core.device), position, seed, start_state)))
        end = _now(core)
        text = core.to_text(new) if core.tokenizer is not None else None
        cuts = [text.index(s) for s in session.stop if s in text] if text is not None else []
        steps = len(new) - 1
        return Generation(
            decoder=self.label, fidelity=self.fidelity, tokens=new, text=text[: min(cuts)] if text is not None and cuts else text,
            calls=Calls(steps * depth, steps, steps), rows=steps * depth, proposed=0, accepted=0, runs=[],
            seconds=Seconds(middle - begin, end - middle), trace=[], prompt_length=len(tokens), depth=depth)

    def generate_batch(self, *args, **options):
        raise SettingError("the plain loop is a baseline that decodes one prompt at a time; use Autoregressive().generate_batch")

    def stream(self, *args, **options):
        raise SettingError("the plain loop is a baseline that returns whole texts; use Autoregressive().stream")

    def _check(self, core, depth):
        pass

    def _decode(self, session):
        raise SettingError("the plain loop makes no calls that a driver could run; use Autoregressive()")


def _now(core: LoopedCore) -> float:
    if core.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _stopped(session: Session, new: list[int]) -> bool:
    if not session.stop:
        return False
    text = session.core.to_text(new)
    return any(s in text for s in session.stop)


class _Slot:
    """K and V of one layer at one depth: a layer of a DynamicCache, as model code of transformers updates it."""

    __slots__ = ("cache", "index")

    def __init__(self, cache: Any, index: int) -> None:
        self.cache, self.index = cache, index

    def update(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return self.cache.update(k, v, self.index)


class _SharedSlot(_Slot):
    """One that several depths share: a later recurrence of the same rows takes the place of an earlier one."""

    __slots__ = ()

    def update(self, k, v, start):
        layers = self.cache.layers
        if len(layers) > self.index and layers[self.index].get_seq_length() > start:
            layer = layers[self.index]
            layer.keys, layer.values = layer.keys[:, :, :start], layer.values[:, :, :start]
        return self.cache.update(k, v, self.index)


class _GrowingPlan(Plan):
    """Attention of `count` rows from `start` on over a _Slot; made once per token."""

    def __init__(self, start: int, count: int, window: int | None = None) -> None:
        self.start, self.count, self.window = start, count, window
        self.mask = None
        self._near: _GrowingPlan | None = None

    def rotary(self, table: Tensor) -> Tensor:
        return table[self.start : self.start + self.count]

    def windowed(self, window: int | None) -> Plan:
        if window is None:
            return self
        if self._near is None:
            self._near = _GrowingPlan(self.start, self.count, window)
        return self._near

    def attend(self, cached, q, k, v, pattern=None):
        keys, values = cached.update(k.transpose(1, 2), v.transpose(1, 2), self.start)
        causal = self.count > 1
        if self.window is not None:
            if causal:
                causal, self.mask = False, self._band(q.device)
            else:
                keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        z = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=self.mask, is_causal=causal,
                                           enable_gqa=q.shape[2] != k.shape[2])
        return z.transpose(1, 2)

    def _band(self, device) -> Tensor:
        at = torch.arange(self.count, device=device)
        return readable(at, at) & (at[:, None] - at < self.window)


class _Loop:
    """The loop over a LoopedCore's modules."""

    def __init__(self, core: LoopedCore, depth: int) -> None:
        from transformers import DynamicCache

        self.core, self.depth, config = core, depth, core.config
        cache, count = DynamicCache(), itertools.count()
        kind = _SharedSlot if config.kv_slots else _Slot

        def slots(n: int, kind: type[_Slot] = _Slot) -> list[_Slot]:
            return [kind(cache, next(count)) for _ in range(n)]

        classes = config.kv_slots or depth  # where depths share K/V slots, depth r uses the one of r mod s
        self.prelude = slots(config.n_prelude)
        shared = [slots(config.n_core * (1 + config.inner_cycles), kind) for _ in range(classes)]
        self.blocks = [shared[r % classes] for r in range(depth)]
        self.coda = slots(config.n_coda)

    def step(self, tokens: Tensor, position: int, seed: int, start_state) -> Tensor:
        """tokens [1, n] from `position` on -> the next token (greedy)."""
        rows = Chain(position, tokens.shape[1])
        plan = _GrowingPlan(position, rows.count)
        table = plan.rotary(self.core.rotary_table)
        x = self.embed(tokens, plan, table)
        state = self.core.start(x, rows, seed=seed, start_state=start_state)
        for slots in self.blocks:
            state = self.recur(state, x, plan, table, slots)
        return self.read(state, plan, table)[0, -1].argmax(-1)

    def embed(self, tokens: Tensor, plan: Plan, table: Tensor) -> Tensor:
        core = self.core
        x = core.wte(tokens)
        if core.config.embed_scale != 1.0:
            x = x * core.config.embed_scale
        return _through(core.prelude, self.prelude, x, plan, table)

    def recur(self, state: Tensor, x: Tensor, plan: Plan, table: Tensor, slots: list[_Slot]) -> Tensor:
        core = self.core
        return core.close_loop(_through(core.blocks, slots, core.inject(state, x), plan, table))

    def read(self, state: Tensor, plan: Plan, table: Tensor) -> Tensor:
        core = self.core
        h = _through(core.coda, self.coda, core.before_coda(state), plan, table)
        return core.unembed(core.before_head(h[:, -1:]))


def _through(blocks, slots: list[_Slot], h: Tensor, plan: Plan, table: Tensor) -> Tensor:
    for block, slot in zip(blocks, slots):
        h = block(h, plan, slot, table)
    return h


class _ParcaeLoop(_Loop):
    """Parcae's layers look up value embeddings of the rows' tokens."""

    def embed(self, tokens, plan, table):
        core = self.core
        values = [core.value_embeds[str(i)](tokens) for i in core.config.valued]
        first = [v for i, v in zip(core.config.valued, values) if i < core.config.n_prelude]
        x = core._through(core.prelude, 0, core.wte(tokens), torch.cat(first, -1) if first else None, plan, self.prelude, None)
        if core.prelude_norm is not None:
            x = core.prelude_norm(x)
        return torch.cat((x, *values[len(first) :]), dim=-1)

    def recur(self, state, x, plan, table, slots):
        core, d = self.core, self.core.config.d_model
        h = core.adapter(state[..., :d], x[..., :d])
        return core.carrying(core._through(core.blocks, core.config.n_prelude, h, x[..., d:], plan, slots, None), x)

    def read(self, state, plan, table):
        core, d = self.core, self.core.config.d_model
        first = core.config.n_prelude + core.config.n_core
        h = core._through(core.coda, first, core.readout(state[..., :d]), state[..., d:], plan, self.coda, None)
        return core.unembed(core.norm(h[:, -1:]))


class _HrmTextLoop(_Loop):
    """HRM-Text's recurrence: the fast stack in cycles, then the slow stack."""

    def recur(self, state, x, plan, table, slots):
        core, cache = self.core, SimpleNamespace(core=slots)
        high, low = state.chunk(2, dim=-1)
        for cycle in range(1, core.config.inner_cycles + 1):
            low = core._stack(core.low, cycle, low + high, plan, None, cache, None)
        high = core._stack(core.blocks, 0, high + low, plan, None, cache, None)
        return torch.cat((high, low), dim=-1)


_LOOPS: dict[str, type[_Loop]] = {"parcae": _ParcaeLoop, "hrm_text": _HrmTextLoop}
