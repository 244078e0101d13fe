"""from_bridge: TransformerLens's own bridges, recorded by depth, show what our models show on the same weights.

HRM-Text's class comes with transformers. Ouro's and Huginn's are remote code, which is not run here: TransformerLens's adapters wrap the
stand-ins below instead, written from docs/families.md with the official names, which give the logits that the official code stored.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import HrmTextConfig, HrmTextForCausalLM, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from loopscope.bridge import from_bridge
from loopscope.errors import HookError, UnknownModelError
from loopscope.hook_names import hook_names
from loopscope.models.hooked import LoopedModel
from loopscope.models.loading import load_core

bridges = pytest.importorskip("transformer_lens.model_bridge.sources._bridge_builder")
ATOL = 3e-4


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def modules(**parts: nn.Module) -> nn.Module:
    """A bare holder: `modules(q_proj=...)`."""
    out = nn.Module()
    for name, part in parts.items():
        out.add_module(name, part)
    return out


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def causal(n: int) -> torch.Tensor:
    return torch.full((1, 1, n, n), float("-inf")).triu(1)


# ---- Ouro -------------------------------------------------------------------------------------------------------


class OuroConfig(PretrainedConfig):
    model_type = "ouro"


class OuroAttention(nn.Module):
    """TransformerLens's bridge computes attention itself, from these projections."""

    is_causal, layer_idx = True, 0

    def __init__(self, c) -> None:
        super().__init__()
        self.config, self.head_dim, self.scaling, self.attention_dropout = c, c.head_dim, c.head_dim**-0.5, 0.0
        self.num_key_value_groups = c.num_attention_heads // c.num_key_value_heads
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, linear(c.hidden_size, c.num_attention_heads * c.head_dim))
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        cos, sin = (table[:, None] for table in position_embeddings)
        q, k, v = (getattr(self, f"{x}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in "qkv")
        q, k = (x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin for x in (q, k))
        pattern = (q @ k.transpose(-1, -2) * self.scaling + attention_mask).softmax(-1)
        return self.o_proj((pattern @ v).transpose(1, 2).flatten(-2)), pattern


class OuroMLP(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(c.hidden_size, c.intermediate_size), linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OuroLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn, self.mlp = OuroAttention(c), OuroMLP(c)
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            self.add_module(name, Norm(c.hidden_size, c.rms_norm_eps))

    def forward(self, x, position_embeddings, attention_mask):
        out = self.self_attn(hidden_states=self.input_layernorm(x), position_embeddings=position_embeddings, attention_mask=attention_mask)
        x = x + self.input_layernorm_2(out[0])
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class OuroRotary(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.inverse = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inverse
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class OuroForCausalLM(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.config = c
        self.model = modules(embed_tokens=nn.Embedding(c.vocab_size, c.hidden_size), norm=Norm(c.hidden_size, c.rms_norm_eps),
                             layers=nn.ModuleList(OuroLayer(c) for _ in range(c.num_hidden_layers)), rotary_emb=OuroRotary(c),
                             early_exit_gate=nn.Linear(c.hidden_size, 1))
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def forward(self, input_ids, **kwargs):
        n = input_ids.shape[1]
        x = self.model.embed_tokens(input_ids)
        position_embeddings = self.model.rotary_emb(x, torch.arange(n)[None])
        for _ in range(self.config.total_ut_steps):
            for layer in self.model.layers:
                x = layer(x, position_embeddings=position_embeddings, attention_mask=causal(n))
            x = self.model.norm(x)
        return CausalLMOutput(logits=self.lm_head(x))


# ---- Huginn -----------------------------------------------------------------------------------------------------


class HuginnConfig(PretrainedConfig):
    model_type = "huginn_raven"
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}


class HuginnAttention(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.heads, self.head_dim = c.n_heads, c.head_dim
        self.Wqkv, self.proj = linear(c.n_embd, 3 * c.n_embd), linear(c.n_embd, c.n_embd)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, c.n_heads, c.head_dim))

    def forward(self, x, freqs_cis, mask):
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)) for t in self.Wqkv(x).chunk(3, -1))
        cos, sin = freqs_cis.unbind(-1)

        def rotate(t):
            a, b = t[..., ::2], t[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

        q, k, v = (t.transpose(1, 2) for t in (rotate(q + self.qk_bias[0]), rotate(k + self.qk_bias[1]), v))
        pattern = (q @ k.transpose(-1, -2) * self.head_dim**-0.5 + mask).softmax(-1)
        return self.proj((pattern @ v).transpose(1, 2).flatten(-2))


class HuginnMLP(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.fc, self.proj = linear(c.n_embd, 2 * c.intermediate_size), linear(c.intermediate_size, c.n_embd)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(F.silu(gate) * up)


class HuginnBlock(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.attn, self.mlp = HuginnAttention(c), HuginnMLP(c)
        for i in range(1, 5):
            self.add_module(f"norm_{i}", Norm(c.n_embd, c.norm_eps))

    def forward(self, x, freqs_cis, mask):
        x = self.norm_2(x + self.attn(self.norm_1(x), freqs_cis, mask))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


class RavenForCausalLM(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.config = c
        parts = {"prelude": c.n_layers_in_prelude, "core_block": c.n_layers_in_recurrent_block, "coda": c.n_layers_in_coda}
        self.transformer = modules(
            wte=nn.Embedding(c.vocab_size, c.n_embd), adapter=linear(2 * c.n_embd, c.n_embd), ln_f=Norm(c.n_embd, c.norm_eps),
            **{name: nn.ModuleList(HuginnBlock(c) for _ in range(count)) for name, count in parts.items()})
        self.lm_head = linear(c.n_embd, c.vocab_size)
        self.register_buffer("freqs_cis", torch.zeros(1, c.block_size, 1, c.head_dim // 2, 2))

    def forward(self, input_ids, input_states, num_steps, **kwargs):
        n, t = input_ids.shape[1], self.transformer
        call = {"freqs_cis": self.freqs_cis[:, :n], "mask": causal(n)}
        x = t.wte(input_ids) * self.config.init_values["embed_scale"]
        for block in t.prelude:
            x = block(x, **call)
        state = input_states
        for _ in range(num_steps):
            state = t.adapter(torch.cat((state, x), -1))
            for block in t.core_block:
                state = block(state, **call)
        state = t.ln_f(state)
        for block in t.coda:
            state = block(state, **call)
        return CausalLMOutput(logits=self.lm_head(t.ln_f(state)))


# ---- the comparison ---------------------------------------------------------------------------------------------


def build(model: nn.Module, architecture: str):
    return bridges.build_bridge_from_module(model.eval(), architecture, hf_config=model.config)


def golden_bridge(folder, cls: type, config: type):
    model = cls(config(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return build(model, cls.__name__)


def same_names_and_values(run, own, without: tuple[str, ...] = ()) -> None:
    """Everything our model records is in the bridge's run, in the same order, but for names that end in one of `without`."""
    assert list(run) == [name for name in own if not name.endswith(without or "nothing")]
    for name, tensor in run.items():
        torch.testing.assert_close(tensor, own[name], atol=ATOL, rtol=0, msg=lambda text: f"{name}: {text}")


@pytest.mark.support("bridge", family="ouro")
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # Ouro's config has the key
@torch.no_grad()
def test_ouro_on_transformer_lens_own_adapter_shows_what_our_model_shows(goldens):
    io = load_file(goldens / "ouro" / "io.safetensors")
    bridged = from_bridge(golden_bridge(goldens / "ouro", OuroForCausalLM, OuroConfig))
    logits, run = bridged.run_with_cache(io["input_ids"])
    torch.testing.assert_close(logits, io["logits_T4"], atol=ATOL, rtol=0)  # the stand-in is the official code, to the last digits
    torch.testing.assert_close(run.stack("state"), io["hidden_steps"], atol=ATOL, rtol=0)
    _, own = LoopedModel(load_core(goldens / "ouro")).run_with_cache(io["input_ids"])
    same_names_and_values(run, own)
    assert not torch.allclose(run["v", 1, 0], run["v", 4, 0], atol=0.1)
    torch.testing.assert_close(run.unrolled()["blocks.7.attn.hook_v"], own["v", 3, 1], atol=ATOL, rtol=0)


@pytest.mark.support("bridge", family="huginn")
@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 4])
def test_huginn_on_transformer_lens_own_adapter_shows_what_our_model_shows(goldens, depth):
    io = load_file(goldens / "huginn" / "io.safetensors")
    states = io["init_states"][:, :24]
    bridged = from_bridge(golden_bridge(goldens / "huginn", RavenForCausalLM, HuginnConfig))
    logits, run = bridged.run_with_cache(io["input_ids"], input_states=states, num_steps=depth)
    torch.testing.assert_close(logits, io[f"logits_state_T{depth}"], atol=ATOL, rtol=0)
    torch.testing.assert_close(run.stack("state"), io["core_states_state"][:depth], atol=ATOL, rtol=0)
    _, own = LoopedModel(load_core(goldens / "huginn")).run_with_cache(io["input_ids"], depth=depth, start_state=states)
    same_names_and_values(run, own, without=("hook_rot_q", "hook_rot_k", "hook_pattern"))


@pytest.fixture
def hrm_text(tmp_path):
    """(a bridge around transformers' class, our model on the same weights)."""
    config = HrmTextConfig(
        vocab_size=50, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=3, head_dim=8, H_cycles=2, L_cycles=3,
        max_position_embeddings=64, embedding_scale=3.5, rms_norm_eps=1e-4, bos_token_id=1, eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attn_implementation="eager")
    torch.manual_seed(0)
    model = HrmTextForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return build(model, "HrmTextForCausalLM"), LoopedModel(load_core(tmp_path))


@pytest.mark.support("bridge", family="hrm_text")
@torch.no_grad()
def test_hrm_text_of_transformers_shows_what_our_model_shows_in_every_inner_cycle(hrm_text):
    bridge, own = hrm_text
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    logits, run = from_bridge(bridge).run_with_cache(tokens)
    ours, recorded = own.run_with_cache(tokens)
    torch.testing.assert_close(logits, ours, atol=ATOL, rtol=0)
    assert "depth.2.l_cycle.3.blocks.1.attn.hook_v" in run
    same_names_and_values(run, recorded, without=("hook_z",))


@torch.no_grad()
def test_a_filter_names_our_hooks_and_what_was_not_seen_is_said(hrm_text):
    bridged, tokens = from_bridge(hrm_text[0]), torch.arange(5)[None]
    _, run = bridged.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_v") and name.startswith("depth.2.blocks"))
    assert list(run) == ["depth.2.blocks.0.attn.hook_v", "depth.2.blocks.1.attn.hook_v"]
    assert set(run) < set(hook_names(bridged.config, 2))
    with pytest.raises(HookError, match="depth 3, but depths 1 to 2"):
        bridged.run_with_cache(tokens, names_filter="depth.3.blocks.0.attn.hook_v")
    with pytest.raises(HookError, match="norm closes every cycle"):
        run.decompose_resid()


@torch.no_grad()
def test_what_was_recorded_does_not_change_when_the_model_goes_on_in_place(hrm_text):
    bridge, tokens, inputs = hrm_text[0], torch.arange(5)[None], []

    def spoil(module, args, kwargs, out):
        inputs.append(args[0] if args else kwargs["hidden_states"])
        inputs[-1].zero_()

    bridge.original_model.model.H_module.register_forward_hook(spoil, with_kwargs=True)
    _, run = from_bridge(bridge).run_with_cache(tokens)
    assert len(inputs) == 2 and all(run["resid_pre", r, 0].count_nonzero() for r in (1, 2))


@torch.no_grad()
def test_hooks_that_disagree_about_the_depth_are_refused(hrm_text):
    bridge = hrm_text[0]
    bridged = from_bridge(bridge)
    # As where a layer runs on after others have left.
    bridge.original_model.model.H_module.register_forward_hook(lambda module, args, out: bridge.H_blocks[0].hook_in(out))
    with pytest.raises(HookError, match="disagree on the number of recurrences.*adaptive exit"):
        bridged.run_with_cache(torch.arange(5)[None])


def test_other_bridges_are_refused_by_name():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnknownModelError, match="llama"):
        from_bridge(build(LlamaForCausalLM(small), "LlamaForCausalLM"))
    with pytest.raises(UnknownModelError, match="needs a TransformerLens TransformerBridge.*got Linear"):
        from_bridge(nn.Linear(1, 1))
