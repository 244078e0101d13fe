"""A probe's draft is the draft a decoder would run: same calls, same cache, nothing read beyond the verified prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interventions.controls import from_other, noise, shuffled
from interventions.drafts import anchors_of, chains, compare, deep_values, draft_logits, greedy_continuation, target_pass, with_deep_values
from loopscope.errors import SettingError
from loopscope.rows import POLICIES, Chain, ReadPolicy

IDS = torch.arange(30, 54)
NAMES = ("huginn", "ouro")


@pytest.fixture(params=NAMES)
def core(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def _drafts(core, target, anchors, length, depths, policy):
    return {d: logits.unflatten(0, (-1, length)) for d, logits in draft_logits(core, target, chains(anchors, length), depths, policy)}


def _chain_in_a_cache(core, p, length, depth, policy):
    """What a decoder does: a prefix run into a cache, then a chain of drafts behind it. Fills no position beyond it."""
    cache = core.make_cache(len(IDS), core.config.depth)
    core(IDS[:p], cache=cache)
    rows = Chain(p, length)
    x = core.embed(IDS[None, p : p + length], rows, cache)
    state = core.start(x, rows)
    for r in range(1, depth + 1):
        state = core.recur(state, x, Chain(p, length, r), cache, policy)
    return core.read(state, Chain(p, length, depth), cache)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 4])
def test_a_draft_equals_a_chain_run_behind_a_real_prefix(core, policy, length):
    """Every row of the chain, at every depth, under every policy: lag g is the chain's row g - 1."""
    read = ReadPolicy.named(policy, core.config.depth)
    target = target_pass(core, IDS, core.config.depth)
    anchors = [1, 7, 20]
    drafts = _drafts(core, target, anchors, length, (1, 2, 3), read)
    for i, p in enumerate(anchors):
        for depth in (1, 2, 3):
            assert (drafts[depth][i] - _chain_in_a_cache(core, p, length, depth, read)).abs().max() < 1e-10


def test_policies_read_different_things(core):
    target = target_pass(core, IDS, core.config.depth)
    logits = [_drafts(core, target, [12], 1, (2,), ReadPolicy.named(p, core.config.depth))[2] for p in POLICIES]
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(logits) for b in logits[:i])


def test_the_target_pass_is_the_plain_forward_pass(core):
    target = target_pass(core, IDS, core.config.depth, seed=4)
    assert torch.allclose(target.log_p, core(IDS, seed=4)[0].log_softmax(-1), atol=1e-10)


def _overwritten(target, first, last):
    """The target with garbage at positions first..last-1 of every slot of every layer."""
    cache = target.cache.clone()
    for part in (cache.prelude, cache.core, cache.coda):
        for pair in part:
            for tensor in pair:
                tensor[:, :, :, first:last] = 50.0
    return replace(target, cache=cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_beyond_the_prefix_is_read_and_everything_within_is(core, policy):
    """Anchor 6 runs beside anchor 15, whose longer prefix would give it room to see too much."""
    read = ReadPolicy.named(policy, core.config.depth)
    target = target_pass(core, IDS, core.config.depth)
    clean = _drafts(core, target, [6, 15], 3, (2,), read)[2]
    beyond = _drafts(core, _overwritten(target, 6, len(IDS)), [6, 15], 3, (2,), read)[2]
    assert torch.equal(beyond[0], clean[0]), "anchor 6 must not see positions from 6 on in the cache"
    assert not torch.allclose(beyond[1], clean[1]), "anchor 15 must see positions 6..14"
    within = _drafts(core, _overwritten(target, 5, 6), [6, 15], 3, (2,), read)[2]
    assert (within[0] - clean[0]).abs().amax(-1).min() > 1e-6, "every row of anchor 6 must see position 5"


def test_chains_do_not_see_each_other(core):
    target = target_pass(core, IDS, core.config.depth)
    read = ReadPolicy.named("deep_v", core.config.depth)
    together = _drafts(core, target, [3, 4, 5], 3, (2,), read)[2]
    for i, p in enumerate((3, 4, 5)):
        assert (together[i] - _drafts(core, target, [p], 3, (2,), read)[2][0]).abs().max() < 1e-10


def test_drafting_leaves_the_targets_cache_alone(core):
    target = target_pass(core, IDS, core.config.depth)
    before = target.cache.clone()
    _drafts(core, target, [4, 9], 4, (1, 3), ReadPolicy.named("deep_kv", core.config.depth))
    for name, tensor in target.cache.materialised().items():
        assert torch.equal(tensor, before.materialised()[name]), name


def test_at_full_depth_the_aligned_draft_is_the_target_and_a_deep_one_is_not(core):
    """A deep policy reads depth T already in its first recurrence, where the target read depth 1."""
    full = core.config.depth
    target = target_pass(core, IDS, full)
    anchors = anchors_of(len(IDS), 8, 96)
    for agreement, divergence in compare(core, target, anchors, (full,), (1, 2, 4, 8), ReadPolicy()).values():
        assert agreement == 1 and divergence < 1e-9
    for policy in POLICIES[1:]:
        assert compare(core, target, anchors, (full,), (1,), ReadPolicy.named(policy, full))[full, 1][1] > 1e-6


def test_batches_of_anchors_change_nothing(core, monkeypatch):
    target = target_pass(core, IDS, core.config.depth)
    read = ReadPolicy.named("deep_k", core.config.depth)
    whole = compare(core, target, list(range(1, 17)), (1, 2), (1, 3, 8), read)
    monkeypatch.setattr("interventions.drafts._ROWS_PER_CALL", 24)
    batched = compare(core, target, list(range(1, 17)), (1, 2), (1, 3, 8), read)
    for cell, pair in whole.items():
        assert batched[cell] == pytest.approx(pair, abs=1e-10)


def test_comparison_by_hand(core):
    """Agreement and KL of lag 2 are those of the second row of each chain against the target at its position."""
    target = target_pass(core, IDS, core.config.depth)
    full = core(IDS)[0]
    anchors = [2, 9, 17]
    draft = torch.stack([_chain_in_a_cache(core, p, 2, 1, ReadPolicy())[1] for p in anchors])
    expected = full[[p + 1 for p in anchors]]
    agreement, divergence = compare(core, target, anchors, (1,), (1, 2), ReadPolicy())[1, 2]
    assert agreement == pytest.approx((draft.argmax(-1) == expected.argmax(-1)).double().mean().item())
    by_hand = (expected.softmax(-1) * (expected.log_softmax(-1) - draft.log_softmax(-1))).sum(-1).mean().item()
    assert divergence == pytest.approx(by_hand, abs=1e-10)


def test_anchors_leave_room_before_and_behind_and_are_spread_evenly():
    assert anchors_of(10, 1, 96) == list(range(1, 10))
    assert anchors_of(10, 8, 96) == [1, 2]
    assert anchors_of(9, 8, 96) == [1]
    assert anchors_of(101, 1, 4) == [1, 34, 67, 100]
    assert anchors_of(20, 3, 96, first=15) == [15, 16, 17]
    assert anchors_of(20, 8, 96, first=15) == [12], "one anchor is left of the continuation rather than none"
    with pytest.raises(SettingError, match="max_positions"):
        anchors_of(10, 1, 0)


def test_the_continuation_is_what_recomputation_would_say_next(core):
    ids = greedy_continuation(core, IDS[:6], 5, core.config.depth, seed=1)
    assert torch.equal(ids[:6], IDS[:6]) and len(ids) == 11
    for i in range(6, 11):
        assert ids[i] == core(ids[:i], seed=1)[0, -1].argmax()
    assert torch.equal(greedy_continuation(core, IDS, 0, core.config.depth), IDS)
    with pytest.raises(SettingError, match="new_tokens"):
        greedy_continuation(core, IDS, -1, core.config.depth)


def test_the_continuation_ends_with_the_end_of_text(core):
    ids = greedy_continuation(core, IDS[:6], 5, core.config.depth)
    eos = int(ids[7])
    stopping = type(core)(replace(core.config, eos=(eos,)))
    stopping.to(core.dtype).load_state_dict(core.state_dict())
    assert torch.equal(greedy_continuation(stopping, IDS[:6], 5, core.config.depth), ids[: ids.tolist().index(eos, 6) + 1])


# ---- controls ----------------------------------------------------------------------------------------------------


def test_shuffling_by_the_identity_changes_nothing_and_by_another_order_does(core):
    target = target_pass(core, IDS, core.config.depth)
    read = ReadPolicy.named("deep_v", core.config.depth)
    anchors = anchors_of(len(IDS), 2, 96)
    plain = compare(core, target, anchors, (1, 2), (1, 2), read)
    for order, same in ((torch.arange(len(IDS)), True), (torch.arange(len(IDS)).flip(0), False)):
        used = with_deep_values(target, [shuffled(v, order) for v in deep_values(target)])
        assert (compare(core, used, anchors, (1, 2), (1, 2), read) == plain) is same


def test_a_control_replaces_deep_values_and_nothing_else(core):
    """Aligned drafts and deep keys read what they always read, and the original cache is untouched."""
    target = target_pass(core, IDS, core.config.depth)
    before = [v.clone() for v in deep_values(target)]
    used = with_deep_values(target, [torch.zeros_like(v) for v in before])
    assert all(torch.equal(a, b) for a, b in zip(before, deep_values(target)))
    assert all((v == 0).all() for v in deep_values(used))
    for policy in ("aligned", "deep_k"):
        read = ReadPolicy.named(policy, core.config.depth)
        assert compare(core, used, [5, 9], (1, 2), (1,), read) == compare(core, target, [5, 9], (1, 2), (1,), read)


def test_what_controls_keep_and_what_they_destroy():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 7, generator=draw, dtype=torch.float64)
    other = torch.randn(2, 3, 7, generator=draw, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(shuffled(values, order)[:, 0], values[:, 3])
    assert torch.equal(from_other(values, other)[:, 4], other[:, 1]), "a shorter prompt is repeated"
    assert torch.equal(from_other(other, values), values[:, :3])
    wrong = noise(values, draw)
    assert torch.allclose(wrong.norm(dim=-1), values.norm(dim=-1)) and not torch.allclose(wrong, values)
