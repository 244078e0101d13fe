"""LoopedModel: TransformerLens hooks at every recurrence depth, around a LoopedCore.

The core computes; this module only names activations and fires hook points. Where nothing is hooked the core runs
with no tap at all. Names: loopscope/hook_names.py. Importing this module imports TransformerLens (seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint, LensHandle
from transformer_lens.utilities import Slice
from transformer_lens.utilities import remove_batch_dim as drop_batch_dim

from loopscope.cache import DepthCache
from loopscope.errors import HookError, SettingError
from loopscope.hook_names import NamesFilter, depth_of, hook_names, layer_of, match_names, position_axis
from loopscope.models.config import LoopedConfig
from loopscope.models.looped import LoopedCore
from loopscope.recorded import RecordedRun
from loopscope.rows import ALIGNED, Chain, ReadPolicy, Rows
from loopscope.tap import Hooks, Tap, check_pairs
from loopscope.text import TextMixin

RETURN_TYPES = ("logits", "loss", "both", None)
_NO_TARGET = -100
Direction = Literal["fwd", "bwd"]


class DepthHookPoint(HookPoint):
    """A TransformerLens HookPoint that knows its recurrence depth, and keeps the model's set of hooked names right."""

    name: str

    def __init__(self, name: str, active: set[str]) -> None:
        super().__init__()
        self.name = name
        self._active = active

    def depth(self) -> int:
        """Recurrences applied when this fires, 1..T. Raises HookError outside the core."""
        return self._known(depth_of(self.name), "recurrence depth: it is outside the looped core")

    def layer(self) -> int:
        """Block index within prelude, core or coda (TransformerLens's own would read the depth). Raises HookError."""
        return self._known(layer_of(self.name), "layer: it is outside the blocks")

    def _known(self, value: int | None, what: str) -> int:
        if value is None:
            raise HookError(f"{self.name!r} has no {what}")
        return value

    def add_hook(self, *args: Any, **kwargs: Any) -> LensHandle:
        handle = super().add_hook(*args, **kwargs)
        self._active.add(self.name)
        return handle

    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        super().remove_hooks(*args, **kwargs)
        if not self.fwd_hooks and not self.bwd_hooks:
            self._active.discard(self.name)


class HookTap(Tap):
    """Fires the model's hook points. The context is set at every firing: TransformerLens clears it on reset."""

    def __init__(self, model: LoopedModel, hook_drafts: bool = False) -> None:
        super().__init__(hook_drafts)
        self.model = model

    def wants(self, name: str) -> bool:
        return name in self.model._active

    def fire(self, name: str, tensor: Tensor, context: dict[str, Any]) -> Tensor:
        point = self.model.hook_dict[name]
        point.ctx.update(context)
        return point(tensor)

    def embed(self, x: Tensor, rows: Rows) -> Tensor:
        # Loaded parameters need no gradient, so a graph for backward hooks has to begin at the embedding.
        if torch.is_grad_enabled() and not x.requires_grad and self.model._hooked_backward():
            x = x.requires_grad_()
        return super().embed(x, rows)

    def _groups(self, rows: Rows, by_depth: bool):
        groups = super()._groups(rows, by_depth)
        if by_depth and groups:
            self.model.grow(max(group.depth or 0 for group in groups))  # a carried draft may run deeper than the target
        return groups


class _Predicate(NamedTuple):
    """A hook added by predicate: it also belongs on the points that growing the tree makes later."""

    matches: Callable[[str], bool]
    hook: Callable[..., Any]
    dir: Direction
    is_permanent: bool
    level: int | None
    prepend: bool


class LoopedModel(TextMixin, HookedRootModule):
    """A looped model whose every activation, at every depth, is a TransformerLens hook.

    `model(tokens_or_text, depth=T)` -> logits; run_with_cache, run_with_hooks, hooks, add_hook and reset_hooks as in
    TransformerLens; `.core` is the LoopedCore, which decoders run. The hook tree holds depths 1..T and grows when a
    call runs deeper. A name or filter that matches nothing raises HookError.
    """

    def __init__(self, core: LoopedCore) -> None:
        super().__init__()
        self._active: set[str] = set()
        self._predicates: list[_Predicate] = []
        self._tree_depth = 0
        self.core = core
        self.grow(core.config.depth)
        self.train(core.training)

    # ---- the core's calls, with whatever hooks are active ---------------------------------------------------

    @property
    def config(self) -> LoopedConfig:
        return self.core.config

    @property
    def tokenizer(self) -> Any:
        return self.core.tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.core.tokenizer = value

    @property
    def family(self) -> str:
        return self.core.family

    @property
    def source(self) -> str | None:
        return self.core.source

    @property
    def device(self) -> torch.device:
        return self.core.device

    @property
    def dtype(self) -> torch.dtype:
        return self.core.dtype

    @property
    def has_start_state(self) -> bool:
        return self.core.has_start_state

    def check_depth(self, depth: int | None) -> int:
        return self.core.check_depth(depth)

    def make_cache(self, capacity: int, depth: int | None = None, batch: int = 1, slots: int | None = None) -> DepthCache:
        return self.core.make_cache(capacity, depth, batch, slots)

    def save_pretrained(self, folder) -> None:
        """Write config.json, safetensors and tokenizer files with official keys and names, in the dtype the model has now."""
        self.core.save_pretrained(folder)

    def embed(self, tokens: Tensor, rows: Rows | None = None, cache: DepthCache | None = None) -> Tensor:
        return self.core.embed(tokens, rows, cache, self.tap())

    def start(self, x: Tensor, rows: Rows | None = None, **options: Any) -> Tensor:
        return self.core.start(x, rows, **options)

    def carrying(self, state: Tensor, x: Tensor) -> Tensor:
        return self.core.carrying(state, x)

    def recur(self, state: Tensor, x: Tensor, rows: Rows | None = None, cache: DepthCache | None = None,
              policy: ReadPolicy = ALIGNED) -> Tensor:
        self.grow(max((rows or Chain(0, 1)).depths))
        return self.core.recur(state, x, rows, cache, policy, self.tap())

    def read(self, state: Tensor, rows: Rows | None = None, cache: DepthCache | None = None) -> Tensor:
        return self.core.read(state, rows, cache, self.tap())

    def forward(self, tokens: Tensor | str | list[str], depth: int | None = None, *, return_type: str | None = "logits",
                start_state: str | Tensor | None = None, seed: int = 0, cache: DepthCache | None = None, prefix: int = 0,
                attention_mask: Tensor | None = None) -> Any:
        """tokens [batch, n] or [n], or text -> logits [batch, n, vocab] after `depth` recurrences (default: T).

        return_type: "logits", "loss" (mean next-token cross-entropy in nats), "both" or None, as in TransformerLens.
        prefix: how many first positions read each other in both directions (PrefixLM models only).
        attention_mask [batch, n]: 0 for the pads on the left of each row, 1 for its tokens; as in LoopedCore.forward. Hooks
        see pads too, [batch, pos, ...], and count columns; a loss leaves them out.
        """
        if return_type not in RETURN_TYPES:
            raise SettingError(f"return_type {return_type!r} is unknown; use one of {', '.join(map(repr, RETURN_TYPES))}")
        depth = self.check_depth(depth)
        self.grow(depth)
        if cache is not None and torch.is_grad_enabled() and self._hooked_backward():
            raise HookError("backward hooks cannot run with a cache, which is overwritten in place; run without one")
        tokens = self._as_tokens(tokens)
        logits = self.core(tokens, depth, start_state=start_state, seed=seed, cache=cache, tap=self.tap(), prefix=prefix,
                           attention_mask=attention_mask)
        if return_type in ("logits", None):
            return logits if return_type else None
        targets = tokens[:, 1:]
        if attention_mask is not None:
            real = attention_mask.to(tokens.device).bool().view(len(tokens), -1)[:, -tokens.shape[1] : -1]
            targets = targets.masked_fill(~real, _NO_TARGET)  # what follows a pad is predicted from nothing
        if not (targets != _NO_TARGET).any():
            raise SettingError("a next-token loss needs at least two tokens")
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
                                           targets.flatten(), ignore_index=_NO_TARGET)
        return (logits, loss) if return_type == "both" else loss

    def _as_tokens(self, tokens: Tensor | str | list[str]) -> Tensor:
        if isinstance(tokens, str) or (isinstance(tokens, list) and tokens and isinstance(tokens[0], str)):
            return self.to_tokens(tokens)
        return self.core.as_tokens(torch.as_tensor(tokens))

    # ---- the tree -------------------------------------------------------------------------------------------

    def grow(self, depth: int) -> None:
        """Make the hook points of depths up to `depth`. Hooks added by predicate are put on the new ones too."""
        if depth <= self._tree_depth:
            return
        new = [name for name in hook_names(self.config, depth)
               if not self._tree_depth or (depth_of(name) or 0) > self._tree_depth]
        for name in new:
            node: nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if step not in node._modules:
                    node.add_module(step, nn.Module())
                node = cast(nn.Module, node._modules[step])
            node.add_module(leaf, DepthHookPoint(name, self._active))
        self._tree_depth = depth
        self.setup()
        for p in self._predicates:
            for name in filter(p.matches, new):
                self.hook_dict[name].add_hook(p.hook, p.dir, p.is_permanent, p.level, p.prepend)

    def setup(self) -> None:
        super().setup()
        order = hook_names(self.config, self._tree_depth)
        self.hook_dict = {name: self.hook_dict[name] for name in order}  # firing order

    def tap(self, hook_drafts: bool = False) -> HookTap | None:
        """A tap that fires the hooks now on the model; None where there are none."""
        return HookTap(self, hook_drafts) if self._active else None

    @contextmanager
    def tapped(self, fwd_hooks: Hooks = (), hook_drafts: bool = False, depth: int | None = None) -> Iterator[HookTap | None]:
        """`fwd_hooks` on the model for the time of a `with`; gives the tap to pass to the core, or None."""
        depth = self.check_depth(depth)
        self.grow(depth)
        self._check_hooks(fwd_hooks, depth)
        with self.hooks(fwd_hooks):
            yield self.tap(hook_drafts)

    def _hooked_backward(self) -> bool:
        return any(self.hook_dict[name].bwd_hooks for name in self._active)

    # ---- TransformerLens's own ways, made to refuse what matches nothing ------------------------------------

    def add_hook(self, name: NamesFilter, hook: Callable[..., Any], dir: Direction = "fwd", is_permanent: bool = False,
                 level: int | None = None, prepend: bool = False) -> None:
        """name: a hook name, several, or a predicate. Raises HookError if it matches nothing."""
        for match in match_names(name, self.hook_dict):
            self.check_and_add_hook(self.hook_dict[match], match, hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)
        if callable(name):
            self._predicates.append(_Predicate(name, hook, dir, is_permanent, level, prepend))

    def _enable_hook(self, name: NamesFilter, hook: Callable[..., Any], dir: Direction) -> None:
        self.add_hook(name, hook, dir=dir, level=self.context_level)

    def remove_all_hook_fns(self, direction: Literal["fwd", "bwd", "both"] = "both", including_permanent: bool = False,
                            level: int | None = None) -> None:
        super().remove_all_hook_fns(direction, including_permanent, level)
        self._predicates = [p for p in self._predicates
                            if direction not in ("both", p.dir) or (p.is_permanent and not including_permanent)
                            or (level is not None and p.level != level)]

    @contextmanager
    def hooks(self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True, clear_contexts: bool = False):
        """Hooks for the time of a `with`. Raises HookError, before adding any, if a name or filter matches nothing."""
        self._check_hooks((*fwd_hooks, *bwd_hooks), self._tree_depth)
        with super().hooks(_as_list(fwd_hooks), _as_list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    def run_with_hooks(self, *args: Any, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), **options: Any) -> Any:
        """TransformerLens's run_with_hooks. Raises HookError for a hook that this call, at its depth, would never fire."""
        self._check_hooks((*fwd_hooks, *bwd_hooks), self._grow_for(args, options))
        return super().run_with_hooks(*args, fwd_hooks=_as_list(fwd_hooks), bwd_hooks=_as_list(bwd_hooks), **options)

    def run_with_cache(self, tokens: Tensor | str | list[str], *args: Any,  # type: ignore[override]
                       names_filter: NamesFilter = None, return_cache_object: bool = True, remove_batch_dim: bool = False,
                       incl_bwd: bool = False, **options: Any) -> tuple[Any, RecordedRun | dict[str, Tensor]]:
        """(what the model returns, RecordedRun of the activations at the hooks that names_filter selects).

        Options: those of forward, and TransformerLens's device, pos_slice, reset_hooks_end, clear_contexts. incl_bwd
        needs return_type="loss". return_cache_object False gives a plain dict. Activations are copies.
        Recording hook_pattern writes the softmax out, so logits may differ from the fused kernel's in the last bits.
        """
        tokens = self._as_tokens(tokens)
        depth = self._grow_for((tokens, *args), options)
        names = match_names(names_filter, dict.fromkeys(hook_names(self.config, depth)))
        if incl_bwd and (options.get("return_type") != "loss" or not torch.is_grad_enabled()):
            raise HookError("incl_bwd calls backward on what the model returns: pass return_type='loss', with gradients enabled")
        cache = options.get("cache")
        first = 0 if cache is None else cache.length
        out, activations = super().run_with_cache(tokens, *args, names_filter=names, remove_batch_dim=remove_batch_dim,
                                                  incl_bwd=incl_bwd, **options)
        if not return_cache_object:
            return out, activations
        positions = Slice.unwrap(options.get("pos_slice")).apply(torch.arange(first, first + tokens.shape[1]), dim=0).reshape(-1)
        return out, RecordedRun(activations, self, depth, not (remove_batch_dim and tokens.shape[0] == 1), tokens, positions)

    def get_caching_hooks(self, names_filter: NamesFilter = None, incl_bwd: bool = False, device=None,
                          remove_batch_dim: bool = False, cache: dict | None = None, pos_slice=None) -> tuple[dict, list, list]:
        """TransformerLens's, but knowing the position axis of hook_rot_q and hook_rot_k, and copying what it keeps."""
        cache = {} if cache is None else cache
        pos_slice = Slice.unwrap(pos_slice)
        self.is_caching = True

        def save(tensor: Tensor, hook: DepthHookPoint, suffix: str) -> None:
            kept = pos_slice.apply(tensor.detach(), dim=position_axis(hook.name))
            kept = kept.to(device, copy=True)  # otherwise a later hook that edits in place would rewrite the record
            cache[hook.name + suffix] = drop_batch_dim(kept) if remove_batch_dim else kept

        names = match_names(names_filter, self.hook_dict)
        forward = [(name, partial(save, suffix="")) for name in names]
        return cache, forward, [(name, partial(save, suffix="_grad")) for name in names] if incl_bwd else []

    def add_caching_hooks(self, names_filter: NamesFilter = None, incl_bwd: bool = False, device=None,
                          remove_batch_dim: bool = False, cache: dict | None = None) -> dict:
        """Leave caching hooks on the model; returns the dict that later calls fill."""
        cache, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, hook in forward:
            self.add_hook(name, hook, dir="fwd")
        for name, hook in backward:
            self.add_hook(name, hook, dir="bwd")
        return cache

    def _grow_for(self, args: tuple, options: dict[str, Any]) -> int:
        depth = self.check_depth(args[1] if len(args) > 1 else options.get("depth"))
        self.grow(depth)
        return depth

    def _check_hooks(self, hooks: Hooks, depth: int) -> None:
        known = dict.fromkeys(hook_names(self.config, depth)) if hooks else {}
        for name, _ in check_pairs(hooks):
            match_names(name, known)


def _as_list(hooks: Hooks) -> list[tuple[Any, Callable[..., Any]]]:
    return list(hooks)  # TransformerLens's annotation knows no names_filter lists; ours does
