"""RecordedRun: the activations of one pass, with recurrence depth as an axis. Imports TransformerLens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from loopscope.errors import HookError, closest
from loopscope.hook_names import SHORT_NAMES, STATE, block_prefix, cycle_of, depth_of, layer_of
from loopscope.interop import attention_view, to_xarray
from loopscope.models.layers import BranchSandwichBlock, PostNormBlock, SumSandwichBlock
from loopscope.models.looped import LoopedCore

if TYPE_CHECKING:
    from loopscope.models.config import LoopedConfig
    from loopscope.models.hooked import LoopedModel
    from loopscope.models.layers import Block

_OUTER = ("prelude", "coda")


def why_not_additive(core: LoopedCore) -> str:
    """What keeps the residual stream of this model from being a sum of its components, in words; "" if nothing does."""
    reasons = []
    if isinstance(core.blocks[0], SumSandwichBlock):
        reasons.append("a norm acts on the residual sum in every block")
    if core.family == "dory":
        reasons.append("every block norms the stream and moves it towards a branch's output instead of adding to it")
    if core.config.inner_cycles:
        reasons.append("two stacks take turns inside a recurrence, and a norm closes every cycle")
    if core.adapter is not None:
        reasons.append("an adapter mixes state and embedding between loops")
    if type(core).close_loop is not LoopedCore.close_loop:
        reasons.append("a norm closes every loop")
    return " and ".join(reasons)


def why_heads_do_not_add_up(core: LoopedCore) -> str:
    """What keeps an attention's output from being the sum of its heads' z times their rows of W_O, in words; "" if nothing does."""
    if core.family == "hrm_text":
        return "a gate acts on what heads read before it is projected"
    if core.family == "dory" or isinstance(core.blocks[0], (BranchSandwichBlock, PostNormBlock)):
        return "a norm acts on what its heads add together"
    return ""


# Methods of ActivationCache that add components up, or scale them by the norm scales of an additive stream.
_ADDITIVE = ("decompose_resid", "get_full_resid_decomposition", "logit_attrs", "logit_lens", "apply_ln_to_stack",
             "get_neuron_results", "stack_neuron_results",
             "ssm_layers", "compute_ssm_state", "compute_ssm_effective_attention")


class _Weights:
    """What TransformerLens's head results read of a model: `[block].attn.W_O` [heads, d_head, d_model] of the (unrolled) core."""

    def __init__(self, core: LoopedCore) -> None:
        self._core = core

    def __getitem__(self, block: int) -> SimpleNamespace:
        config, blocks = self._core.config, self._core.blocks
        weight = cast("Block", blocks[block % len(blocks)]).attn.out.weight
        return SimpleNamespace(attn=SimpleNamespace(W_O=weight.T.unflatten(0, (config.n_heads, config.d_head))))


class LoopedCache(ActivationCache):
    """An ActivationCache of a looped model: what would be silently wrong on its residual stream raises HookError.

    `blocks`: how many blocks its names count (0: its names carry depths, so TransformerLens's stacking has no meaning).
    """

    def __init__(self, cache_dict: dict[str, Tensor], looped: LoopedModel, blocks: int, has_batch_dim: bool = True) -> None:
        c: LoopedConfig = looped.config
        cfg = SimpleNamespace(n_layers=blocks, n_heads=c.n_heads, n_key_value_heads=c.n_kv_heads, d_head=c.d_head, d_model=c.d_model,
                              d_mlp=c.d_mlp, d_vocab=c.vocab_size, n_ctx=c.context, normalization_type="RMS", attn_only=False)
        super().__init__(cache_dict, SimpleNamespace(cfg=cfg, blocks=_Weights(looped.core)), has_batch_dim)
        self.looped = looped
        self.blocks = blocks

    def _like(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> LoopedCache:
        return LoopedCache(cache_dict, self.looped, self.blocks, has_batch_dim)

    def __getitem__(self, key: Any) -> Tensor:
        try:
            return super().__getitem__(key)
        except KeyError as error:
            raise HookError(f"{key!r} was not recorded; closest: {closest(str(error.args[0]), self.cache_dict) or 'nothing was'}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.cache_dict)} activations"

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> LoopedCache:
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return self._like(sliced.cache_dict, sliced.has_batch_dim)

    def accumulated_resid(self, *args: Any, apply_ln: bool = False, **options: Any) -> Any:
        """The stream at every block, as it was; only without apply_ln, whose scales assume an additive stream."""
        if apply_ln or any(args[2:3]):  # apply_ln is TransformerLens's third argument
            self._refuse("accumulated_resid(apply_ln=True)")
        self._need_blocks("accumulated_resid")
        return super().accumulated_resid(*args, **options)

    def stack_activation(self, *args: Any, **options: Any) -> Tensor:
        self._need_blocks("stack_activation")
        return super().stack_activation(*args, **options)

    def compute_head_results(self) -> None:
        """TransformerLens's: each head's part of hook_attn_out, as attn.hook_result. Raises HookError where heads do not add up to it."""
        self._need_heads("compute_head_results")
        super().compute_head_results()

    def stack_head_results(self, layer: int = -1, return_labels: bool = False, incl_remainder: bool = False, pos_slice: Any = None,
                           apply_ln: bool = False) -> Any:
        """TransformerLens's: every head's part of hook_attn_out, [head of a block, ...]; those of a block add up to it.

        Raises HookError where they do not (a gate, or a norm on the attention's output), and for incl_remainder and apply_ln,
        which take the stream for a sum. What a head adds to a logit: probes.head_attribution.
        """
        if incl_remainder or apply_ln:
            self._refuse(f"stack_head_results({'incl_remainder' if incl_remainder else 'apply_ln'}=True)")
        self._need_heads("stack_head_results")
        return super().stack_head_results(layer, return_labels, pos_slice=pos_slice)

    def _need_heads(self, method: str) -> None:
        reason = why_heads_do_not_add_up(self.looped.core)
        if reason:
            raise HookError(f"{method} would be wrong on {self.looped.family}: it takes an attention's output for the sum of its heads, "
                            f"but {reason}. Use probes.head_attribution for what each head adds to a logit")
        self._need_blocks(method)

    def _need_blocks(self, method: str) -> None:
        if not self.blocks:
            raise HookError(f"{method} counts blocks without depth; use .stack(name), or .unrolled() and then {method}")

    def _refuse(self, method: str) -> NoReturn:
        reason = why_not_additive(self.looped.core) or "its weights have no TransformerLens layout"
        raise HookError(f"{method} would be wrong on {self.looped.family}: it takes the residual stream for a sum of components, "
                        f"but {reason}. Use probes.attribution for what each component adds to a logit, probes.depth_lens for predictions "
                        "by depth, or edit activations through hooks")


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: LoopedCache, *args: Any, **options: Any) -> NoReturn:
        self._refuse(name)

    refuse.__name__ = name
    refuse.__doc__ = "Raises HookError: the residual stream of a looped model is not a sum of its components."
    return refuse


for _name in _ADDITIVE:
    setattr(LoopedCache, _name, _refusal(_name))


class RecordedRun(LoopedCache):
    """What run_with_cache recorded. String keys are hook names; a tuple counts depths.

        run["depth.2.blocks.0.attn.hook_v"]    any hook name, as in TransformerLens
        run["v", depth, layer]                 q, k, v, rot_q, rot_k, pattern, z, attn_out, mlp_out, resid_pre, _mid, _post
        run["state", depth]                    the state after `depth` recurrences
        run["v", "prelude", layer]             the same names in prelude and coda
        run.stack("v")                         [depth, layer, batch, pos, head, d_head]
        run.at_depth(r), run.unrolled()        one recurrence, or all of them, under TransformerLens's block names
        run.to_xarray()                        an xarray dataset with named axes (extra: interop)
        run.attention_view(depth, layer)       circuitsvis's view of a layer's patterns (extra: interop)

    Depths count 1..`depth`; negative depths and layers count from the end. Raises HookError for what was not recorded.
    """

    def __init__(self, cache_dict: dict[str, Tensor], looped: LoopedModel, depth: int, has_batch_dim: bool = True,
                 tokens: Tensor | None = None, positions: Tensor | None = None) -> None:
        super().__init__(cache_dict, looped, 0, has_batch_dim)
        self.depth = depth
        self.tokens, self.positions = tokens, positions  # [batch, n] of the call, and those of its positions that were recorded

    def _like(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> RecordedRun:
        return RecordedRun(cache_dict, self.looped, self.depth, has_batch_dim, self.tokens, self.positions)

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> RecordedRun:
        sliced = cast(RecordedRun, super().apply_slice_to_batch_dim(batch_slice))
        if self.tokens is not None:
            cut = Slice.unwrap(batch_slice).apply(self.tokens, dim=0)
            sliced.tokens = cut if cut.ndim == 2 else cut[None]
        return sliced

    def _repr_html_(self) -> str:
        """Every kind of value once, with the depths at which it was recorded, for Jupyter."""
        from html import escape

        kinds: dict[str, tuple[list[int], int, list[int]]] = {}
        for name, value in self.cache_dict.items():
            depth = depth_of(name)
            kind = name if depth is None else name.replace(f"depth.{depth}.", "depth.{r}.", 1)
            depths, count, _ = kinds.get(kind, ([], 0, []))
            kinds[kind] = depths + ([depth] if depth is not None else []), count + 1, list(value.shape)
        rows = "".join(f"<tr><td><code>{escape(kind)}</code></td><td>{f'{min(r)} to {max(r)}' if r else ''}</td><td>{n}</td>"
                       f"<td>{shape}</td></tr>" for kind, (r, n, shape) in kinds.items())
        return (f"<p>{len(self.cache_dict)} recorded tensors, depths 1 to {self.depth}</p><table><tr><th>hook</th><th>depths r</th>"
                f"<th>tensors</th><th>shape</th></tr>{rows}</table>")

    def __getitem__(self, key: Any) -> Tensor:
        name = self._full_name(*key) if isinstance(key, tuple) else key
        return super().__getitem__(name)

    def depths_of(self, short: str) -> list[int]:
        """The depths at which a short name ("v", "state", ...) was recorded, ascending."""
        name = self._kind(short)
        return sorted({r for n in self.cache_dict if (r := depth_of(n)) is not None and n.endswith("." + name)})

    def stack(self, short: str, depths: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> Tensor:
        """One name over depths and core layers: [depth, layer, ...], for "state" [depth, ...].

        depths and layers: all of the run unless given. Raises HookError if one of them was not recorded.
        """
        wanted = list(range(1, self.depth + 1)) if depths is None else [self._depth(r) for r in depths]
        missing = sorted(set(wanted) - set(self.depths_of(short)))
        if missing:
            raise HookError(f"{short!r} was not recorded at {_listed('depth', missing)}{self._recorded(short)}")
        if short == "state":
            return torch.stack([self[short, r] for r in wanted])
        chosen = range(self.looped.config.n_core) if layers is None else layers
        return torch.stack([torch.stack([self[short, r, layer] for layer in chosen]) for r in wanted])

    def at_depth(self, depth: int) -> LoopedCache:
        """One recurrence as an ActivationCache: `blocks.{layer}.attn.hook_v` ..., and `hook_state`."""
        prefix = f"depth.{self._depth(depth)}."
        names = {n.removeprefix(prefix): t for n, t in self.cache_dict.items() if n.startswith(prefix)}
        if not names:
            raise HookError(f"nothing was recorded at depth {depth}")
        return LoopedCache(names, self.looped, self.looped.config.n_core, self.has_batch_dim)

    def unrolled(self) -> LoopedCache:
        """An ActivationCache over the virtually unrolled core: `blocks.{(r - 1) * L + layer}.attn.hook_v` and so on.

        The state after recurrence r is `blocks.{r * L - 1}.hook_state`; embedding, prelude, coda and head keep their
        names. Between loops resid_post of one block and resid_pre of the next differ by the family's adapter or norm.
        Inner cycles (HRM-Text) are blocks of their own, in the order they run: L is then n_core (inner_cycles + 1).
        """
        config = self.looped.config
        layers = config.n_core * (config.inner_cycles + 1)

        def rename(name: str) -> str:
            r = depth_of(name)
            if r is None:
                return name
            layer, cycle = layer_of(name), cycle_of(name) or config.inner_cycles + 1
            block = (r - 1) * layers + (layers - 1 if layer is None else (cycle - 1) * config.n_core + layer)
            return f"blocks.{block}." + re.sub(r"^depth\.\d+\.(l_cycle\.\d+\.)?(blocks\.\d+\.)?", "", name)

        renamed = {rename(n): t for n, t in self.cache_dict.items()}
        return LoopedCache(renamed, self.looped, self.depth * layers, self.has_batch_dim)

    # ---- for others' tools (loopscope/interop.py) -------------------------------------------------------------

    def to_xarray(self) -> Any:
        """Everything recorded as an xarray.Dataset with named axes: loopscope.interop.to_xarray. Needs the extra `interop`."""
        return to_xarray(self)

    def attention_view(self, depth: int | str, layer: int, batch: int = 0, tokens: list[str] | None = None) -> Any:
        """circuitsvis's view of a layer's attention patterns: loopscope.interop.attention_view. Needs the extra `interop`."""
        return attention_view(self, depth, layer, batch, tokens)

    def token_texts(self, batch: int, count: int) -> list[str]:
        """Texts of the recorded tokens of one sequence; ids without a tokenizer, positions where the tokens are not known."""
        if self.tokens is None or self.tokens.shape[1] != count:
            return [str(i) for i in range(count)]
        tokenizer = self.looped.tokenizer
        return [str(i) if tokenizer is None else tokenizer.decode([i], skip_special_tokens=False) for i in self.tokens[batch].tolist()]

    # ---- names ----------------------------------------------------------------------------------------------

    def _kind(self, short: str) -> str:
        if short == "state":
            return STATE
        if short not in SHORT_NAMES:
            raise HookError(f"{short!r} is not a recorded name; use 'state' or one of {', '.join(map(repr, SHORT_NAMES))}")
        return SHORT_NAMES[short]

    def _full_name(self, short: str, depth: int | str | None = None, layer: int | None = None) -> str:
        name = self._kind(short)
        if depth is None:
            raise HookError(f"{short!r} needs a depth: run[{short!r}, {'depth' if short == 'state' else 'depth, layer'}]")
        if short == "state":
            if layer is not None:
                raise HookError("the state has a depth and no layer: run['state', depth]")
            full = f"depth.{self._depth(depth)}.{name}"
        else:
            if layer is None:
                raise HookError(f"{short!r} needs a depth and a layer: run[{short!r}, depth, layer]")
            full = self._block(depth, layer) + name
        if full not in self.cache_dict:
            raise HookError(f"{full!r} was not recorded{self._recorded(short)}")
        return full

    def _block(self, depth: int | str, layer: int) -> str:
        config = self.looped.config
        part = depth if depth in _OUTER else "blocks"
        count = {"prelude": config.n_prelude, "coda": config.n_coda, "blocks": config.n_core}[part]
        if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
            where = "the core" if part == "blocks" else f"the {part}"
            raise HookError(f"layer {layer!r} is outside {where}, which has {f'layers 0 to {count - 1}' if count else 'no layers'}")
        return block_prefix(part, layer % count, None if part != "blocks" else self._depth(depth))

    def _depth(self, depth: int | str) -> int:
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise HookError(f"a depth is a whole number, or 'prelude' or 'coda'; got {depth!r}")
        if depth == 0:
            raise HookError(f"depth 0 is the start state, before any recurrence; this run recorded depths 1 to {self.depth}")
        if not -self.depth <= depth <= self.depth:
            raise HookError(f"depth {depth} is outside this run, which recorded depths 1 to {self.depth}; run with depth={abs(depth)}")
        return depth if depth > 0 else self.depth + 1 + depth

    def _recorded(self, short: str) -> str:
        depths = self.depths_of(short)
        return f"; {short!r} was recorded at {_listed('depth', depths)}" if depths else f"; names_filter kept no {short!r}"


def _listed(what: str, numbers: Sequence[int]) -> str:
    """"depth 3", "depths 1 to 4" or "depths 1, 3"."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers))}"
