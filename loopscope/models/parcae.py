"""Parcae (SandyResearch/parcae-140m .. 1.3b): diagonal injection, value embeddings, normed queries and keys, ReLU^2.

Equations and names: docs/families.md, section 3; after SandyResearch/parcae@dee8363.

Every other layer adds a gated embedding of the token itself to its values, so a row needs its token at every depth and
in the coda. It travels with the row, as further channels: x is [.., d_model + what the core and coda layers look up],
a state [.., d_model + what the coda layers look up]. Decoders, probes and interventions slice rows and never see it;
`recur` takes a state's lookups from x each time, so that a carried state always has those of its present token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.attention import Pair, Plan
from loopscope.planning import core_plan, outer_plan
from loopscope.cache import DepthCache
from loopscope.errors import CheckpointError, SettingError
from loopscope.models.config import MOST_LAYERS, LoopedConfig, need, need_bool, need_dict, need_int, need_number, refuse
from loopscope.models.layers import Block, InterleavedRotary, RMSNorm, SelfAttention
from loopscope.models.looped import LoopedCore
from loopscope.models.packing import Linear
from loopscope.rows import ALIGNED, Chain, ReadPolicy, Rows

GATE_CHANNELS = 32  # how many channels of the layer's input the value gate reads
_PARTS = (("prelude", "prelude", "n_prelude"), ("blocks", "core_block", "n_core"), ("coda", "coda", "n_coda"))


@dataclass(frozen=True)
class ParcaeConfig(LoopedConfig):
    """Layers are counted through prelude, core and coda."""

    gated: tuple[int, ...] = ()  # layers with a value gate
    valued: tuple[int, ...] = ()  # layers with a value embedding
    prelude_norm: bool = True
    qk_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = range(self.n_prelude + self.n_core + self.n_coda)
        if missing := set(self.valued) - (set(self.gated) & set(layers)):
            raise CheckpointError(f"value embedding {min(missing)} belongs to no layer with a gate; layers with one: {list(self.gated)}")
        if self.gated and self.d_model < GATE_CHANNELS:
            raise CheckpointError(f"config.json: n_embd must be at least {GATE_CHANNELS}, which the value gates read, found {self.d_model}")


def _rotate_and_norm(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding, then every head to unit RMS; the official epsilon is float32's own, whatever the dtype."""
    return F.rms_norm(InterleavedRotary.rotate(x, table), x.shape[-1:], eps=torch.finfo(torch.float32).eps)


class ParcaeAttention(SelfAttention):
    """Values gain 2 sigmoid(gate of the first 32 input channels) times the token's value embedding, head by head."""

    def __init__(self, config: LoopedConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        if getattr(config, "qk_norm", False):
            self.rotate = _rotate_and_norm
        self.ve_gate: Linear | None = None

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None, value: Tensor | None = None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))
        qk, v = heads[:, :, : self.qk_heads], heads[:, :, self.qk_heads :]
        if value is not None and self.ve_gate is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * value.unflatten(-1, (-1, self.d_head))
        return self.attend(qk, v, plan, cached, table, tap)


class SquaredReLU(nn.Module):
    """down(0.5 relu(up x)^2)."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.d_mlp)
        self.down = Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(0.5 * F.relu(self.up(x)).square())


class ParcaeBlock(Block):
    """Pre-norm; `value` is the layer's lookup of the rows' tokens, [batch, rows, kv_heads * d_head] or None."""

    norms = 2
    attention = ParcaeAttention
    feed_forward = SquaredReLU

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None, value: Tensor | None = None) -> Tensor:
        if tap is None:
            x = x + self.attn(self.norm_1(x), plan, cached, table, None, value)
            return x + self.mlp(self.norm_2(x))
        x = tap("hook_resid_pre", x)
        x = x + tap("hook_attn_out", self.attn(self.norm_1(x), plan, cached, table, tap, value))
        x = tap("hook_resid_mid", x)
        return tap("hook_resid_post", x + tap("hook_mlp_out", self.mlp(self.norm_2(x))))


class DiagonalInjection(nn.Module):
    """s * exp(-dt exp(A_log)) + dt (B e), dt = softplus(dt_bias): every state channel decays at its own rate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(width))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.B = nn.Parameter(torch.eye(width))

    def forward(self, state: Tensor, e: Tensor) -> Tensor:
        dt = F.softplus(self.dt_bias)
        return state * torch.exp(-dt * torch.exp(self.A_log)) + dt * F.linear(e, self.B)


class ParcaeCore(LoopedCore):
    family = "parcae"
    block_class = ParcaeBlock
    rotary = InterleavedRotary
    config: ParcaeConfig
    adapter: DiagonalInjection  # type: ignore[assignment]

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        self.adapter = DiagonalInjection(config.d_model)
        self.readout = Linear(config.d_model, config.d_model)
        self.prelude_norm = RMSNorm(config.d_model, config.norm_eps) if config.prelude_norm else None
        for index, block in enumerate((*self.prelude, *self.blocks, *self.coda)):
            if index in config.gated:
                block.attn.ve_gate = Linear(GATE_CHANNELS, config.n_kv_heads)
        width = config.n_kv_heads * config.d_head
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, width) for i in config.valued})
        first_coda = config.n_prelude + config.n_core
        self._carried = [str(i) for i in config.valued if i >= config.n_prelude]
        self._coda_width = sum(i >= first_coda for i in config.valued) * width

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ParcaeConfig:
        refuse(raw, cls.family, model_class_name="Parcae", block_class_name="TransformerPreNormBlock", mlp_class_name="BaseMLP",
               nonlin_name="ReLU2", norm_class_name="RMSNorm", injection_type="diagonal", init_strategy="scaled-zero", bias=False,
               qk_bias=False, clip_qkv=None, logit_softcap=None, center_attention=False, debias_attention=False, use_abacus=False,
               randomize_positions_from=None, mup_model_scaling_factor=1)
        d_model, n_heads = need_int(raw, "n_embd"), need_int(raw, "num_attention_heads")
        d_mlp, rope = need_int(raw, "intermediate_size"), need_dict(raw, "rope_settings")
        refuse(rope, cls.family, use_rope=True)
        refuse(raw, cls.family, recurrent_embedding_dimension=d_model, recurrent_intermediation_embedding_dimension=d_mlp,
               recurrent_num_attention_heads=n_heads)
        if d_model % n_heads:
            raise CheckpointError(f"config.json: n_embd {d_model} cannot be split over {n_heads} heads")
        if need(raw, "state_init") not in ("like-init", "zero"):
            raise CheckpointError(f"config.json: state_init {raw['state_init']!r} is not supported (like-init, zero)")
        condense = need_number(rope, "rope_condense_ratio")
        parts = {field: need_int(raw, key, least) for field, key, least in
                 (("n_prelude", "n_layers_in_prelude", 0), ("n_core", "n_layers_in_recurrent_block", 1), ("n_coda", "n_layers_in_coda", 0))}
        layers = sum(parts.values())
        if layers > 3 * MOST_LAYERS:  # they are listed below
            raise CheckpointError(f"config: {layers} layers are more than any model has; at most {MOST_LAYERS} of each part are supported")
        # Two rules of parity in the official code, the same layers in every release.
        gates = parts["n_core"] * need_int(raw, "mean_backprop_depth") - 1
        return ParcaeConfig(
            family=cls.family, vocab_size=need_int(raw, "padded_vocab_size" if raw.get("padded_vocab_size") else "vocab_size"),
            d_model=d_model, n_heads=n_heads, n_kv_heads=need_int(raw, "num_key_value_heads"), d_head=d_model // n_heads, d_mlp=d_mlp,
            n_prelude=parts["n_prelude"], n_core=parts["n_core"], n_coda=parts["n_coda"], depth=need_int(raw, "mean_recurrence"),
            context=need_int(raw, "block_size"), norm_eps=need_number(raw, "norm_eps"),
            rope_theta=need_number(rope, "rope_base"),
            rope_scaling=None if condense == 1 else {"rope_type": "linear", "factor": condense},
            tied=need_bool(raw, "tie_embeddings"), injects=True,
            state_std=0.0 if raw["state_init"] == "zero" else math.sqrt(2 / (5 * d_model)),
            gated=tuple(i for i in range(layers) if i % 2 == gates % 2),
            valued=tuple(i for i in range(layers) if i % 2 == (layers - 1) % 2 == gates % 2),
            prelude_norm=need_bool(raw, "prelude_norm"), qk_norm=need_bool(raw, "qk_norm"), raw=dict(raw))

    @classmethod
    def config_of(cls, raw: Mapping[str, Any], names: Collection[str] | None = None) -> ParcaeConfig:
        config = cls.read_config(raw)
        if not names:
            return config
        first = {"prelude": 0, "core_block": config.n_prelude, "coda": config.n_prelude + config.n_core}
        found = [re.fullmatch(r"transformer\.(\w+)\.(\d+)\.attn\.ve_gate\.weight", name) for name in names]
        gated = {first[m[1]] + int(m[2]) for m in found if m and m[1] in first}
        valued = {int(m[1]) for name in names if (m := re.fullmatch(r"value_embeds\.(\d+)\.weight", name))}
        # A layer that has only one of the two by mistake is reported as a missing tensor.
        if gated | valued <= set(config.gated):
            return config
        return replace(config, gated=tuple(sorted(gated)), valued=tuple(sorted(valued)))

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        assert isinstance(config, ParcaeConfig)
        names: dict[str, tuple[str, ...]] = {
            "wte.weight": ("transformer.wte.weight",), "norm.weight": ("transformer.ln_f.weight",),
            "readout.weight": ("transformer.C.weight",),
            **{f"adapter.{x}": (f"transformer.adapter.{x}",) for x in ("A_log", "dt_bias", "B")},
            **{f"value_embeds.{i}.weight": (f"value_embeds.{i}.weight",) for i in config.valued}}
        if config.prelude_norm:
            names["prelude_norm.weight"] = ("transformer.ln_prelude.weight",)
        if not config.tied:
            names["head.weight"] = ("lm_head.weight",)
        inner = {"attn.qkv.weight": tuple(f"attn.c_{x}.weight" for x in "qkv"), "attn.out.weight": ("attn.c_proj.weight",),
                 "mlp.up.weight": ("mlp.fc.weight",), "mlp.down.weight": ("mlp.proj.weight",),
                 "norm_1.weight": ("norm_1.weight",), "norm_2.weight": ("norm_2.weight",)}
        index = 0
        for ours, theirs, count in _PARTS:
            for i in range(getattr(config, count)):
                layer = inner | ({"attn.ve_gate.weight": ("attn.ve_gate.weight",)} if index in config.gated else {})
                names |= {f"{ours}.{i}.{a}": tuple(f"transformer.{theirs}.{i}.{x}" for x in b) for a, b in layer.items()}
                index += 1
        return names

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        names = {"freqs_cis": "the rotary table is computed from rope_settings"}
        return names | ({"lm_head.weight": "tied to transformer.wte.weight"} if config.tied else {})

    # ---- the calls, with the lookups of the rows' tokens ----------------------------------------------------

    def embed(self, tokens: Tensor, rows: Rows | None = None, cache: DepthCache | None = None, tap=None) -> Tensor:
        """tokens [batch, n] -> x [batch, n, d_model + lookups]."""
        rows = rows or Chain(0, tokens.shape[1])
        self._check_context(rows)
        x = self.wte(tokens)
        if tap is not None:
            x = tap.embed(x, rows)
        values = [self.value_embeds[str(i)](tokens) for i in self.config.valued if i < self.config.n_prelude]
        if len(self.prelude):
            x = self._through(self.prelude, 0, x, torch.cat(values, -1) if values else None, outer_plan(rows, cache),
                              cache and cache.prelude, tap and (lambda layer: tap.prelude(layer, rows)))
        if self.prelude_norm is not None:
            x = self.prelude_norm(x)
        return torch.cat((x, *(self.value_embeds[i](tokens) for i in self._carried)), dim=-1) if self._carried else x

    def start(self, x: Tensor, rows: Rows | None = None, **options: Any) -> Tensor:
        return self.carrying(super().start(x[..., : self.config.d_model], rows, **options), x)

    def carrying(self, state: Tensor, x: Tensor) -> Tensor:
        return torch.cat((state, x[..., x.shape[-1] - self._coda_width :]), dim=-1) if self._coda_width else state

    def recur(self, state: Tensor, x: Tensor, rows: Rows | None = None, cache: DepthCache | None = None,
              policy: ReadPolicy = ALIGNED, tap=None) -> Tensor:
        rows = rows or Chain(0, state.shape[1])
        d = self.config.d_model
        h = self._through(self.blocks, self.config.n_prelude, self.adapter(state[..., :d], x[..., :d]), x[..., d:],
                          core_plan(rows, cache, policy), cache and cache.core, tap and (lambda layer: tap.block(layer, rows)))
        if tap is not None:
            h = tap.state(h, rows)
        return self.carrying(h, x)

    def read(self, state: Tensor, rows: Rows | None = None, cache: DepthCache | None = None, tap=None,
             keep: Tensor | None = None) -> Tensor:
        rows = rows or Chain(0, state.shape[1])
        d = self.config.d_model
        if state.shape[-1] != d + self._coda_width:
            raise SettingError(f"a Parcae coda looks up its tokens, so `read` needs a state with {self._coda_width} more channels than "
                               f"{d}, got {state.shape[-1]}; make it with core.carrying(state, core.embed(tokens))")
        h = self.readout(state[..., :d])
        if len(self.coda):
            h = self._through(self.coda, self.config.n_prelude + self.config.n_core, h, state[..., d:], outer_plan(rows, cache),
                              cache and cache.coda, tap and (lambda layer: tap.coda(layer, rows)))
        h = self.norm(h if keep is None else h[:, keep])
        if tap is not None:
            h = tap.final(h, rows)
        return self.unembed(h)

    def _through(self, blocks: nn.ModuleList, first: int, h: Tensor, values: Tensor | None, plan: Plan, cached: Any,
                 tap: Callable[[int], Any] | None) -> Tensor:
        """h [batch, n, d_model] through the blocks of one part; values: its layers' lookups
        side by side, then anything; cached: the K/V pairs of the part's layers, or None.
        """
        table, width, at = plan.rotary(self.rotary_table), self.config.n_kv_heads * self.config.d_head, 0
        for layer, block in enumerate(blocks):
            value = None
            if first + layer in self.config.valued:
                assert values is not None
                value, at = values[..., at : at + width], at + width
            h = block(h, plan, cached and cached[layer], table, tap and tap(layer), value)
        return h
