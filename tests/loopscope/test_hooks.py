"""Hooks at every depth: which fire, what they see, what an edit changes."""

from __future__ import annotations

import pytest
import torch

from loopscope.errors import HookError
from loopscope.hook_names import STATE, depth_of, hook_names, layer_of
from loopscope.models.hooked import LoopedModel
from loopscope.models.loading import load_core

FAMILIES = ("huginn", "ouro")
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79], [27, 18, 28, 18, 28, 45, 90, 45]])
ROUNDING = 1e-11  # float64, between the fused attention kernel and the written-out softmax


@pytest.fixture(params=FAMILIES)
def core(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def model(core):
    return LoopedModel(core)


def close(a, b, tolerance=ROUNDING):
    return torch.allclose(a, b, rtol=0, atol=tolerance)


def scaled(factor, positions=slice(None)):
    """A hook that multiplies the activation at some positions."""
    def hook(tensor, hook):
        tensor = tensor.clone()
        tensor[:, positions] *= factor
        return tensor
    return hook


@pytest.mark.support("hooks")
@pytest.mark.parametrize("golden", ("huginn", "ouro", "retrofit_llama", "retrofit_olmo", "nanbeige", "parcae", "dory", "hrm_text"))
def test_every_name_fires_exactly_once_in_the_documented_order(goldens, golden):
    model = LoopedModel(load_core(goldens / golden))
    for depth in (model.config.depth, 1, model.config.depth + 1):  # the last one grows the tree
        fired = []
        logits = model.run_with_hooks(TOKENS, depth=depth,
                                      fwd_hooks=[(lambda name: True, lambda tensor, hook: fired.append((hook.name, tensor.shape[0])))])
        assert fired == [(name, len(TOKENS)) for name in hook_names(model.config, depth)]
        assert close(logits, model(TOKENS, depth=depth), 1e-4)  # float32
    assert list(model.hook_dict) == hook_names(model.config, model.config.depth + 1)


def test_a_shallower_call_fires_its_own_depths_only(model):
    fired = []
    with model.hooks([(lambda name: name.endswith(STATE), lambda tensor, hook: fired.append(hook.depth()))]):
        model(TOKENS, depth=2)
    assert fired == [1, 2]


def test_an_idle_model_has_no_tap_before_and_after_hooks(model):
    assert model.tap() is None
    plain = model(TOKENS)
    model.run_with_cache(TOKENS)
    model.run_with_hooks(TOKENS, fwd_hooks=[("hook_final", scaled(2.0))])
    assert model.tap() is None
    assert torch.equal(model(TOKENS), plain) and torch.equal(plain, model.core(TOKENS))


def test_hook_points_know_their_depth_and_layer(model):
    for name, point in model.hook_dict.items():
        assert point.name == name
        if depth_of(name) is None:
            with pytest.raises(HookError, match="depth"):
                point.depth()
        else:
            assert name.startswith(f"depth.{point.depth()}.")
        if layer_of(name) is None:
            with pytest.raises(HookError, match="layer"):
                point.layer()
        else:
            assert f".{point.layer()}." in name.removeprefix(f"depth.{depth_of(name)}")
    assert model.hook_dict["depth.3.blocks.1.attn.hook_v"].layer() == 1  # TransformerLens's own reads the 3


def test_an_edit_at_one_depth_changes_only_what_follows_it(model):
    depth, layer = 2, 1
    name = f"depth.{depth}.blocks.{layer}.attn.hook_v"
    _, clean = model.run_with_cache(TOKENS)
    with model.hooks([(name, scaled(1.5))]):
        logits, edited = model.run_with_cache(TOKENS)
    order = hook_names(model.config, model.config.depth)
    at = order.index(name)
    untouched = order[:at] + [n for n in order[at + 1 : at + 4] if "rot" in n or "pattern" in n]  # of q and k, not of v
    for n in untouched:
        assert torch.equal(clean[n], edited[n]), n
    for n in [n for n in order[at + 1 :] if n not in untouched]:
        assert not torch.equal(clean[n], edited[n]), n
    assert not torch.equal(logits, model(TOKENS))


def test_an_edit_at_one_position_leaves_earlier_positions_unchanged(model):
    position = 5
    _, clean = model.run_with_cache(TOKENS)
    with model.hooks([("depth.1.blocks.0.hook_resid_post", scaled(-1.0, position))]):
        _, edited = model.run_with_cache(TOKENS)
    for r in range(1, model.config.depth + 1):
        assert torch.equal(clean["state", r][:, :position], edited["state", r][:, :position])
        assert not torch.equal(clean["state", r][:, position:], edited["state", r][:, position:])


def test_an_edit_in_place_rewrites_no_earlier_record(model):
    """The state of one depth is the same tensor as the next depth's input where nothing is injected."""
    def zero(tensor, hook):
        tensor.zero_()

    _, clean = model.run_with_cache(TOKENS)
    with model.hooks([("depth.3.blocks.0.hook_resid_pre", zero)]):
        _, edited = model.run_with_cache(TOKENS)
    assert torch.equal(edited["state", 2], clean["state", 2])
    assert edited["resid_pre", 3, 0].count_nonzero() == 0


def test_patterns_are_causal_distributions_and_computed_only_if_hooked(model):
    plain = model(TOKENS)
    names = [n for n in model.hook_dict if n.endswith("hook_pattern")]
    logits, run = model.run_with_cache(TOKENS, names_filter=names)
    assert close(logits, plain)
    for name in names:
        pattern = run[name]
        assert pattern.shape == (2, model.config.n_heads, 8, 8)
        assert close(pattern.sum(-1), torch.ones(2, model.config.n_heads, 8, dtype=torch.float64))
        assert pattern.triu(1).count_nonzero() == 0
    # Any other name leaves the fused kernel in place: not a bit changes.
    others = [n for n in model.hook_dict if not n.endswith("hook_pattern")]
    assert torch.equal(model.run_with_cache(TOKENS, names_filter=others)[0], plain)


def test_an_edited_pattern_is_the_one_that_is_used(model):
    def only_itself(pattern, hook):
        return torch.eye(pattern.shape[-1], dtype=pattern.dtype).expand_as(pattern)

    with model.hooks([("depth.1.blocks.0.attn.hook_pattern", only_itself)]):
        _, run = model.run_with_cache(TOKENS, names_filter=["depth.1.blocks.0.attn.hook_z", "depth.1.blocks.0.attn.hook_v"])
    groups = model.config.n_heads // model.config.n_kv_heads
    assert close(run["z", 1, 0], run["v", 1, 0].repeat_interleave(groups, 2))


def test_grouped_heads_keep_their_own_shapes(random_core):
    model = LoopedModel(random_core("ouro", n_kv_heads=2))
    logits, run = model.run_with_cache(TOKENS)
    assert run["k", 1, 0].shape[2] == 2 and run["q", 1, 0].shape[2] == 4 and run["pattern", 1, 0].shape[1] == 4
    assert close(logits, model(TOKENS))


# ---- what matches nothing -----------------------------------------------------------------------------------


def test_a_name_that_matches_nothing_names_the_closest(model):
    wrong = "depth.1.blocks.0.hook_v"
    calls = (lambda: model.run_with_cache(TOKENS, names_filter=wrong), lambda: model.run_with_cache(TOKENS, names_filter=[wrong]),
             lambda: model.run_with_hooks(TOKENS, fwd_hooks=[(wrong, scaled(2))]), lambda: model.add_hook(wrong, scaled(2)),
             lambda: model.hooks([(wrong, scaled(2))]).__enter__(), lambda: model.tapped([(wrong, scaled(2))]).__enter__())
    for call in calls:
        with pytest.raises(HookError, match=r"closest: .*depth\.1\.blocks\.0\.attn\.hook_v"):
            call()
    assert model.tap() is None


def test_a_filter_that_matches_nothing_raises(model):
    for call in (lambda: model.run_with_cache(TOKENS, names_filter=lambda n: n.startswith("blocks.")),
                 lambda: model.run_with_cache(TOKENS, names_filter=[]),
                 lambda: model.run_with_hooks(TOKENS, fwd_hooks=[(lambda n: False, scaled(2))])):
        with pytest.raises(HookError, match="matches n"):
            call()


def test_a_hook_deeper_than_the_call_raises_even_if_the_tree_is_deep_enough(model):
    model.grow(6)
    for call in (lambda: model.run_with_cache(TOKENS, names_filter="depth.6.hook_state"),
                 lambda: model.run_with_hooks(TOKENS, depth=5, fwd_hooks=[("depth.6.hook_state", scaled(2))])):
        with pytest.raises(HookError, match="depth=6"):
            call()


# ---- the tree and TransformerLens's ways --------------------------------------------------------------------


def test_the_tree_grows_with_the_depth_of_a_call(model):
    deep = model.config.depth + 2
    _, run = model.run_with_cache(TOKENS, deep, names_filter=lambda n: n.endswith((STATE, "hook_v")))
    assert run.stack("v").shape[:2] == (deep, model.config.n_core)
    assert close(run["state", deep], state_after(model.core, deep))
    assert list(model.hook_dict) == hook_names(model.config, deep)
    assert all(model.mod_dict[n] is p and p.name == n for n, p in model.hook_dict.items())


def state_after(core, depth):
    x = core.embed(TOKENS)
    state = core.start(x)
    for _ in range(depth):
        state = core.recur(state, x)
    return state


def test_a_predicate_also_hooks_depths_that_grow_later_until_it_is_removed(model):
    depths = []
    model.add_hook(lambda n: n.endswith(STATE), lambda tensor, hook: depths.append(hook.depth()))
    model(TOKENS, depth=6)
    assert depths == [1, 2, 3, 4, 5, 6]
    model.reset_hooks()
    model(TOKENS, depth=7)
    assert depths == [1, 2, 3, 4, 5, 6] and model.tap() is None


def test_permanent_hooks_survive_a_reset(model):
    calls = []
    model.add_perma_hook("depth.1.hook_state", lambda tensor, hook: calls.append(1))
    model.reset_hooks()
    model(TOKENS)
    model.reset_hooks(including_permanent=True)
    model(TOKENS)
    assert calls == [1]


def test_hooks_nest_and_end_with_their_with(model):
    plain = model(TOKENS)
    with model.hooks([("hook_embed", scaled(2.0))]):
        once = model(TOKENS)
        with model.hooks([("hook_final", scaled(3.0))]):
            twice = model(TOKENS)
        assert torch.equal(model(TOKENS), once)
    assert close(twice, 3 * once) and not torch.equal(once, plain) and torch.equal(model(TOKENS), plain)


def test_positions_are_sliced_along_the_position_axis_of_every_activation(model):
    _, whole = model.run_with_cache(TOKENS)
    _, part = model.run_with_cache(TOKENS, pos_slice=(2, 5))
    for name, tensor in whole.items():
        axis = 2 if name.endswith("pattern") else 1
        assert torch.equal(part[name], tensor.narrow(axis, 2, 3)), name


def test_a_cached_pass_in_chunks_tells_hooks_their_absolute_positions(model):
    _, whole = model.run_with_cache(TOKENS)
    cache = model.make_cache(8, batch=2)
    seen = []
    with model.hooks([(lambda n: n in ("hook_embed", "depth.2.blocks.0.attn.hook_k", "hook_final"),
                       lambda tensor, hook: seen.append((hook.name, hook.ctx["positions"].tolist(), hook.ctx["role"])))]):
        model(TOKENS[:, :5], cache=cache)
        model.clear_contexts()
        _, rest = model.run_with_cache(TOKENS[:, 5:], cache=cache)
    names = ["hook_embed", "depth.2.blocks.0.attn.hook_k", "hook_final"]
    assert seen == [(n, p, "target") for p in ([0, 1, 2, 3, 4], [5, 6, 7]) for n in names]
    for name in whole:
        part = whole[name][:, :, 5:] if name.endswith("pattern") else whole[name][:, 5:]
        assert close(rest[name], part), name


# ---- gradients ----------------------------------------------------------------------------------------------


def test_recorded_gradients_are_the_gradients_of_the_loss(model):
    core, depth = model.core, 2
    loss, run = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True,
                                     names_filter=[f"depth.{depth}.hook_state", "hook_embed", "depth.1.blocks.0.attn.hook_v"])
    x = core.embed(TOKENS)
    state = state_after(core, depth).requires_grad_()
    final = state
    for _ in range(depth, core.config.depth):
        final = core.recur(final, x)
    again = torch.nn.functional.cross_entropy(core.read(final)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert close(loss, again)
    assert close(run[f"depth.{depth}.hook_state_grad"], torch.autograd.grad(again, state)[0])
    assert run["depth.1.blocks.0.attn.hook_v_grad"].shape == run["v", 1, 0].shape and run["hook_embed_grad"].count_nonzero() > 0


def test_gradients_flow_through_hooks_that_edit(model):
    delta = torch.zeros(model.config.d_model, dtype=torch.float64, requires_grad=True)
    loss = model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[("depth.1.hook_state", lambda tensor, hook: tensor + delta)])
    loss.backward()
    step = 1e-6 * delta.grad / delta.grad.norm()

    def loss_at(shift):
        hooks = [("depth.1.hook_state", lambda tensor, hook: tensor + shift)]
        return model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=hooks)

    losses = loss_at(step), loss_at(-step)
    assert abs((losses[0] - losses[1]) / 2e-6 - delta.grad.norm()) < 1e-6 * delta.grad.norm()


def test_backward_recording_says_what_it_needs(model):
    with pytest.raises(HookError, match="return_type='loss'"):
        model.run_with_cache(TOKENS, incl_bwd=True)
    with torch.inference_mode(), pytest.raises(HookError, match="gradients"):
        model.run_with_cache(TOKENS, incl_bwd=True, return_type="loss")
