"""from_bridge: a depth clock on TransformerLens's own bridge of a looped model, as a cross-check of our numbers.

    clock = from_bridge(TransformerBridge.boot_transformers("ByteDance/Ouro-1.4B", trust_remote_code=True))
    logits, run = clock.run_with_cache(tokens)          run["v", depth, layer], run.stack("v"): as from our own LoopedModel

TransformerLens (4.3) leaves the loop to the model it wraps: a hook of the core fires once per recurrence, always under one name, and
its run_with_cache keeps the last. The clock counts the firings instead: the r-th firing of a hook is depth r. Ouro, Huginn (its
`Raven` adapter, which asks for Huginn's four norms, so no retrofit's) and HRM-Text have a bridge there; nothing here is remote code.

What was compared (tests/loopscope/test_bridge.py): HRM-Text against transformers' own class. Ouro's and Huginn's classes are remote code,
so there TransformerLens's adapters wrap stand-ins of ours with the official names and equations, which give the official code's
stored logits; a bridge around the released code itself was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loopscope.errors import HookError, UnknownModelError
from loopscope.hook_names import EMBED, FINAL, PATTERN, STATE, NamesFilter, block_prefix, hook_names, match_names
from loopscope.models.config import LoopedConfig
from loopscope.models.registry import config_from_dict, family_class
from loopscope.recorded import RecordedRun

_HEADS = {f"attn.hook_{x}": f"attn.{x}.hook_out" for x in "qkv"} | {f"attn.hook_rot_{x}": f"attn.hook_rot_{x}" for x in "qk"}
_OURO = _HEADS | {"hook_resid_pre": "hook_in", PATTERN: "attn.hook_pattern", "attn.hook_z": "attn.o.hook_in",
                  "hook_attn_out": "ln1_post.hook_out", "hook_resid_mid": "ln2.hook_in", "hook_mlp_out": "ln2_post.hook_out",
                  "hook_resid_post": "hook_out"}
# What is read before the gate has no hook there.
_HRM_TEXT = _HEADS | {"hook_resid_pre": "hook_in", PATTERN: "attn.hook_pattern", "hook_attn_out": "attn.hook_out",
                      "hook_resid_mid": "ln2.hook_in", "hook_mlp_out": "mlp.hook_out", "hook_resid_post": "hook_out"}
# Attention is left to the model there: what is rotated and the pattern have no hooks.
_HUGINN = {"hook_resid_pre": "hook_in", **{f"attn.hook_{x}": "attn.qkv.hook_out" for x in "qkv"}, "attn.hook_z": "attn.o.hook_in",
           "hook_attn_out": "attn.hook_out", "hook_resid_mid": "norm_2.hook_out", "hook_mlp_out": "mlp.hook_out",
           "hook_resid_post": "hook_out"}


@dataclass(frozen=True)
class _Layout:
    """Where a family's activations are on its bridge. stacks: our part -> its block list; inner: that of the inner cycles."""

    block: dict[str, str]
    stacks: dict[str, str]
    state: str
    final: str
    inner: str | None = None


_LAYOUTS = {
    "ouro": _Layout(_OURO, {"blocks": "blocks"}, "ln_final.hook_out", "ln_final.hook_out"),
    "huginn": _Layout(_HUGINN, {"prelude": "prelude", "blocks": "core_block", "coda": "coda"}, "core_block.{last}.hook_out",
                      "ln_final.hook_out"),
    "hrm_text": _Layout(_HRM_TEXT, {"blocks": "H_blocks"}, "H_ln_final.hook_out", "H_ln_final.hook_out", "L_blocks"),
}


@dataclass(frozen=True)
class _Site:
    """A hook of the bridge. name: ours for its i-th firing, from 0. core: firings per recurrence, 0 outside the core."""

    hook: str
    name: Callable[[int], str]
    shaped: Callable[[Tensor], Tensor]
    core: int = 0


class DepthClock:
    """Counts the firings of a bridge's hooks in one pass, and keeps what they saw under the name that the count gives."""

    def __init__(self, sites: Sequence[_Site], wanted: Callable[[str], bool]) -> None:
        self.sites: dict[str, list[_Site]] = {}
        for site in sites:
            self.sites.setdefault(site.hook, []).append(site)
        self.wanted, self.ticks = wanted, dict.fromkeys(self.sites, 0)
        self.seen: dict[str, Tensor] = {}
        self.names: set[str] = set()

    def __call__(self, tensor: Tensor, hook: Any) -> None:
        for site in self.sites[hook.name]:
            name = site.name(self.ticks[hook.name])
            self.names.add(name)
            if self.wanted(name):
                self.seen[name] = site.shaped(tensor.detach()).clone()  # a later hook may edit in place
        self.ticks[hook.name] += 1

    def depth(self) -> int:
        """How many recurrences the hooks of the core counted; those that never fire (attention kept native) do not vote."""
        counts = {hook: self.ticks[hook] / sites[0].core for hook, sites in self.sites.items() if sites[0].core and self.ticks[hook]}
        if len(set(counts.values())) != 1 or not max(counts.values()).is_integer():
            found = sorted(counts, key=counts.__getitem__)
            shown = ", ".join(f"{hook} {counts[hook]:g}" for hook in dict.fromkeys((*found[:1], *found[-1:]))) or "none fired"
            raise HookError(f"the hooks of the core disagree on the number of recurrences ({shown}), so the clock cannot tell depths; "
                            "run the whole sequence in one full pass, without adaptive exit")
        return int(max(counts.values()))


class BridgedModel:
    """A TransformerLens bridge whose runs are recorded under our hook names. `config` is read from the wrapped model's own config."""

    def __init__(self, bridge: Any, config: LoopedConfig) -> None:
        self.bridge, self.config, self.layout = bridge, config, _LAYOUTS[config.family]
        self.family = config.family
        with torch.device("meta"):  # says what a recorded run may add up; it holds no weights
            self.core = family_class(config.family)(config)

    def run_with_cache(self, tokens: Tensor, names_filter: NamesFilter = None, **options: Any) -> tuple[Tensor, RecordedRun]:
        """(the bridge's logits, RecordedRun of what its hooks saw at every depth), as LoopedModel.run_with_cache.

        tokens [batch, n]. options go to the bridge's forward and on to the wrapped model (Huginn: num_steps, input_states).
        Names that the bridge has no hook for are missing from the run. Raises HookError where hooks of the core disagree on
        how many recurrences there were, or where names_filter selects nothing that was seen.
        """
        if names_filter is None or callable(names_filter):
            wanted = names_filter or (lambda name: True)
        else:
            names_filter = [names_filter] if isinstance(names_filter, str) else list(names_filter)
            wanted = frozenset(names_filter).__contains__
        clock = DepthClock(self._sites(), wanted)
        logits = self.bridge.run_with_hooks(tokens, fwd_hooks=[(hook, clock) for hook in clock.sites], **options)
        depth = clock.depth()
        known = dict.fromkeys(name for name in hook_names(self.config, depth) if name in clock.names)
        kept = {name: clock.seen[name] for name in match_names(names_filter, known)}
        return logits, RecordedRun(kept, SimpleNamespace(config=self.config, core=self.core, family=self.family), depth)  # type: ignore

    # ---- which hook is what ---------------------------------------------------------------------------------

    def _sites(self) -> list[_Site]:
        c, layout = self.config, self.layout
        sites = [_Site("embed.hook_out", lambda i: EMBED, lambda x: x * c.embed_scale if c.embed_scale != 1 else x)]
        for part, stack in layout.stacks.items():
            for layer in range({"prelude": c.n_prelude, "blocks": c.n_core, "coda": c.n_coda}[part]):
                sites += self._block(part, f"{stack}.{layer}.", layer, 0)
        if layout.inner:
            for layer in range(c.n_core):
                sites += self._block("blocks", f"{layout.inner}.{layer}.", layer, c.inner_cycles)
        sites.append(_Site(layout.state.format(last=c.n_core - 1), lambda i: f"depth.{i + 1}.{STATE}", _same, core=1))
        return [*sites, _Site(layout.final, lambda i: FINAL, _same)]  # of several firings the last stays

    def _block(self, part: str, where: str, layer: int, cycles: int) -> list[_Site]:
        """The sites of one block. cycles: how many times in one recurrence it fires, if it is one of the inner stack."""
        def namer(name: str) -> Callable[[int], str]:
            if part != "blocks":
                return lambda i: block_prefix(part, layer) + name
            each = max(1, cycles)
            return lambda i: block_prefix(part, layer, i // each + 1, i % each + 1 if cycles else 0) + name

        return [_Site(where + theirs, namer(ours), self._shape(ours, where), core=max(1, cycles) if part == "blocks" else 0)
                for ours, theirs in self.layout.block.items()]

    def _shape(self, name: str, where: str) -> Callable[[Tensor], Tensor]:
        """From a bridge's layout to ours: heads are split, and Huginn's one projection is cut in three and gets its bias."""
        c = self.config
        if self.family == "huginn" and name in ("attn.hook_q", "attn.hook_k", "attn.hook_v"):
            first = {"q": 0, "k": c.n_heads, "v": c.n_heads + c.n_kv_heads}[name[-1]]
            count = c.n_heads if name[-1] == "q" else c.n_kv_heads
            bias = None if name[-1] == "v" or not c.qk_bias else self._qk_bias(where)[int(name[-1] == "k")]

            def cut(x: Tensor) -> Tensor:
                heads = x.reshape(*x.shape[:2], -1, c.d_head)[:, :, first : first + count]
                return heads if bias is None else heads + bias
            return cut
        if name in ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z"):
            return lambda x: x.reshape(*x.shape[:2], -1, c.d_head)
        return _same

    def _qk_bias(self, where: str) -> Tensor:
        """[2, heads, d_head] of the wrapped block."""
        node: Any = self.bridge
        for step in (*where.rstrip(".").split("."), "attn"):
            node = node[int(step)] if step.isdigit() else getattr(node, step)
        return node.original_component.qk_bias.detach().view(2, self.config.n_heads, self.config.d_head)


def _same(x: Tensor) -> Tensor:
    return x


def from_bridge(bridge: Any) -> BridgedModel:
    """A TransformerLens TransformerBridge of Ouro, Huginn or HRM-Text, with recurrence depth as an axis of what it records.

    Raises UnknownModelError for a bridge of another model.
    """
    wrapped = getattr(getattr(bridge, "original_model", None), "config", None)
    if wrapped is None:
        raise UnknownModelError(f"from_bridge needs a TransformerLens TransformerBridge around a loaded model, got {type(bridge).__name__}")
    raw = wrapped.to_dict()
    config = config_from_dict(raw)
    if config.family not in _LAYOUTS:
        raise UnknownModelError(f"TransformerLens has no bridge that shows the recurrences of {config.family} models; from_bridge knows "
                                f"{', '.join(_LAYOUTS)}")
    return BridgedModel(bridge, config)
