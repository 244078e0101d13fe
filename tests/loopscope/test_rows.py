"""How rows attend: every plan against plain attention written out here, and start states as a pure function of position."""

from __future__ import annotations

import pytest
import torch

from loopscope.errors import ContextError, DepthError, PromptError, SettingError
from loopscope.random_models import make_random_core
from loopscope.rows import At, Chain, Draft, Forest, ReadPolicy, Wave

DEPTH, LENGTH = 5, 9


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def core(request):
    return make_random_core(request.param, gain=0.7, seed=1, n_kv_heads=2)


@pytest.fixture(scope="module")
def full(core):
    """tokens, x, states[depth] of a full pass, and its cache with room for three more positions."""
    tokens = torch.arange(3, 3 + LENGTH)[None]
    cache = core.make_cache(LENGTH + 3, DEPTH)
    x = core.embed(tokens, Chain(0, LENGTH), cache)
    states = [core.start(x)]
    for r in range(1, DEPTH + 1):
        states.append(core.recur(states[-1], x, Chain(0, LENGTH, r), cache))
    cache.commit(LENGTH)
    return x, states, cache


def reference(core, state, x, position, reads):
    """One recurrence of one row; reads(layer) -> (keys, values) [kv_heads, n, d] of what comes before it."""
    table = core.rotary_table[position : position + 1]
    h = core.inject(state, x)
    for layer, block in enumerate(core.blocks):
        class Plain:
            def attend(self, cached, q, k, v, pattern=None, layer=layer):
                keys, values = reads(layer)
                keys, values = torch.cat((keys, k[0].transpose(0, 1)), 1), torch.cat((values, v[0].transpose(0, 1)), 1)
                heads = []
                for head in range(q.shape[2]):
                    kv = head * keys.shape[0] // q.shape[2]
                    weights = torch.softmax(q[0, 0, head] @ keys[kv].T / q.shape[-1] ** 0.5, -1)
                    heads.append(weights @ values[kv])
                return torch.stack(heads)[None, None]

        h = block(h, Plain(), None, table)
    return core.close_loop(h)


def cell(cache, layer, k_depth, v_depth, end):
    return cache.keys(layer, k_depth, end)[0], cache.values(layer, v_depth, end)[0]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_wave_reads_each_row_at_its_own_depth(core, full):
    x, states, cache = full
    for depths in ((4, 3, 2, 1), (5, 3, 1), (5, 4, 1), (3, 3, 1), (2, 5)):
        first = LENGTH - len(depths)
        state = torch.cat([states[r - 1][:, first + i : first + i + 1] for i, r in enumerate(depths)], 1)
        got = core.recur(state, x[:, first:], Wave(first, depths), cache.clone())
        for i, r in enumerate(depths):
            close(got[:, i : i + 1], states[r][:, first + i : first + i + 1])


def test_even_waves_copy_no_prefix(core, full):
    from loopscope.attention_mixed import WavePlan

    cache = full[2]
    plan = WavePlan(cache, Wave(4, (5, 3, 1)))
    rows = torch.zeros(3, *cache.core[0][0].shape[2:3], cache.core[0][0].shape[4], dtype=cache.dtype)
    assert plan._place(cache.clone().core[0][0], rows).untyped_storage().nbytes() == cache.core[0][0].untyped_storage().nbytes()
    assert not WavePlan(cache, Wave(4, (5, 4, 1))).even


@pytest.mark.parametrize("k_depth, v_depth", [(None, None), (None, 5), (5, None), (5, 5), (2, 4)])
def test_every_kind_of_row_reads_the_prefix_at_the_policys_depths(core, full, k_depth, v_depth):
    x, states, cache = full
    policy, p, r = ReadPolicy(k_depth, v_depth), LENGTH - 1, 3
    state, own = states[r - 1][:, p:], x[:, p:]
    want = reference(core, state, own, p, lambda layer: cell(cache, layer, k_depth or r, v_depth or r, p))
    forest = Forest(torch.tensor([p]), torch.tensor([p]), torch.ones(1, 1, dtype=torch.bool), r)
    per_row = Forest(forest.at, forest.prefix_end, forest.ancestors, (r,))
    for rows in (Chain(p, 1, r), At((p,), r), Draft(p, p, r), forest, per_row):
        close(core.recur(state, own, rows, cache.clone(), policy), want)


def test_a_sequential_draft_reads_the_prefix_deep_and_its_block_at_its_own_depth(core, full):
    x, states, cache = full
    cache, policy, anchor, r = cache.clone(), ReadPolicy(5, 5), LENGTH - 2, 2
    for step in (1, 2):  # the first draft of the block, two recurrences
        first = core.recur(states[step - 1][:, anchor : anchor + 1], x[:, anchor : anchor + 1], Draft(anchor, anchor, step), cache, policy)
    assert first.isfinite().all()

    def reads(layer):
        deep, own = cell(cache, layer, 5, 5, anchor), cell(cache, layer, r, r, anchor + 1)
        return tuple(torch.cat((a, b[:, anchor:]), 1) for a, b in zip(deep, own))

    state, own = states[r - 1][:, anchor + 1 :], x[:, anchor + 1 :]
    want = reference(core, state, own, anchor + 1, reads)
    close(core.recur(state, own, Draft(anchor, anchor + 1, r), cache, policy), want)


def test_a_forest_writes_nothing_and_sees_only_its_prefix_and_ancestors(core, full):
    x, states, cache = full
    before = cache.clone()
    rows = Forest(torch.tensor([4, 5, 7]), torch.tensor([4, 4, 6]), torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool), 2)
    pick = rows.at
    got = core.recur(states[1][:, pick], x[:, pick], rows, cache)
    for name, tensor in cache.materialised().items():
        assert torch.equal(tensor, before.materialised()[name])
    broken = cache.clone()
    for k, v in broken.core:
        k[:, :, :, 6:], v[:, :, :, 6:] = 9.0, 7.0
    close(core.recur(states[1][:, pick], x[:, pick], rows, broken), got)
    for k, v in broken.core:
        v[:, :, :, 4:6] += 1.0
    changed = core.recur(states[1][:, pick], x[:, pick], rows, broken)
    close(changed[:, :2], got[:, :2])
    assert (changed[:, 2] - got[:, 2]).abs().max() > 1e-3


def test_start_states_do_not_depend_on_how_they_are_asked_for():
    core = make_random_core("huginn", seed=0)
    x = torch.zeros(1, 120, core.config.d_model, dtype=torch.float64)
    whole = core.start(x, Chain(0, 120), seed=7)
    pieces = [core.start(x[:, :n], Chain(a, n), seed=7) for a, n in ((0, 1), (1, 62), (63, 3), (66, 54))]
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(core.start(x[:, :2], At((3, 119)), seed=7), whole[:, [3, 119]])
    batch = core.start(torch.zeros(3, 4, core.config.d_model, dtype=torch.float64), seed=7)
    assert torch.equal(batch, whole[:, :4].expand(3, -1, -1))
    for other in ({"seed": 8}, {"seed": 7, "sequence": 1}):
        assert not torch.equal(core.start(x, Chain(0, 120), **other), whole)


def test_start_states_follow_the_truncated_normal_of_the_config():
    from scipy import stats

    from loopscope.start import keyed_normal

    draws = keyed_normal(0, 0, 0, 400, 128, std=0.63).flatten().numpy() / 0.63
    assert abs(draws).max() <= 3
    assert stats.kstest(draws, stats.truncnorm(-3, 3).cdf).pvalue > 1e-3
    positions = keyed_normal(0, 0, 0, 2000, 2, std=1.0)
    assert abs(torch.corrcoef(torch.stack((positions[:-1, 0], positions[1:, 0])))[0, 1]) < 0.1


def test_bad_depths_positions_tokens_and_starts_are_refused(core):
    tokens = torch.tensor([[1, 2, 3]])
    cache = core.make_cache(4, 2)
    for depth in (0, -1, 2.0, True):
        with pytest.raises(DepthError, match="depth"):
            core(tokens, depth=depth)
    with pytest.raises(DepthError, match="holds depths 1 to 2"):
        core(tokens, depth=3, cache=cache)
    with pytest.raises(ContextError, match="holds 4 positions"):
        core(torch.tensor([[1, 2, 3, 4, 5]]), depth=2, cache=core.make_cache(4, 2))
    with pytest.raises(ContextError, match="context"):
        core(torch.ones(1, core.config.context + 1, dtype=torch.long))
    with pytest.raises(PromptError, match="outside the vocabulary"):
        core(torch.tensor([[core.config.vocab_size]]))
    with pytest.raises(PromptError):
        core(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(SettingError):
        core(tokens, start_state="ones")
    with pytest.raises(SettingError):
        core(tokens, start_state=torch.zeros(1, 2, core.config.d_model))
    with pytest.raises(SettingError):
        ReadPolicy.named("deepest", 4)
