"""Recorded runs: values against the goldens and a hand-unrolled model, names, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from safetensors.torch import load_file
from transformer_lens import ActivationCache

from loopscope.errors import HookError
from loopscope.hook_names import BLOCK_NAMES, SHORT_NAMES
from loopscope.models.hooked import LoopedModel
from loopscope.recorded import LoopedCache, RecordedRun

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 89], [27, 18, 28, 18, 28, 45, 90]])


@pytest.fixture(params=("huginn", "ouro"))
def model(request):
    return LoopedModel(request.getfixturevalue(request.param))


@pytest.fixture
def run(model):
    return model.run_with_cache(TOKENS)[1]


# ---- goldens (float32 data, float64 model) ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("zero", "state"))
def test_huginns_recorded_states_equal_the_official_ones(huginn, goldens, mode):
    io = load_file(goldens / "huginn" / "io.safetensors")
    start = "zero" if mode == "zero" else io["init_states"].double()
    _, run = LoopedModel(huginn).run_with_cache(io["input_ids"], start_state=start)
    torch.testing.assert_close(run["resid_post", "prelude", -1].float(), io["prelude_out"], rtol=0, atol=3e-4)
    torch.testing.assert_close(run.stack("state").float(), io[f"core_states_{mode}"], rtol=0, atol=3e-4)


def test_ouros_recorded_states_equal_the_official_ones(ouro, goldens):
    io = load_file(goldens / "ouro" / "io.safetensors")
    _, run = LoopedModel(ouro).run_with_cache(io["input_ids"])
    torch.testing.assert_close(run.stack("state").float(), io["hidden_steps"], rtol=0, atol=3e-4)
    gates = ouro.gate(run.stack("state")).squeeze(-1).movedim(0, -1)
    torch.testing.assert_close(gates.float(), io["gate_logits"], rtol=0, atol=3e-4)


# ---- a reference that shares no code with the model: explicit loops over blocks, heads and queries ------------


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def rotate(x, config, interleaved):
    """x [batch, n, heads, d_head]: every pair of channels turned by position * theta^(-2i / d_head)."""
    out, half = torch.empty_like(x), config.d_head // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        for p in range(x.shape[1]):
            angle = p * config.rope_theta ** (-2 * i / config.d_head)
            out[:, p, :, a] = x[:, p, :, a] * math.cos(angle) - x[:, p, :, b] * math.sin(angle)
            out[:, p, :, b] = x[:, p, :, a] * math.sin(angle) + x[:, p, :, b] * math.cos(angle)
    return out


def unrolled_block(block, x, config, huginn, keep):
    """One block by hand; `keep(name, tensor)` stores what a hook of that name should see."""
    keep("hook_resid_pre", x)
    width = config.n_heads * config.d_head
    packed = rms(x, block.norm_1) @ block.attn.qkv.weight.T
    q, k, v = (packed[..., i * width : (i + 1) * width].reshape(*x.shape[:2], config.n_heads, config.d_head) for i in range(3))
    if huginn:
        q, k = q + block.attn.qk_bias[: config.n_heads], k + block.attn.qk_bias[config.n_heads :]
    rot_q, rot_k = rotate(q, config, huginn), rotate(k, config, huginn)
    z, patterns = torch.zeros_like(v), torch.zeros(x.shape[0], config.n_heads, x.shape[1], x.shape[1], dtype=x.dtype)
    for b in range(x.shape[0]):
        for h in range(config.n_heads):
            for i in range(x.shape[1]):
                weights = torch.stack([rot_q[b, i, h] @ rot_k[b, j, h] for j in range(i + 1)]).div(math.sqrt(config.d_head)).exp()
                patterns[b, h, i, : i + 1] = weights / weights.sum()
                z[b, i, h] = sum(patterns[b, h, i, j] * v[b, j, h] for j in range(i + 1))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("rot_q", rot_q), ("rot_k", rot_k), ("pattern", patterns), ("z", z)):
        keep(f"attn.hook_{name}", tensor)
    attn = z.reshape(*x.shape[:2], width) @ block.attn.out.weight.T

    def mlp(h):
        gate, up = torch.tensor_split(h @ block.mlp.gate_up.weight.T, 2, dim=-1)
        return (gate * torch.sigmoid(gate) * up) @ block.mlp.down.weight.T

    attn_out = attn if huginn else rms(attn, block.norm_2)
    mid = rms(x + attn, block.norm_2) if huginn else x + attn_out
    inner = mlp(rms(mid, block.norm_3))
    mlp_out = inner if huginn else rms(inner, block.norm_4)
    post = rms(mid + inner, block.norm_4) if huginn else mid + mlp_out
    for name, tensor in (("attn_out", attn_out), ("resid_mid", mid), ("mlp_out", mlp_out), ("resid_post", post)):
        keep(f"hook_{name}", tensor)
    return post


def unrolled_by_hand(core, tokens, start_state, depth):
    config, huginn, kept = core.config, core.family == "huginn", {}

    def run_block(label, block, x):
        return unrolled_block(block, x, config, huginn, lambda name, tensor: kept.__setitem__(f"{label}.{name}", tensor))

    x = core.wte.weight[tokens] * config.embed_scale
    kept["hook_embed"] = x
    for i in range(config.n_prelude):
        x = run_block(f"prelude.{i}", core.prelude[i], x)
    state = start_state if huginn else x
    for i in range(depth * config.n_core):
        layer = i % config.n_core
        if layer == 0 and huginn:
            state = torch.cat((state, x), -1) @ core.adapter.weight.T
        state = run_block(f"blocks.{i}", core.blocks[layer], state)
        if layer == config.n_core - 1:
            state = state if huginn else rms(state, core.norm)
            kept[f"blocks.{i}.hook_state"] = state
    h = rms(state, core.norm) if huginn else state
    for i in range(config.n_coda):
        h = run_block(f"coda.{i}", core.coda[i], h)
    kept["hook_final"] = rms(h, core.norm) if huginn else h
    return kept


def test_the_unrolled_run_equals_a_hand_unrolled_model(model):
    tokens, depth = TOKENS[:, :5], 3
    start = torch.randn(2, 5, model.config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"start_state": start} if model.has_start_state else {}
    logits, run = model.run_with_cache(tokens, depth=depth, **options)
    expected, unrolled = unrolled_by_hand(model.core, tokens, start, depth), run.unrolled()
    assert set(unrolled.keys()) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(unrolled[name], tensor, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    head = model.core.wte if model.core.head is None else model.core.head
    torch.testing.assert_close(logits, expected["hook_final"] @ head.weight.T, rtol=0, atol=1e-10)
    # and under TransformerLens's own names and stacking
    last = depth * model.config.n_core - 1
    assert torch.equal(unrolled["v", last], run["v", depth, -1]) and torch.equal(unrolled["v", -1], unrolled[f"v{last}"])
    assert torch.equal(unrolled.stack_activation("rot_k"), run.stack("rot_k").flatten(0, 1))
    stream, labels = unrolled.accumulated_resid(return_labels=True, incl_mid=True)
    assert len(labels) == len(stream) == 2 * (last + 1) + 1 and torch.equal(stream[-1], run["resid_post", depth, -1])


# ---- names --------------------------------------------------------------------------------------------------


def test_short_names_reach_every_depth_and_layer(model, run):
    assert isinstance(run, RecordedRun) and isinstance(run, ActivationCache)
    config = model.config
    for r in range(1, config.depth + 1):
        assert torch.equal(run["state", r], run[f"depth.{r}.hook_state"])
        for layer in range(config.n_core):
            for short, name in SHORT_NAMES.items():
                assert torch.equal(run[short, r, layer], run[f"depth.{r}.blocks.{layer}.{name}"])
    assert torch.equal(run["v", -1, -1], run["v", config.depth, config.n_core - 1])
    for layer in range(config.n_prelude):
        assert torch.equal(run["q", "prelude", layer], run[f"prelude.{layer}.attn.hook_q"])
    assert torch.equal(run["embed"], run["hook_embed"]) and "hook_final" in run


def test_stacks_put_depth_first_then_layer(model, run):
    config = model.config
    for short in SHORT_NAMES:
        stack = run.stack(short)
        assert stack.shape[:2] == (config.depth, config.n_core)
        assert torch.equal(stack[1, 2], run[short, 2, 2])
    assert run.stack("v").shape == (config.depth, config.n_core, 2, 7, config.n_kv_heads, config.d_head)
    assert run.stack("state").shape == (config.depth, 2, 7, config.d_model)
    assert torch.equal(run.stack("q", depths=[4, 2], layers=[1])[1, 0], run["q", 2, 1])


def test_one_depth_has_the_names_of_one_model(model, run):
    view = run.at_depth(2)
    assert set(view.keys()) == {f"blocks.{i}.{n}" for i in range(model.config.n_core) for n in BLOCK_NAMES} | {"hook_state"}
    assert torch.equal(view["v", 1], run["v", 2, 1]) and torch.equal(view["hook_state"], run["state", 2])
    assert torch.equal(view.stack_activation("z"), run.stack("z")[1])


@pytest.mark.parametrize("key, message", [
    (("v", 9, 0), "depth 9.*depths 1 to 4"), (("v", 0, 0), "depth 0 is the start state.*depths 1 to 4"), (("v", -5, 0), "depths 1 to 4"),
    (("v", 1, 7), "layer 7 is outside the core, which has layers 0 to"), (("vv", 1, 0), "'vv' is not a recorded name.*'v'"),
    (("v",), "run\\['v', depth, layer\\]"), (("v", 2), "run\\['v', depth, layer\\]"), (("state", 2, 0), "no layer"),
    (("v", "final", 0), "'prelude' or 'coda'"), ("depth.1.blocks.0.hook_v", "closest: .*depth.1.blocks.0.attn.hook_v")])
def test_a_wrong_key_says_what_there_is(run, key, message):
    with pytest.raises(HookError, match=message):
        run[key]


def test_a_partial_recording_says_what_it_kept(model):
    _, run = model.run_with_cache(TOKENS, names_filter=lambda n: n in ("depth.2.hook_state", "depth.2.blocks.0.attn.hook_k"))
    assert run.depths_of("state") == run.depths_of("k") == [2] and run.depths_of("v") == []
    for call, message in ((lambda: run.stack("state"), "not recorded at depths 1, 3, 4; 'state' was recorded at depth 2"),
                          (lambda: run["k", 1, 0], "'k' was recorded at depth 2"), (lambda: run["v", 2, 0], "names_filter kept no 'v'"),
                          (lambda: run.at_depth(3), "nothing was recorded at depth 3")):
        with pytest.raises(HookError, match=message):
            call()
    assert torch.equal(run.stack("state", depths=[2])[0], run["state", 2])


def test_a_family_without_prelude_says_so(ouro):
    _, run = LoopedModel(ouro).run_with_cache(TOKENS)
    with pytest.raises(HookError, match="the prelude, which has no layers"):
        run["v", "prelude", 0]


def test_batch_dimension_is_removed_and_sliced_as_in_transformer_lens(model, run):
    _, single = model.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    assert single["v", 2, 1].shape == run["v", 2, 1].shape[1:] and not single.has_batch_dim
    second = run.apply_slice_to_batch_dim((1, 2))
    assert isinstance(second, RecordedRun) and torch.equal(second["v", 2, 1], run["v", 2, 1][1:])
    assert isinstance(run.unrolled().apply_slice_to_batch_dim(0), LoopedCache)
    assert isinstance(model.run_with_cache(TOKENS, return_cache_object=False)[1], dict)


# ---- refusals -----------------------------------------------------------------------------------------------

REASONS = {"huginn": "norm acts on the residual sum.*adapter", "ouro": "a norm closes every loop"}
REFUSED = ["decompose_resid", "get_full_resid_decomposition", "logit_attrs", "logit_lens", "apply_ln_to_stack", "get_neuron_results",
           "stack_neuron_results"]


@pytest.mark.parametrize("method", REFUSED)
def test_what_needs_an_additive_stream_is_refused_with_the_reason(model, run, method):
    for cache in (run, run.unrolled(), run.at_depth(1), run.unrolled().apply_slice_to_batch_dim((0, 1))):
        with pytest.raises(HookError, match=f"{method} would be wrong on {model.family}.*{REASONS[model.family]}.*probes.attribution"):
            getattr(cache, method)(1, 2)
        with pytest.raises(HookError, match=REASONS[model.family]):
            cache.accumulated_resid(apply_ln=True)
    with pytest.raises(HookError, match="unrolled"):
        run.accumulated_resid()


def test_the_stream_is_indeed_no_sum_of_its_components(model, run):
    """What TransformerLens would add up misses the stream it should add up to by more than half of it."""
    unrolled = run.unrolled()
    total = unrolled["hook_embed"] + sum(unrolled[n] for n in unrolled if n.startswith("blocks") and n.endswith(("attn_out", "mlp_out")))
    stream = unrolled["resid_post", -1]
    assert (total - stream).norm() > 0.5 * stream.norm()


def test_no_method_of_activation_cache_is_inherited_unexamined():
    """A new TransformerLens method must be looked at: it may assume an additive stream."""
    examined = {"remove_batch_dim", "to", "toggle_autodiff", "keys", "values", "items", "apply_slice_to_batch_dim",
                "accumulated_resid", "stack_activation", "compute_head_results", "stack_head_results",  # the last two: tests/interop
                "ssm_layers", "compute_ssm_state", "compute_ssm_effective_attention", *REFUSED}
    public = {n for n, f in inspect.getmembers(ActivationCache, inspect.isfunction)
              if not n.startswith("_") and not hasattr(object, n)}  # nnsight, once imported, puts a `save` on every object
    assert public <= examined, public - examined
