"""LoopedCore: the one model class, without TransformerLens. Every family, every decoder and every probe runs on it.

    embed(tokens, rows, cache)                -> x       embedding and prelude; what is injected at every recurrence
    start(x, rows, seed, start_state)         -> state   s_0, a pure function of (seed, sequence, position)
    recur(state, x, rows, cache, policy)      -> state   ONE recurrence of n rows, whatever their positions and depths
    read(state, rows, cache)                  -> logits  coda, final norm, head
    forward(tokens, depth)                    -> logits  the full pass

Without rows and cache each works on whole sequences, causally: that is what training and hooked passes use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loopscope.cache import DepthCache
from loopscope.errors import ContextError, DepthError, DepthWarning, PromptError, SettingError, warn_caller
from loopscope.models.config import MOST_DEPTH, LoopedConfig
from loopscope.models.layers import Block, RMSNorm, rotary_angles
from loopscope.models.packing import Embedding, Linear, pack_all, unpack_all
from loopscope.padding import read_pads, token_positions
from loopscope.planning import core_plan, outer_plan
from loopscope.rows import ALIGNED, Chain, Forest, ReadPolicy, Rows
from loopscope.start import keyed_normal
from loopscope.text import TextMixin

_TABLE_START = 4096  # positions of the first rotary table; a context of 262144 would cost hundreds of megabytes before the first token
_START_CHUNKS_KEPT = 64
_START_CHUNK = 64  # start states are made this many positions at a time, so a decode loop rarely makes any


class LoopedCore(TextMixin, nn.Module):
    """A looped language model: prelude, a core block applied T times, coda. Families subclass and wire it.

    A subclass supplies `block_class`, `rotary`, `read_config`, `official_names` and, where it differs, `inject`,
    `close_loop` and `readout`.
    """

    family: ClassVar[str]
    block_class: ClassVar[type[Block]]
    rotary: ClassVar[type]

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = None
        self.source: str | None = None
        self.revision: str | None = None  # the commit, of a model from the Hub
        self.packs = True  # whether caches pack the weights first
        self.quantised: str | None = None  # "int8" once loopscope.models.quantise has made another model of it
        self.placement: dict[str, torch.device] | None = None  # device of each block, where they lie on several

        def blocks(n: int) -> nn.ModuleList:
            return nn.ModuleList(self.block_class(config, self.rotary) for _ in range(n))

        self.wte = Embedding(config.vocab_size, config.d_model)
        self.prelude, self.blocks, self.coda = blocks(config.n_prelude), blocks(config.n_core), blocks(config.n_coda)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.adapter = Linear(2 * config.d_model, config.d_model) if config.injects else None
        self.head = None if config.tied else Linear(config.d_model, config.vocab_size)
        self._table: Tensor | None = None
        self._table_dtype: torch.dtype | None = None
        self._table_positions = min(config.context, _TABLE_START)
        self._start_chunks: dict[tuple, Tensor] = {}

    # ---- what a family supplies -----------------------------------------------------------------------------

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> LoopedConfig:
        raise NotImplementedError

    @classmethod
    def config_of(cls, raw: Mapping[str, Any], names: Collection[str] | None = None) -> LoopedConfig:
        """read_config, and whatever only the checkpoint's tensor names can tell."""
        return cls.read_config(raw)

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        """Own parameter name -> official names; several are concatenated along dim 0."""
        raise NotImplementedError

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        """Official tensors a checkpoint may hold and we do not need -> why."""
        return {}

    @classmethod
    def to_official(cls, name: str, tensor: Tensor, config: LoopedConfig) -> Tensor:
        """The official tensor of an own parameter, where its shape differs."""
        return tensor

    def inject(self, state: Tensor, x: Tensor) -> Tensor:
        """What enters the first core block."""
        return state

    def close_loop(self, state: Tensor) -> Tensor:
        """What leaves one recurrence."""
        return state

    def before_coda(self, state: Tensor) -> Tensor:
        return state

    def before_head(self, h: Tensor) -> Tensor:
        return h

    def unembed(self, h: Tensor) -> Tensor:
        """The head: [batch, n, d_model] -> logits."""
        return self.wte.times(h) if self.head is None else self.head(h)

    def make_rotary_table(self, positions: int) -> Tensor:
        """The rotary table [positions, ...] of `rotary`, in its precision."""
        config = self.config
        return self.rotary.table(rotary_angles(config.d_head, config.rope_theta, positions, config.rope_scaling), self.dtype)

    # ---- the five calls -------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: LoopedConfig) -> LoopedCore:
        """An untrained model of the family that `config` names."""
        from loopscope.models.registry import family_class

        return family_class(config.family)(config)

    @property
    def core(self) -> LoopedCore:
        """Itself: decoders and probes take a LoopedCore or the LoopedModel around one."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.plain().dtype

    @property
    def device(self) -> torch.device:
        return self.wte.plain().device

    @property
    def why_not_lossless(self) -> str:
        """Why no decoder that runs positions in parallel can equal autoregressive decoding here; "" if nothing is in the way."""
        if self.config.kv_slots is None:
            return ""
        return ("earlier recurrences read what the last one left in a shared K/V slot, so a position's own verification changes "
                "what later positions read")

    @property
    def has_start_state(self) -> bool:
        """Whether a start state is drawn at all; otherwise the state starts as the embedding."""
        return self.config.state_std is not None

    def embed(self, tokens: Tensor, rows: Rows | None = None, cache: DepthCache | None = None, tap=None) -> Tensor:
        """tokens [batch, n] (int64) -> x [batch, n, d_model]."""
        rows = rows or Chain(0, tokens.shape[1])
        self._check_context(rows)
        x = self.wte(tokens)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if tap is not None:
            x = tap.embed(x, rows)
        if len(self.prelude):
            plan = outer_plan(rows, cache)
            table = plan.rotary(self.rotary_table)
            for layer, block in enumerate(self.prelude):
                x = block(x, plan, cache and cache.prelude[layer], table, tap and tap.prelude(layer, rows))
        return x

    def start(self, x: Tensor, rows: Rows | None = None, *, seed: int = 0, sequence: int = 0,
              start_state: str | Tensor | None = None) -> Tensor:
        """s_0 [batch, n, d_model] of the rows.

        start_state: None, the family's own (Huginn: a truncated normal keyed by (seed, sequence, position), the same
        for every batch row, so that a row does not depend on its neighbours); "zero"; or a tensor
        [batch or 1, positions, d_model] indexed by absolute position.
        """
        if start_state is None and not self.has_start_state:
            return x
        if not self.has_start_state:
            raise SettingError(f"{self.family} starts from its embedding; it has no start state to set")
        if isinstance(start_state, str):
            if start_state != "zero":
                raise SettingError(f"start_state {start_state!r} is unknown; use None, 'zero' or a tensor")
            return torch.zeros_like(x)
        if start_state is not None and not isinstance(start_state, Tensor):
            raise SettingError(f"start_state must be None, 'zero' or a tensor, got {type(start_state).__name__}")
        rows = rows or Chain(0, x.shape[1])
        positions: Any = rows.at if isinstance(rows, Forest) else rows.positions
        padded, last = False, _end_of(rows) - 1
        if isinstance(rows, Chain) and rows.pads:
            padded, positions = True, token_positions(rows, x.device)
        if isinstance(start_state, Tensor):
            if start_state.ndim != 3 or start_state.shape[2] != x.shape[2] or start_state.shape[1] <= last \
                    or start_state.shape[0] not in (1, x.shape[0]):
                raise SettingError(f"start_state must be [batch, positions, d_model] = [{x.shape[0]}, >= {last + 1}, "
                                   f"{x.shape[2]}], got {list(start_state.shape)}")
            if padded:
                return torch.take_along_dim(start_state.to(x), positions[..., None], dim=1)
            return start_state[:, positions].to(x).expand_as(x)
        if isinstance(rows, Chain) and not padded and rows.start // _START_CHUNK == (rows.start + rows.count - 1) // _START_CHUNK:
            chunk = self._start_chunk(seed, sequence, rows.start // _START_CHUNK, x.dtype, x.device)
            offset = rows.start % _START_CHUNK
            return chunk[offset : offset + rows.count].expand_as(x)
        chunks = [self._start_chunk(seed, sequence, i, x.dtype, x.device)
                  for i in range(last // _START_CHUNK + 1)]
        return torch.cat(chunks)[positions].expand_as(x)

    def carrying(self, state: Tensor, x: Tensor) -> Tensor:
        """A state [batch, n, d_model], as hook_state shows it, in the form that `read` takes. x: what `embed` gave for its rows."""
        return state

    def recur(self, state: Tensor, x: Tensor, rows: Rows | None = None, cache: DepthCache | None = None,
              policy: ReadPolicy = ALIGNED, tap=None) -> Tensor:
        """One recurrence of n rows: state, x [batch, n, d_model] -> state [batch, n, d_model]."""
        rows = rows or Chain(0, state.shape[1])
        plan = core_plan(rows, cache, policy)
        table = plan.rotary(self.rotary_table)
        h = self.inject(state, x)
        if tap is None and cache is not None:
            for block, cached in zip(self.blocks, cache.core):
                h = block(h, plan, cached, table)
            return self.close_loop(h)
        for layer, block in enumerate(self.blocks):
            h = block(h, plan, cache and cache.core[layer], table, tap and tap.block(layer, rows))
        h = self.close_loop(h)
        return h if tap is None else tap.state(h, rows)

    def read(self, state: Tensor, rows: Rows | None = None, cache: DepthCache | None = None, tap=None,
             keep: Tensor | None = None) -> Tensor:
        """state [batch, n, d_model] -> logits [batch, n, vocab]. keep: indices of rows whose logits are wanted; the coda runs on all."""
        rows = rows or Chain(0, state.shape[1])
        h = self.before_coda(state)
        if len(self.coda):
            plan = outer_plan(rows, cache)
            table = plan.rotary(self.rotary_table)
            for layer, block in enumerate(self.coda):
                h = block(h, plan, cache and cache.coda[layer], table, tap and tap.coda(layer, rows))
        h = self.before_head(h if keep is None else h[:, keep])
        if tap is not None:
            h = tap.final(h, rows)
        return self.unembed(h)

    def forward(self, tokens: Tensor, depth: int | None = None, *, start_state: str | Tensor | None = None,
                seed: int = 0, cache: DepthCache | None = None, tap=None, prefix: int = 0,
                attention_mask: Tensor | None = None) -> Tensor:
        """tokens [batch, n] or [n] -> logits [batch, n, vocab] after `depth` recurrences (default: T).

        With a cache the pass continues from `cache.length`, writes K/V at every depth and commits them.
        prefix: how many first positions of the sequence read each other in both directions (PrefixLM models only); all
        of them must be in one call.
        attention_mask: of a batch padded on the left, 1 for tokens and 0 for pads, [batch, n] (or with the cached positions too).
        A token's logits are those of its row without the pads; the logits of pads are finite and mean nothing. The cache
        remembers its pads, so later calls need no mask. Raises PromptError for a mask of any other kind.
        """
        depth = self.trained_depth(depth)
        tokens, rows = self.open_rows(tokens, cache, prefix, attention_mask)
        x = self.embed(tokens, rows, cache, tap)
        state = self.start(x, rows, seed=seed, start_state=start_state)
        for r in range(1, depth + 1):
            rows = rows.at_depth(r)
            state = self.recur(state, x, rows, cache, tap=tap)
        logits = self.read(state, rows, cache, tap)
        if cache is not None:
            cache.commit(rows.start + rows.count)
        return logits

    # ---- helpers --------------------------------------------------------------------------------------------

    def open_rows(self, tokens: Tensor, cache: DepthCache | None = None, prefix: int = 0,
                  attention_mask: Tensor | None = None) -> tuple[Tensor, Chain]:
        """What forward is given -> tokens [batch, n] on this device, and their rows behind what the cache holds."""
        prefix, tokens = self.check_prefix(prefix), self.as_tokens(tokens)
        pads = read_pads(attention_mask, tokens, cache)
        if pads and prefix:
            raise SettingError(f"prefix={prefix} counts the same first positions in every row, but the prompts of a padded batch differ in "
                               "length; run prompts with a prefix one by one")
        if cache is not None:
            if cache.batch != len(tokens):
                raise SettingError(f"this cache holds {cache.batch} sequence(s) and {len(tokens)} were given; make it with "
                                   f"make_cache(..., batch={len(tokens)})")
            cache.pads = pads
        return tokens, Chain(0 if cache is None else cache.length, tokens.shape[1], prefix=prefix, pads=pads)

    def make_cache(self, capacity: int, depth: int | None = None, batch: int = 1, slots: int | None = None,
                   spare: int = 0) -> DepthCache:
        """A DepthCache of this model's sizes, dtype and device. slots: how many K/V slots the depths of a core layer share
        (depth r uses the one of class r mod slots, which is approximate); None: as many as the model itself has. spare: cells
        for branches beyond the last position."""
        self._reach(min(capacity, self.config.context))
        if self.packs:
            self.pack()
        return DepthCache(self.config, capacity, self.trained_depth(depth), batch, self.dtype, self.device, slots, spare,
                          self.placement)

    def pack(self) -> int:
        """Lay large matrices out so that a few rows cost what one does on a CPU (loopscope/models/packing.py); how many are so now.

        make_cache does it unless `packs` is False. A look at a packed parameter brings the plain matrix back.
        """
        return pack_all(self, tied=self.head is None)

    def unpack(self) -> None:
        """Bring all plain matrices back. They are packed again by the next make_cache, unless `packs` is False."""
        unpack_all(self)

    def check_depth(self, depth: int | None) -> int:
        """`depth`, or T. Raises DepthError below 1 or for anything that is not a whole number."""
        if depth is None:
            return self.config.depth
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise DepthError(f"depth must be a whole number of recurrences, got {depth!r}")
        if depth < 1:
            raise DepthError(f"depth must be at least 1 recurrence, got {depth}")
        if depth > MOST_DEPTH:
            raise DepthError(f"depth {depth} is more than the {MOST_DEPTH} recurrences that are supported")
        return depth

    def trained_depth(self, depth: int | None) -> int:
        """check_depth, with a DepthWarning where a model without input injection runs deeper than it was trained to.

        Asked once per call: by forward, and by make_cache for everything that decodes. Huginn, Raven and Parcae are trained at
        depths drawn anew for every batch, and Dory's loops are a setting of each call; in all four the embedding enters every
        recurrence and keeps pulling the state towards what belongs to the input, so more of them refine it. Ouro, Nanbeige and
        HRM-Text (whose H-cycles see the tokens only through the start) have a fixed number of loops, and nothing but the state that
        the last of them left for the head: whatever a further loop makes of it was never trained.
        """
        depth = self.check_depth(depth)
        if depth > self.config.depth and not self.config.injects:
            warn_caller(f"{self.family} was trained with {self.config.depth} recurrences and is fed nothing but its own state: at depth "
                        f"{depth} it runs outside what it was trained for", DepthWarning)
        return depth

    def check_prefix(self, prefix: int) -> int:
        """`prefix`. Raises SettingError below 0, or above 0 where the model reads prompts causally."""
        if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
            raise SettingError(f"prefix must be a whole number of positions of at least 0, got {prefix!r}")
        if prefix and not self.config.prefix_lm:
            raise SettingError(f"{self.family} reads its whole prompt causally; prefix={prefix} is for PrefixLM models")
        return prefix

    def as_tokens(self, tokens: Tensor) -> Tensor:
        """[n] or [batch, n] -> [batch, n] on this device; PromptError for empty input or ids beyond the vocabulary."""
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            found = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise PromptError(f"tokens must be a tensor of whole token ids, got {found}")
        if tokens.ndim == 1:
            tokens = tokens[None]
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise PromptError(f"tokens must be [batch, positions] with at least one position, got {list(tokens.shape)}")
        tokens = tokens.long()
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise PromptError(f"token id {low if low < 0 else high} is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        return tokens.to(self.device)

    @property
    def rotary_table(self) -> Tensor:
        """The rotary table, made on first use (it is not a parameter), for all positions that a call or cache has reached."""
        weight = self.wte.plain()  # once: looking a parameter up is dear in a loop
        if self._table is None or self._table.device != weight.device or self._table_dtype != weight.dtype:
            with torch.inference_mode(False):
                self._table = self.make_rotary_table(self._table_positions).to(self.device)
            self._table_dtype = self.dtype
        return self._table

    def _start_chunk(self, seed: int, sequence: int, index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Start states [chunk, d_model] of one stretch of positions, kept: a decode loop asks for the same ones again."""
        key = (seed, sequence, index, dtype, device)
        if key not in self._start_chunks:
            if len(self._start_chunks) >= _START_CHUNKS_KEPT:
                self._start_chunks.clear()
            with torch.inference_mode(False):
                draw = keyed_normal(seed, sequence, index * _START_CHUNK, _START_CHUNK, self.config.d_model, self.config.state_std)
                self._start_chunks[key] = draw.to(device=device, dtype=dtype)
        return self._start_chunks[key]

    def _check_context(self, rows: Rows) -> None:
        end = _end_of(rows)
        if end > self.config.context:
            raise ContextError(f"position {end - 1} is beyond this model's context of {self.config.context} positions; "
                               "shorten the prompt or ask for fewer new tokens")
        self._reach(end)

    def _reach(self, positions: int) -> None:
        """Let the rotary table hold `positions`, by doubling, so that decoding rarely makes it anew."""
        if positions > self._table_positions:
            self._table_positions = min(self.config.context, max(positions, 2 * self._table_positions))
            self._table = None

    def save_pretrained(self, folder) -> None:
        """Write config.json, safetensors and tokenizer files with official keys and names, in the dtype the model has now."""
        from loopscope.models.saving import save_checkpoint

        save_checkpoint(self, folder)


def _end_of(rows: Rows) -> int:
    """One past the last position that any sequence of the rows reaches; a pad counts as position 0."""
    return max(1, rows.start + rows.count - min(rows.pads, default=0)) if isinstance(rows, Chain) else max(rows.positions) + 1
