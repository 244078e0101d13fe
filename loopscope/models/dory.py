"""Dory (NVIDIA Nemotron Labs Dory, transformers' model_type `dory`): a looped nGPT, every state on the unit sphere.

Input layers, a recurrent section that is fed the input section's output at every loop, output layers; most layers read
a sliding window with a rotary base of its own. All norms are L2 norms without weights, and a block moves its state
towards a branch's output at a learned rate instead of adding to it. Equations and names: docs/families.md, section 6;
after transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.attention import Pair, Plan
from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig, as_ids, need, need_bool, need_dict, need_int, need_number, read_rope, refuse
from loopscope.models.layers import Block, HalfRotary, SelfAttention, rotary_angles
from loopscope.models.looped import LoopedCore
from loopscope.models.packing import Linear

L2_EPS = 1e-6  # in the code, not in the config
RELEASED = "released names"  # variant: tensors under the names of NVIDIA's files instead of transformers'
_FULL, _SLIDING = "full_attention", "sliding_attention"
_KV_MODES = {"per_loop": None, "last_loop": 1}  # recurrent_kv_cache_mode -> kv_slots


@dataclass(frozen=True)
class DoryConfig(LoopedConfig):
    """Layers are counted through input, recurrent and output section. rope_theta and rope_scaling: the full layers'."""

    sliding: tuple[bool, ...] = ()  # which layers read a window
    window: int = 0  # positions, the row's own included
    sliding_theta: float = 0.0
    sliding_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    init_range: float = 0.0  # the learned scales are stored as multiples of it
    alpha_init: float = 0.0


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis, in float32 or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


class L2Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return l2_norm(x)


class DoryAttention(SelfAttention):
    """Queries and keys of unit length, queries rescaled per channel after rotation, a scaled gate on what is read.

    hook_rot_q is the rescaled query, which meets the keys; hook_z is what is read, before the gate.
    """

    window: int | None = None
    kind = 0  # which of the two rotary tables

    def __init__(self, config: DoryConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        width = self.heads * self.d_head
        self.gate = Linear(config.d_model, width)
        self.sqk = nn.Parameter(torch.full((width,), config.init_range))
        self.s_gate = nn.Parameter(torch.full((width,), config.init_range))
        self.sqk_scale, self.gate_scale = self.d_head**0.5 / config.init_range, config.d_model**0.25 / config.init_range

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))
        qk, v = l2_norm(heads[:, :, : self.qk_heads]), heads[:, :, self.qk_heads :]
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        plan, table = plan.windowed(self.window), table.select(-4, self.kind)
        stretch = (self.sqk * self.sqk_scale).square().view(self.heads, self.d_head)
        if tap is None:
            z = plan.attend(cached, self.rotate(q, table) * stretch, self.rotate(k, table), v)
        else:
            q, k, v = tap("attn.hook_q", q), tap("attn.hook_k", k), tap("attn.hook_v", v)
            q = tap("attn.hook_rot_q", self.rotate(q, table) * stretch)
            k = tap("attn.hook_rot_k", self.rotate(k, table))
            z = tap("attn.hook_z", plan.attend(cached, q, k, v, tap.pattern("attn.hook_pattern")))
        gate = torch.sigmoid(self.gate(x) * (self.s_gate * self.gate_scale).square())
        return self.out(l2_norm(z.flatten(-2) * gate))


class DoryMLP(nn.Module):
    """down(L2(silu(gate x) * up x)), gate and up rescaled per channel."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.d_mlp)
        self.down = Linear(config.d_mlp, config.d_model)
        self.suv_gate, self.suv_up = nn.Parameter(torch.ones(config.d_mlp)), nn.Parameter(torch.ones(config.d_mlp))
        self.scale = config.d_model**0.5

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(l2_norm(F.silu(gate * (self.suv_gate * self.scale)) * (up * (self.suv_up * self.scale))))


class DoryBlock(Block):
    """x <- L2(x), then a step of learned length from x towards L2(branch x); twice. hook_attn_out and hook_mlp_out are the steps."""

    norms = 0
    attention = DoryAttention  # type: ignore[assignment]
    feed_forward = DoryMLP

    def __init__(self, config: DoryConfig, rotary: type) -> None:
        super().__init__(config, rotary)
        self.lambda_1 = nn.Parameter(torch.full((config.d_model,), config.init_range))
        self.lambda_2 = nn.Parameter(torch.full((config.d_model,), config.init_range))
        self.scale = config.alpha_init / config.init_range

    def attention_input(self, x: Tensor) -> Tensor:
        return l2_norm(x)

    def forward(self, x: Tensor, plan: Plan, cached: Pair | None, table: Tensor, tap=None) -> Tensor:
        x = l2_norm(x if tap is None else tap("hook_resid_pre", x))
        step = (self.lambda_1 * self.scale).abs() * (l2_norm(self.attn(x, plan, cached, table, tap)) - x)
        x = x + step if tap is None else tap("hook_resid_mid", x + tap("hook_attn_out", step))
        x = l2_norm(x)
        step = (self.lambda_2 * self.scale).abs() * (l2_norm(self.mlp(x)) - x)
        return x + step if tap is None else tap("hook_resid_post", x + tap("hook_mlp_out", step))


class DoryCore(LoopedCore):
    family = "dory"
    block_class = DoryBlock
    rotary = HalfRotary
    config: DoryConfig

    def __init__(self, config: DoryConfig) -> None:
        super().__init__(config)
        self.norm = L2Norm()  # type: ignore[assignment]
        self.adapter = None
        self.logit_scale = nn.Parameter(torch.full((config.vocab_size,), config.init_range))
        for block, sliding in zip((*self.prelude, *self.blocks, *self.coda), config.sliding, strict=True):
            block.attn.window, block.attn.kind = (config.window, 1) if sliding else (None, 0)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DoryConfig:
        refuse(raw, cls.family, hidden_act="silu", attention_bias=False, mlp_bias=False)
        types = need(raw, "layer_types")
        if not isinstance(types, list) or any(kind not in (_FULL, _SLIDING, "mlp") for kind in types):
            raise CheckpointError(f"config.json: layer_types must be a list of {_FULL!r}, {_SLIDING!r} and 'mlp', found {types!r}")
        # Released configs count attention and MLP of a layer as two, and list both.
        halves = 2 if "mlp" in types else 1
        counts = {key: need_int(raw, key, 0) for key in ("num_hidden_layers", "n_input_layers", "n_output_layers")}
        if raw.get("n_recurrent_layers") is None:
            counts["n_recurrent_layers"] = counts["num_hidden_layers"] - counts["n_input_layers"] - counts["n_output_layers"]
        else:
            counts["n_recurrent_layers"] = need_int(raw, "n_recurrent_layers", 0)
        total = counts["n_input_layers"] + counts["n_recurrent_layers"] + counts["n_output_layers"]
        if total != counts["num_hidden_layers"] or len(types) != total:
            raise CheckpointError(f"config.json: n_input_layers + n_recurrent_layers + n_output_layers = {total} should equal "
                                  f"num_hidden_layers, found {counts['num_hidden_layers']}, and the length of layer_types, "
                                  f"found {len(types)}")
        if halves == 2 and (any(n % 2 for n in counts.values()) or set(types[1::2]) != {"mlp"} or "mlp" in types[::2]):
            raise CheckpointError(f"config.json: with 'mlp' in layer_types every layer is an attention and an mlp entry, found {types!r}")
        sliding = tuple(kind == _SLIDING for kind in types[::halves])
        ropes = need_dict(raw, "rope_parameters")
        full, slid = (read_rope({"rope_parameters": need_dict(ropes, kind)}, "rope_theta") if used else None
                      for kind, used in ((_FULL, not all(sliding)), (_SLIDING, any(sliding))))
        mode = need(raw, "recurrent_kv_cache_mode")
        if not isinstance(mode, str) or mode not in _KV_MODES:
            raise CheckpointError(f"config.json: recurrent_kv_cache_mode {mode!r} is not supported; supported: {', '.join(_KV_MODES)}")
        theta, scaling = full or slid or (0.0, None)
        sliding_theta, sliding_scaling = slid or (theta, scaling)
        return DoryConfig(
            family=cls.family, vocab_size=need_int(raw, "vocab_size"), d_model=need_int(raw, "hidden_size"),
            n_heads=need_int(raw, "num_attention_heads"), n_kv_heads=need_int(raw, "num_key_value_heads"),
            d_head=need_int(raw, "head_dim"), d_mlp=need_int(raw, "intermediate_size"),
            n_prelude=counts["n_input_layers"] // halves, n_core=counts["n_recurrent_layers"] // halves,
            n_coda=counts["n_output_layers"] // halves, depth=need_int(raw, "n_recurrent_loops"),
            context=need_int(raw, "max_position_embeddings"), norm_eps=L2_EPS, rope_theta=theta, rope_scaling=scaling,
            tied=need_bool(raw, "tie_word_embeddings", absent=False), injects=True, kv_slots=_KV_MODES[mode], sliding=sliding,
            window=need_int(raw, "sliding_window") if any(sliding) else 0, sliding_theta=sliding_theta,
            sliding_scaling=sliding_scaling, init_range=need_number(raw, "initializer_range"),
            alpha_init=need_number(raw, "ngpt_alpha_init"), bos=raw.get("bos_token_id"), eos=as_ids(raw.get("eos_token_id")),
            pad=raw.get("pad_token_id"), raw=dict(raw))

    @classmethod
    def config_of(cls, raw: Mapping[str, Any], names: Collection[str] | None = None) -> DoryConfig:
        config = cls.read_config(raw)
        return replace(config, variant=RELEASED) if any(name.startswith("backbone.") for name in names or ()) else config

    @classmethod
    def official_names(cls, config: LoopedConfig) -> dict[str, tuple[str, ...]]:
        released = config.variant == RELEASED
        names: dict[str, tuple[str, ...]] = {
            "wte.weight": ("backbone.embeddings.weight" if released else "model.embed_tokens.weight",),
            "logit_scale": ("lm_head.logit_scale",)}
        if not config.tied:
            names["head.weight"] = ("lm_head.weight",)
        attention = {"attn.qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"), "attn.out.weight": ("o_proj.weight",),
                     "attn.gate.weight": ("g_proj.weight" if released else "gate_proj.weight",),
                     "attn.sqk": ("sqk",), "attn.s_gate": ("s_gate",)}
        mlp = {"mlp.gate_up.weight": ("gate_proj.weight", "up_proj.weight"), "mlp.down.weight": ("down_proj.weight",),
               "mlp.suv_gate": ("suv_gate",), "mlp.suv_up": ("suv_up",)}
        layer = 0
        for part, count in (("prelude", config.n_prelude), ("blocks", config.n_core), ("coda", config.n_coda)):
            for i in range(count):
                own = f"{part}.{i}."
                if released:
                    first, second = f"backbone.layers.{2 * layer}.", f"backbone.layers.{2 * layer + 1}."
                    where, rates = (f"{first}mixer.", f"{second}mixer."), (f"{first}attn_alpha", f"{second}mlp_alpha")
                else:
                    first = f"model.layers.{layer}."
                    where, rates = (f"{first}self_attn.", f"{first}mlp."), (f"{first}lambda_1", f"{first}lambda_2")
                for prefix, inner in zip(where, (attention, mlp)):
                    names |= {own + a: tuple(prefix + x for x in b) for a, b in inner.items()}
                names |= {f"{own}lambda_{j + 1}": (rate,) for j, rate in enumerate(rates)}
                layer += 1
        return names

    @classmethod
    def optional_names(cls, config: LoopedConfig) -> dict[str, str]:
        return {"lm_head.weight": "tied to the embedding"} if config.tied else {}

    def make_rotary_table(self, positions: int) -> Tensor:
        """[positions, 2, ...]: the full layers' table and the sliding layers'."""
        c = self.config
        pairs = ((c.rope_theta, c.rope_scaling), (c.sliding_theta, c.sliding_scaling))
        angles = [rotary_angles(c.d_head, theta, positions, scaling) for theta, scaling in pairs]
        return torch.stack([HalfRotary.table(a, self.dtype) for a in angles], 1)

    def inject(self, state: Tensor, x: Tensor) -> Tensor:
        return l2_norm(state) + l2_norm(x)  # x: the input section's output, which is also the first state

    def before_head(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def unembed(self, h: Tensor) -> Tensor:
        """Logits in float32 or better: a learned scale per token multiplies them."""
        logits = super().unembed(h)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide) * (self.logit_scale.to(wide) / self.config.init_range)
