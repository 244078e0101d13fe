"""Hooks in calls whose rows lie at different depths or play different roles, and hooks without TransformerLens."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from loopscope.errors import HookError
from loopscope.hook_names import BLOCK_NAMES, STATE, hook_names
from loopscope.models.hooked import LoopedModel
from loopscope.rows import At, Chain, Wave
from loopscope.tap import DRAFT, TARGET, FunctionTap, RecordingTap, tapped

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])
PREFIX, LANES = 6, 4
ROUNDING = 1e-11


@pytest.fixture(params=("huginn", "ouro"))
def core(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def model(core):
    return LoopedModel(core)


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=ROUNDING)


def wave(core, entry, tap=None, prefix_tap=None):
    """Run four lanes behind a prefix, lane i entering at tick `entry[i]`, each to depth T. Returns states by (position, depth)."""
    cache = core.make_cache(TOKENS.shape[1])
    core(TOKENS[:, :PREFIX], cache=cache, tap=prefix_tap)
    full, states, x, depth = core.config.depth, {}, {}, {}
    tick = 0
    while not all(depth.get(i) == full for i in range(LANES)):
        for i in (i for i in range(LANES) if entry[i] == tick):
            row = Chain(PREFIX + i, 1)
            x[i] = core.embed(TOKENS[:, PREFIX + i : PREFIX + i + 1], row, cache, tap)
            states[i, 0], depth[i] = core.start(x[i], row), 0
        lanes = [i for i in range(LANES) if depth.get(i, full) < full]
        rows = Wave(PREFIX + lanes[0], tuple(depth[i] + 1 for i in lanes))
        state = core.recur(torch.cat([states[i, depth[i]] for i in lanes], 1), torch.cat([x[i] for i in lanes], 1), rows, cache, tap=tap)
        for column, i in enumerate(lanes):
            depth[i] += 1
            states[i, depth[i]] = state[:, column : column + 1]
        tick += 1
    return states


ENTRIES = ((0, 1, 2, 3), (0, 1, 3, 4), (0, 2, 4, 6))  # one recurrence apart; unevenly; two apart


@pytest.mark.parametrize("entry", ENTRIES)
def test_hooks_that_change_nothing_change_nothing_in_a_wave(core, entry):
    plain, recorded = wave(core, entry), wave(core, entry, RecordingTap(lambda name: "pattern" not in name))
    assert plain.keys() == recorded.keys()
    for key in plain:
        assert torch.equal(plain[key], recorded[key]), key


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_wave_shows_each_depth_exactly_its_own_rows(model, entry):
    """Every activation a wave shows equals that of the full pass, at the same depth and position."""
    _, run = model.run_with_cache(TOKENS)
    tap = RecordingTap()
    wave(model.core, entry, tap)
    assert set(tap.records) == {n for n in hook_names(model.config, model.config.depth) if not n.startswith(("coda", "hook_final"))}
    for name, records in tap.records.items():
        assert [r.positions.tolist() for r in records] == [[PREFIX + i] for i in range(LANES)], name
        for i, record in enumerate(records):
            p = PREFIX + i
            if name.endswith("pattern"):
                whole, end = run[name][:, :, p : p + 1], record.tensor.shape[-1]
                assert close(record.tensor, whole[..., :end]) and whole[..., end:].count_nonzero() == 0
            else:
                assert close(record.tensor, run[name][:, p : p + 1]), name


def test_rows_at_one_depth_fire_its_hook_once_together(core):
    cache = core.make_cache(8, depth=4)
    core(TOKENS[:, :4], cache=cache)
    tap = RecordingTap(lambda name: name.endswith((STATE, "hook_v", "hook_pattern")))
    state = torch.randn(1, 3, core.config.d_model, dtype=torch.float64)
    core.recur(state, state, Wave(4, (2, 1, 1)), cache, tap=tap)
    assert [(n, r.positions.tolist()) for n, rs in tap.records.items() if STATE in n for r in rs] == \
        [("depth.2.hook_state", [4]), ("depth.1.hook_state", [5, 6])]
    assert tap["depth.1.blocks.0.attn.hook_v"].shape[1] == 2
    assert tap["depth.1.blocks.0.attn.hook_pattern"].shape == (1, core.config.n_heads, 2, 7)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ("attn.hook_v", "attn.hook_pattern", "hook_resid_mid", STATE))
def test_an_edit_acts_the_same_in_a_wave_as_in_a_full_pass(model, entry, kind):
    name = f"depth.2.{kind}" if kind == STATE else f"depth.2.blocks.1.{kind}"
    position = PREFIX + 1

    def edit(tensor, hook):
        where = hook.ctx["positions"] == position
        tensor = tensor.clone()
        if kind.endswith("pattern"):
            tensor[:, :, where] = tensor[:, :, where] * 0.5
        else:
            tensor[:, where] = tensor[:, where] * 0.5
        return tensor

    def edit_in_place(tensor, hook):
        tensor.copy_(edit(tensor, hook))

    clean = model.core(TOKENS)
    for hook in (edit, edit_in_place):
        with model.hooks([(name, hook)]):
            _, run = model.run_with_cache(TOKENS, names_filter=lambda n: n.endswith(STATE))
            states = wave(model.core, entry, model.tap())
        for i in range(LANES):
            for r in range(1, model.config.depth + 1):
                assert close(states[i, r], run["state", r][:, PREFIX + i : PREFIX + i + 1]), (i, r)
    assert torch.equal(clean, model.core(TOKENS))
    assert not close(run["state", 4][:, position], state_of(model, TOKENS)[:, position])


def state_of(model, tokens):
    return model.run_with_cache(tokens, names_filter=lambda n: n.endswith(STATE))[1]["state", model.config.depth]


# ---- roles --------------------------------------------------------------------------------------------------


def test_draft_rows_fire_no_hook_unless_asked_for(model):
    seen = []
    hooks = [(lambda n: n.endswith("hook_v") and n.startswith("depth.1"), lambda tensor, hook: seen.append(hook.ctx["role"]))]
    with model.tapped(hooks) as tap:
        assert tap.draft is None
        model.core(TOKENS, tap=tap.as_role(DRAFT))
    assert seen == []
    with model.tapped(hooks, hook_drafts=True) as tap:
        model.core(TOKENS, tap=tap.draft)
        model.core(TOKENS, tap=tap)
    assert seen == [DRAFT] * model.config.n_core + [TARGET] * model.config.n_core
    assert model.tap() is None


@pytest.mark.parametrize("hook_drafts", (False, True))
def test_one_readout_of_a_target_and_a_draft_row_edits_only_those_whose_role_fires(model, hook_drafts):
    core = model.core
    cache = core.make_cache(10)
    core(TOKENS[:, :8], cache=cache)
    state = torch.randn(1, 2, core.config.d_model, dtype=torch.float64)
    rows = At((7, 9))
    plain = core.read(state, rows, cache.clone())
    seen = []

    def double(tensor, hook):
        seen.append((hook.ctx["role"], hook.ctx["positions"].tolist()))
        return 2 * tensor

    with model.tapped([("hook_final", double)], hook_drafts) as tap:
        edited = core.read(state, rows, cache.clone(), tap.as_role((TARGET, DRAFT)))
    assert seen == [(TARGET, [7]), (DRAFT, [9])][: 1 + hook_drafts]
    assert close(edited[:, 0], 2 * plain[:, 0]) and close(edited[:, 1], (1 + hook_drafts) * plain[:, 1])


def test_roles_must_be_known_and_fit_the_call(model):
    with model.tapped([("hook_final", lambda tensor, hook: None)]) as tap:
        with pytest.raises(HookError, match="role"):
            tap.as_role("drafted")
        with pytest.raises(HookError, match="2 rows.*10"):
            model.core(TOKENS, tap=tap.as_role((TARGET, DRAFT)))


def test_a_draft_deeper_than_the_target_grows_the_tree(model):
    deep = model.config.depth + 3
    seen = []
    with model.tapped([(lambda n: n.endswith(STATE), lambda tensor, hook: seen.append(hook.depth()))], hook_drafts=True) as tap:
        state = torch.randn(1, 2, model.config.d_model, dtype=torch.float64)
        model.core.recur(state, state, Chain(0, 2, deep), tap=tap.draft)
    assert seen == [deep]


def test_a_draft_that_fires_nothing_leaves_the_tree_as_it_is(model):
    with model.tapped([("depth.1.hook_state", lambda tensor, hook: None)]) as tap:
        state = torch.randn(1, 2, model.config.d_model, dtype=torch.float64)
        model.core.recur(state, state, Chain(0, 2, 40), tap=tap.as_role(DRAFT))
    assert list(model.hook_dict) == hook_names(model.config, model.config.depth)


# ---- without TransformerLens --------------------------------------------------------------------------------


def test_a_function_tap_edits_like_run_with_hooks(model):
    hooks = [("depth.2.blocks.0.hook_mlp_out", lambda tensor, hook: tensor * hook.depth()),
             (lambda n: n.endswith("hook_pattern"), lambda tensor, hook: None)]
    edited = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert torch.equal(edited, model.core(TOKENS, tap=FunctionTap(model.core, hooks)))
    assert not close(edited, model(TOKENS))


def test_tapped_serves_both_kinds_of_model_and_is_none_where_nothing_is_hooked(model):
    hooks = [("depth.1.hook_state", lambda tensor, hook: -tensor)]
    logits = []
    for kind in (model, model.core):
        with tapped(kind) as tap:
            assert tap is None
        with tapped(kind, hooks) as tap:
            logits.append(kind.core(TOKENS, tap=tap))
        with pytest.raises(HookError, match="closest"), tapped(kind, [("depth.1.hook_stat", hooks[0][1])]):
            pass
    assert torch.equal(*logits)


def test_a_recording_over_chunks_is_the_recording_of_the_whole(core):
    whole, parts = RecordingTap(), RecordingTap()
    core(TOKENS, tap=whole)
    cache = core.make_cache(10)
    core(TOKENS[:, :4], cache=cache, tap=parts)
    core(TOKENS[:, 4:], cache=cache, tap=parts)
    names = [n for n in whole.records if not n.endswith("pattern")]
    assert all(close(whole[n], parts[n]) for n in names) and len(names) > len(BLOCK_NAMES)
    with pytest.raises(HookError, match="2 calls"):
        parts["depth.1.blocks.0.attn.hook_pattern"]
    with pytest.raises(HookError, match="closest: .*hook_state"):
        parts["depth.1.hook_stat"]


def test_everything_but_the_hooked_model_works_without_transformer_lens():
    script = textwrap.dedent("""
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("transformer_lens", "transformers"):
                    raise ModuleNotFoundError(f"{name} is blocked", name=name)

        sys.meta_path.insert(0, Block())
        import torch
        torch.set_num_threads(1)
        import loopscope, decoders
        from loopscope.random_models import make_random_core
        from loopscope.tap import RecordingTap, tapped

        core = make_random_core("huginn")
        with tapped(core, [("depth.1.hook_state", lambda tensor, hook: -tensor)]) as tap:
            assert not torch.equal(core(torch.arange(5), tap=tap), core(torch.arange(5)))
        tap = RecordingTap("depth.2.hook_state")
        core(torch.arange(5), tap=tap)
        assert tap["depth.2.hook_state"].shape == (1, 5, 48)
        assert len(decoders.Wavefront(1).generate(core, [1, 2, 3], max_new_tokens=4).tokens) == 4
        try:
            loopscope.LoopedModel
        except ModuleNotFoundError:
            print("blocked where it must be")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "blocked where it must be"
