"""Left-padded batches: a padded row is the row alone, in every family, with a cache and without, and what Ouro's official code gives.

The sweep over sizes, windows and seeds is in test_properties.py.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from loopscope.errors import PromptError, SettingError
from loopscope.models.hooked import LoopedModel
from loopscope.models.loading import load_core
from loopscope.padding import read_pads
from loopscope.random_models import FAMILIES
from loopscope.rows import At, Chain, Draft, Wave

TOKENS = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(3))
PADS = (3, 0, 7)
MASK = (torch.arange(9) >= torch.tensor(PADS)[:, None]).long()
ROUNDING = 1e-11


def close(a, b, atol=ROUNDING):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# ---- what Ouro's official code gives ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ouro_case(goldens):
    return load_core(goldens / "ouro"), load_file(goldens / "ouro" / "io.safetensors")


def test_ouro_padded_logits_match_the_golden(ouro_case):
    core, io = ouro_case
    tokens, mask = io["leftpad_input_ids"], io["leftpad_attention_mask"]
    logits = core(tokens, depth=4, attention_mask=mask)
    pads = int((mask[0] == 0).sum())
    assert pads == 8 and mask[1].all()
    close(logits[0, pads:], io["leftpad_logits_T4_row0"][pads:], 3e-4)
    close(logits[0, pads:], core(tokens[0, pads:], depth=4)[0], 1e-5)
    close(logits[1], io["logits_T4"][1], 3e-4)


@pytest.mark.parametrize("cached", [True, False])
def test_ouro_padded_greedy_tokens_match_the_golden(ouro_case, cached):
    core, io = ouro_case
    tokens, mask, want = io["leftpad_input_ids"], io["leftpad_attention_mask"], io["leftpad_greedy_T4"]
    cache, new, got = core.make_cache(40, 4, batch=2), tokens, []
    for _ in range(want.shape[1]):
        if cached:
            logits = core(new, depth=4, cache=cache, attention_mask=mask if not got else None)
        else:
            grown = torch.cat((tokens, *got), 1)
            logits = core(grown, depth=4, attention_mask=torch.cat((mask, torch.ones_like(grown[:, tokens.shape[1] :])), 1))
        new = logits[:, -1:].argmax(-1)
        got.append(new)
    assert torch.equal(torch.cat(got, 1), want)


# ---- hooks, start states, losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_fire_once_on_a_padded_batch_and_show_each_row_what_it_is_alone(random_core, family):
    model = LoopedModel(random_core(family, gain=0.5, depth=2))
    logits, run = model.run_with_cache(TOKENS, attention_mask=MASK)
    fired = []
    hooked = model.run_with_hooks(TOKENS, attention_mask=MASK,
                                  fwd_hooks=[(lambda name: True, lambda tensor, hook: fired.append((hook.name, tensor.shape[0])))])
    assert fired == [(name, 3) for name in model.hook_dict]
    close(hooked, logits)
    for row, pads in enumerate(PADS):
        alone, own = model.run_with_cache(TOKENS[row, pads:])
        close(logits[row, pads:], alone[0])
        for name, tensor in run.items():
            mine = tensor[row, :, pads:, pads:] if name.endswith("hook_pattern") else tensor[row, pads:]
            close(mine, own[name][0])


@pytest.mark.parametrize("family", ["huginn", "raven", "parcae"])
def test_a_given_start_state_is_indexed_by_position_and_not_by_column(random_core, family):
    core = random_core(family, gain=0.9)
    draw = torch.Generator().manual_seed(0)
    for rows in (1, 3):
        start = torch.randn(rows, 9, core.config.d_model, generator=draw, dtype=torch.float64)
        together = core(TOKENS, start_state=start, attention_mask=MASK)
        for row, pads in enumerate(PADS):
            own = start[row % rows][None]
            close(together[row, pads:], core(TOKENS[row, pads:], start_state=own)[0])
    assert (core(TOKENS[:1, 3:], start_state=start[:1])[0] - core(TOKENS[:1, 3:], start_state=start[:1, 3:])[0]).abs().max() > 1e-3


def test_start_states_of_rows_that_lie_in_several_stretches_follow_the_position(random_core):
    """Start states are kept in stretches of 64 positions; the pads of one row here are longer than that."""
    core = random_core("huginn", context=300)
    x = torch.zeros(2, 150, core.config.d_model, dtype=torch.float64)
    whole = core.start(x[:1], Chain(0, 150), seed=3)[0]
    padded = core.start(x, Chain(0, 150, pads=(0, 70)), seed=3)
    assert torch.equal(padded[0], whole) and torch.equal(padded[1, 70:], whole[:80])
    assert torch.equal(core.start(x[:, :20], Chain(120, 20, pads=(0, 70)), seed=3)[1], whole[50:70])


def test_a_loss_leaves_out_the_pads(random_core):
    model = LoopedModel(random_core("ouro", gain=0.5))
    loss = model(TOKENS, attention_mask=MASK, return_type="loss")
    rows = [(model(TOKENS[row, pads:], return_type="loss"), 8 - pads) for row, pads in enumerate(PADS)]
    close(loss, sum(mean * count for mean, count in rows) / sum(count for _, count in rows))
    with pytest.raises(SettingError, match="at least two tokens"):
        model(TOKENS[:1], attention_mask=torch.tensor([[0] * 8 + [1]]), return_type="loss")


def test_pads_do_not_count_towards_the_context(random_core):
    core = random_core("huginn", context=8)
    mask = torch.ones(2, 9).long()
    mask[:, 0], mask[1, 1] = 0, 0
    close(core(TOKENS[:2], attention_mask=mask)[0, 1:], core(TOKENS[0, 1:])[0])


# ---- masks ------------------------------------------------------------------------------------------------------


def test_masks_that_pad_nothing_take_the_path_of_no_mask(random_core):
    core = random_core("ouro")
    for mask in (torch.ones(3, 9).long(), torch.ones(3, 9, dtype=torch.bool)):
        assert read_pads(mask, TOKENS) == ()
        assert torch.equal(core(TOKENS, attention_mask=mask), core(TOKENS))
    assert torch.equal(core(TOKENS[0, 3:], attention_mask=torch.ones(6).long()), core(TOKENS[0, 3:]))


def test_a_mask_may_name_the_new_tokens_or_all_columns_and_a_cache_goes_on_by_itself(random_core):
    core = random_core("raven")
    want = core(TOKENS, attention_mask=MASK)
    for second in (None, MASK[:, 8:], MASK):
        cache = core.make_cache(9, batch=3)
        core(TOKENS[:, :8], cache=cache, attention_mask=MASK[:, :8])
        assert cache.pads == PADS == cache.clone().pads
        close(core(TOKENS[:, 8:], cache=cache, attention_mask=second), want[:, 8:])
    cache.length = 0  # begun again, without pads
    close(core(TOKENS, cache=cache), core(TOKENS))
    assert cache.pads == ()


@pytest.mark.parametrize("mask, match", [
    (torch.tensor([[1] * 9, [1] * 8 + [0], [1] * 9]), "row 1 has a 0 behind a 1.*left only"),
    (torch.tensor([[0, 1, 0] + [1] * 6] * 3), "row 0 has a 0 behind a 1"),
    (torch.full((3, 9), 2), "0 .a pad. and 1 .a token., found 2"),
    (torch.ones(3, 9), "whole numbers.*float32"),
    ([[1] * 9] * 3, "must be a tensor.*got list"),
    (torch.ones(3, 8).long(), r"must be \[3, 9\] like the tokens, got \[3, 8\]"),
    (torch.ones(9).long(), r"got \[1, 9\]"),
    (torch.tensor([[1] * 9, [0] * 9, [1] * 9]), "row 1 holds no token, only pads"),
])
def test_any_other_mask_is_refused_and_says_what_was_found(random_core, mask, match):
    with pytest.raises(PromptError, match=match):
        random_core("ouro")(TOKENS, attention_mask=mask)


def test_a_mask_that_contradicts_the_cache_is_refused(random_core):
    core = random_core("ouro")
    cache = core.make_cache(12, batch=3)
    core(TOKENS[:, :8], cache=cache, attention_mask=MASK[:, :8])
    with pytest.raises(PromptError, match="row 0 begins with 2 pads, but the cache was filled with 3"):
        core(TOKENS[:, 8:], cache=cache, attention_mask=(torch.arange(9) >= torch.tensor([2, 0, 7])[:, None]).long())
    with pytest.raises(PromptError, match="row 1 has a 0 behind a 1"):
        core(TOKENS[:, 8:], cache=cache, attention_mask=torch.tensor([[1], [0], [1]]))
    assert cache.length == 8


def test_rows_that_know_nothing_of_the_pads_are_refused(random_core):
    """They would attend to pads."""
    core = random_core("huginn")
    cache = core.make_cache(14, batch=3)
    core(TOKENS, cache=cache, attention_mask=MASK)
    x = torch.zeros(3, 2, core.config.d_model, dtype=torch.float64)
    for rows in (Chain(9, 2), At((9, 10)), Draft(9, 9, 1, 2), Wave(9, (2, 1)), Wave(9, (1, 1))):
        with pytest.raises(SettingError, match=r"padded by \[3, 0, 7\] columns.*attention_mask"):
            core.recur(x, x, rows, cache)


def test_a_prefix_read_in_both_directions_is_not_padded(random_core):
    with pytest.raises(SettingError, match="prefix=4 counts the same first positions.*one by one"):
        random_core("hrm_text")(TOKENS, attention_mask=MASK, prefix=4)
