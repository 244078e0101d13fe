"""Convergence: exact at full depth, equal to a hand computation elsewhere, with nulls that are computed on what they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from loopscope.errors import DepthError, NumericsError, PromptError, SettingError
from loopscope.models.loading import load_core
from probes import ConvergenceResult, convergence

PROMPTS = [list(range(40, 57)), list(range(90, 101))]
CELL = ["prompt", "null", "channel", "layer", "depth", "metric"]


@pytest.fixture(params=["huginn", "ouro"])
def core(request):
    return request.getfixturevalue(request.param)


def test_at_full_depth_everything_has_converged_exactly(core):
    frame = convergence(core, PROMPTS, progress=False).frame
    full = frame[frame.depth == core.config.depth]
    assert (full[full.metric == "cosine"].value == 1).all() and (full[full.metric == "rel_l2"].value == 0).all()
    shallow = frame[frame.depth < core.config.depth]
    assert (shallow[shallow.metric == "rel_l2"].value > 0).all() and (shallow[shallow.metric == "cosine"].value < 1).all()


def test_every_cell_is_there_once(core):
    frame = convergence(core, PROMPTS, progress=False).frame
    assert not frame.duplicated(CELL).any()
    layers, depth = core.config.n_core, core.config.depth
    per_prompt = depth * 2 * (3 * (4 * layers + 1) + 3 * layers)  # three nulls on all channels, one on Q, K and V
    assert len(frame) == 2 * per_prompt
    assert set(frame.n_positions) == {17, 11} and set(frame[frame.channel == "state"].layer) == {-1}


def _by_hand(core, ids, start_state=None):
    """V of the first core layer [depth, n, heads, d_head] and the states [depth, n, d], from the model's parts alone."""
    c = core.config
    x = core.embed(torch.tensor([ids]))
    state = core.start(x, start_state=start_state)
    values, states = [], []
    for _ in range(c.depth):
        block = core.blocks[0]
        projected = F.linear(block.norm_1(core.inject(state, x)), block.attn.qkv.weight)[0]
        values.append(projected[:, -c.n_kv_heads * c.d_head :].unflatten(-1, (c.n_kv_heads, c.d_head)))
        state = core.recur(state, x)
        states.append(state[0])
    return torch.stack(values), torch.stack(states)


@pytest.mark.parametrize("null", ["none", "token_mean_removed"])
def test_values_equal_a_plain_loop(core, null):
    frame = convergence(core, PROMPTS, nulls=(null,), progress=False).frame
    values, states = _by_hand(core, PROMPTS[1])
    if null == "token_mean_removed":
        values, states = (t - t.mean(dim=1, keepdim=True) for t in (values, states))
    for channel, layer, tensor in (("v", 0, values), ("state", -1, states)):
        for depth in range(1, core.config.depth + 1):
            cell = frame[(frame.prompt == 1) & (frame.channel == channel) & (frame.layer == layer) & (frame.depth == depth)]
            measured = cell.set_index("metric").value
            a, b = tensor[depth - 1], tensor[-1]
            assert measured["cosine"] == pytest.approx(F.cosine_similarity(a, b, dim=-1).mean().item(), abs=1e-12)
            expected = ((a - b).norm(dim=-1) / b.norm(dim=-1)).mean().item()
            assert measured["rel_l2"] == pytest.approx(expected, abs=1e-12)


def test_distances_before_and_after_the_rotary_embedding_are_equal(core):
    before = convergence(core, PROMPTS, nulls=("none",), progress=False).frame
    after = convergence(core, PROMPTS, nulls=("none",), rotated=True, progress=False).frame
    assert before[CELL].equals(after[CELL])
    assert (before.value - after.value).abs().max() < 1e-12
    q = before.channel == "q"
    assert not before[q].value.equals(after[q].value), "the rotated values themselves must have been measured"


def test_the_random_weight_null_runs_another_model(huginn):
    frame = convergence(huginn, PROMPTS, progress=False).frame.set_index(["null", *[c for c in CELL if c != "null"]]).value
    assert abs(frame["none", 0, "v", 1, 1, "cosine"] - frame["random_weights", 0, "v", 1, 1, "cosine"]) > 1e-3


def test_start_states_are_named_and_matter(huginn, ouro):
    keyed = convergence(huginn, PROMPTS, nulls=("none",), progress=False).frame
    zero = convergence(huginn, PROMPTS, nulls=("none",), start_state="zero", progress=False).frame
    assert set(keyed.start) == {"keyed"} and set(zero.start) == {"zero"} and not keyed.value.equals(zero.value)
    assert set(convergence(ouro, PROMPTS, nulls=("none",), progress=False).frame.start) == {"embedding"}
    with pytest.raises(SettingError, match="starts from its embedding"):
        convergence(ouro, PROMPTS, start_state="zero", progress=False)


def test_metrics_are_exact_in_a_half_precision_model(goldens):
    core = load_core(goldens / "ouro", dtype=torch.bfloat16)
    frame = convergence(core, PROMPTS, progress=False).frame
    full = frame[(frame.depth == core.config.depth) & (frame.metric == "cosine")]
    assert (full.value == 1).all() and frame.value.dtype == "float64"


def test_a_hooked_model_is_measured_through_its_core_and_names_are_kept(huginn):
    wrapped = SimpleNamespace(core=huginn)
    direct = convergence(huginn, PROMPTS, nulls=("none",), progress=False).frame
    frame = convergence(wrapped, PROMPTS, nulls=("none",), progress=False, model_name="m", task="maths", depth=3).frame
    assert set(frame.model) == {"m"} and set(frame.task) == {"maths"} and frame.depth.max() == 3
    assert not frame.value.equals(direct.value)


def test_results_come_back_from_disk(huginn, tmp_path):
    result = convergence(huginn, PROMPTS, progress=False, seed=5)
    result.save(tmp_path)
    loaded = ConvergenceResult.load(tmp_path)
    assert loaded.frame.equals(result.frame) and loaded.meta["seed"] == 5


def test_impossible_requests_are_refused_in_words(huginn):
    for call, error, words in (
            (lambda: convergence(huginn, [], progress=False), PromptError, "no prompts"),
            (lambda: convergence(huginn, [[5]], progress=False), PromptError, "prompt 0 has 1 token, .* at least 2"),
            (lambda: convergence(huginn, [1, 2, 3], progress=False), PromptError, "list of its own"),
            (lambda: convergence(huginn, ["text"], progress=False), PromptError, "tokenizer"),
            (lambda: convergence(huginn, PROMPTS, depth=0, progress=False), DepthError, "at least 1"),
            (lambda: convergence(huginn, PROMPTS, nulls=("mean",), progress=False), SettingError, "'mean' is unknown"),
            (lambda: convergence("tiny", PROMPTS, progress=False), SettingError, "looped model")):
        with pytest.raises(error, match=words):
            call()


def test_nan_is_reported_and_not_averaged(goldens):
    core = load_core(goldens / "huginn")
    core.blocks[2].attn.out.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        convergence(core, PROMPTS, progress=False)
