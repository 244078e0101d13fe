"""prefix_channels and depth_grid: complete, paired, reproducible, and clear about what they cannot do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from interventions import DepthGridResult, EffectsResult, PrefixChannelsResult, depth_grid, prefix_channels
from interventions.drafts import compare, greedy_continuation, target_pass
from interventions.grid import grid_depths
from loopscope.errors import DepthError, NumericsError, PromptError, SettingError
from loopscope.models.loading import load_core
from loopscope.rows import POLICIES, ReadPolicy

PROMPTS = [list(range(40, 60)), list(range(90, 104)), list(range(120, 131))]


@pytest.fixture(params=["huginn", "ouro"])
def core(request):
    return request.getfixturevalue(request.param)


def test_every_condition_is_measured_on_the_same_anchors(core):
    frame = prefix_channels(core, PROMPTS, progress=False).frame
    assert not frame.duplicated(["prompt", "depth", "lag", "policy", "control"]).any()
    assert len(frame) == 3 * 2 * 4 * (4 + 3), "prompts, depths 1 and 2 (below T = 4), lags, policies and controls"
    assert set(frame.policy) == set(POLICIES) and set(frame[frame.control != "none"].policy) == {"deep_v"}
    assert (frame.groupby("prompt").n_positions.nunique() == 1).all()
    assert frame.groupby("prompt").n_positions.first().tolist() == [12, 6, 3]
    assert frame.agreement.between(0, 1).all() and (frame.kl_nats >= 0).all()


def test_controls_change_the_deep_value_read_only(core):
    frame = prefix_channels(core, PROMPTS, lags=(1,), depths=(1,), progress=False).frame
    kl = frame.pivot(index="prompt", columns=["policy", "control"], values="kl_nats")
    for control in ("shuffled_v", "other_prompt_v", "noise_v"):
        assert (kl["deep_v", control] != kl["deep_v", "none"]).all(), control
    without = prefix_channels(core, PROMPTS, lags=(1,), depths=(1,), controls=(), progress=False).frame
    assert without.reset_index(drop=True).equals(frame[frame.control == "none"].reset_index(drop=True))


def test_the_same_seed_gives_the_same_table_and_another_seed_other_controls(ouro):
    tables = [prefix_channels(ouro, PROMPTS, lags=(1,), seed=s, progress=False).frame for s in (1, 1, 2)]
    assert tables[0].equals(tables[1])
    differs = tables[0][tables[0].kl_nats != tables[2].kl_nats]
    assert set(differs.control) == {"shuffled_v", "noise_v"}, "Ouro draws no start state, so only drawn controls move"


def test_on_the_models_own_text_anchors_lie_in_the_continuation(core):
    """Equal to measuring the longer sequence at those positions, which a decoder would call its own."""
    own = prefix_channels(core, PROMPTS, lags=(1, 2), new_tokens=10, progress=False).frame
    assert set(own.n_positions) == {9}
    with torch.inference_mode():
        whole = greedy_continuation(core, torch.tensor(PROMPTS[1]), 10, 4)
        expected = compare(core, target_pass(core, whole, 4), range(14, 23), (1, 2), (1, 2), ReadPolicy.named("deep_v", 4))
    rows = own[(own.prompt == 1) & (own.policy == "deep_v") & (own.control == "none")].set_index(["depth", "lag"])
    for cell, pair in expected.items():
        assert tuple(rows.loc[cell, ["agreement", "kl_nats"]]) == pytest.approx(pair, abs=1e-12)
    grid = depth_grid(core, PROMPTS, depths=(4,), new_tokens=10, max_positions=4, progress=False).frame
    assert set(grid.n_positions) == {4}


def test_full_depth_drafts_agree_under_the_aligned_policy_only(core):
    frame = prefix_channels(core, PROMPTS, depths=(4,), lags=(1, 4), controls=(), progress=False).frame
    aligned = frame[frame.policy == "aligned"]
    assert (aligned.agreement == 1).all() and (aligned.kl_nats < 1e-9).all()
    assert (frame[frame.policy != "aligned"].kl_nats > 1e-9).all()


def test_depths_beyond_full_depth_are_left_out_aloud(ouro):
    with pytest.warns(UserWarning, match="beyond full depth 4 are left out: 8"):
        frame = prefix_channels(ouro, PROMPTS[:2], depths=(1, 8), lags=(1,), controls=(), progress=False).frame
    assert set(frame.depth) == {1}


def test_one_prompt_has_no_other_prompts_values(ouro):
    with pytest.warns(UserWarning, match="second prompt"):
        frame = prefix_channels(ouro, PROMPTS[:1], lags=(1,), progress=False).frame
    assert set(frame.control) == {"none", "shuffled_v", "noise_v"}


def test_start_states_are_named(huginn):
    rows = {start: prefix_channels(huginn, PROMPTS[:2], lags=(1,), controls=(), start_state=start, progress=False).frame
            for start in (None, "zero")}
    assert set(rows[None].start) == {"keyed"} and set(rows["zero"].start) == {"zero"}
    assert not rows[None].kl_nats.equals(rows["zero"].kl_nats)


def test_a_hooked_model_is_run_through_its_core(ouro):
    options = {"lags": (1,), "controls": (), "progress": False, "model_name": "m", "task": "code"}
    frame = prefix_channels(SimpleNamespace(core=ouro), PROMPTS, **options).frame
    assert frame.equals(prefix_channels(ouro, PROMPTS, **options).frame)
    assert set(frame.model) == {"m"} and set(frame.task) == {"code"}


def test_impossible_requests_are_refused_in_words(ouro):
    quiet = {"progress": False}
    for call, error, words in (
            (lambda: prefix_channels(ouro, [], **quiet), PromptError, "no prompts"),
            (lambda: prefix_channels(ouro, [PROMPTS[0], [1, 2, 3]], **quiet), PromptError, "prompt 1 has 3 tokens.*lag 8.*at least 9"),
            (lambda: prefix_channels(ouro, PROMPTS, depths=(8, 16), **quiet), DepthError, "within full depth 4: 8, 16"),
            (lambda: prefix_channels(ouro, PROMPTS, depths=(0, 1), **quiet), DepthError, "from 1 to 4, got 0"),
            (lambda: prefix_channels(ouro, PROMPTS, depths=(), **quiet), DepthError, "got none"),
            (lambda: prefix_channels(ouro, PROMPTS, lags=(0,), **quiet), SettingError, "lags"),
            (lambda: prefix_channels(ouro, PROMPTS, policies=("mature",), **quiet), SettingError, "'mature' is unknown.*'deep_v'"),
            (lambda: prefix_channels(ouro, PROMPTS, controls=("swap",), **quiet), SettingError, "'swap' is unknown"),
            (lambda: depth_grid(ouro, PROMPTS, draft_depth=5, **quiet), DepthError, "draft depth 5 is beyond full depth 4"),
            (lambda: depth_grid(ouro, PROMPTS, depths=(9,), **quiet), DepthError, "within full depth 4"),
            (lambda: depth_grid(ouro, [[1]], **quiet), PromptError, "at least 2")):
        with pytest.raises(error, match=words):
            call()


def test_nan_is_reported(goldens):
    core = load_core(goldens / "ouro")
    core.blocks[0].mlp.down.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError):
        prefix_channels(core, PROMPTS, progress=False)


# ---- depth grid --------------------------------------------------------------------------------------------------


def test_grid_depths_are_powers_of_two_and_full_depth():
    assert grid_depths(16) == (1, 2, 4, 8, 16) and grid_depths(4) == (1, 2, 4)
    assert grid_depths(6) == (1, 2, 4, 6) and grid_depths(1) == (1,)


def test_the_grids_corners_are_the_named_policies_for_a_depth_one_draft(core):
    grid = depth_grid(core, PROMPTS, draft_depth=1, progress=False).frame.set_index(["prompt", "k_depth", "v_depth"])
    named = prefix_channels(core, PROMPTS, depths=(1,), lags=(1,), controls=(), progress=False).frame.set_index(["prompt", "policy"])
    for cell, policy in (((1, 1), "aligned"), ((1, 4), "deep_v"), ((4, 1), "deep_k"), ((4, 4), "deep_kv")):
        for prompt in range(3):
            for metric in ("agreement", "kl_nats"):
                assert grid.loc[(prompt, *cell), metric] == pytest.approx(named.loc[(prompt, policy), metric], abs=1e-12)


def test_a_cell_reads_one_depth_in_every_recurrence(core):
    """(2, 2) at draft depth 2 is not the aligned draft, whose first recurrence reads depth 1; (4, 4) is deep K/V."""
    grid = depth_grid(core, PROMPTS, draft_depth=2, progress=False).frame.set_index(["prompt", "k_depth", "v_depth"]).kl_nats
    named = prefix_channels(core, PROMPTS, depths=(2,), lags=(1,), controls=(), progress=False).frame
    named = named.set_index(["prompt", "policy"]).kl_nats
    for prompt in range(3):
        assert abs(grid[prompt, 2, 2] - named[prompt, "aligned"]) > 1e-6
        assert grid[prompt, 4, 4] == pytest.approx(named[prompt, "deep_kv"], abs=1e-12)


def test_the_grid_is_whole(core):
    frame = depth_grid(core, PROMPTS, depths=(1, 3), max_positions=5, progress=False).frame
    assert len(frame) == 3 * 4 and set(frame.n_positions) == {5} and set(frame.draft_depth) == {2}


# ---- on disk -----------------------------------------------------------------------------------------------------


def test_results_come_back_from_disk(ouro, tmp_path):
    channels = prefix_channels(ouro, PROMPTS, lags=(1,), progress=False)
    for result, kind in ((channels, PrefixChannelsResult), (channels.effects(), EffectsResult),
                         (depth_grid(ouro, PROMPTS, depths=(1, 4), progress=False), DepthGridResult)):
        result.save(tmp_path)
        loaded = kind.load(tmp_path)
        assert loaded.frame.equals(result.frame) and loaded.meta == result.meta


def test_half_precision_models_are_measured_in_float32(goldens):
    core = load_core(goldens / "ouro", dtype=torch.bfloat16)
    frame = prefix_channels(core, PROMPTS, lags=(1,), depths=(4,), controls=(), progress=False).frame
    assert (frame[frame.policy == "aligned"].kl_nats < 0.05).all()
