"""Block lens and layer fixed points: every block of the unrolled core, against the probes that know its last one."""

from __future__ import annotations

import math

import pytest
import torch

from loopscope.errors import SettingError
from loopscope.random_models import FAMILIES, make_random_core
from probes import BlockLensResult, block_lens, depth_lens, layer_fixed_points, token_grid, trajectories
from probes.blocks import read_block, unrolled_blocks
from probes.distance import ranks
from probes.layer_paths import apart, period

PROMPTS = [[3, 141, 59, 26, 5, 35, 89], [9, 8, 7]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recurrences_last_block_is_read_as_the_depth_lens_reads_it(family):
    core = make_random_core(family, gain=0.3)
    frame = block_lens(core, PROMPTS, depth=3, progress=False).frame
    last = frame[(frame.lens == "coda") & (frame.layer == core.config.n_core - 1) & (frame.cycle == 0)]
    expected = depth_lens(core, PROMPTS, depth=3, progress=False).frame
    assert last.agreement.tolist() == pytest.approx(expected.agreement.tolist(), abs=1e-12)
    grid = token_grid(core, PROMPTS, depth=3, progress=False).frame
    geometric = grid.groupby(["prompt", "depth"]).final_rank.apply(lambda r: math.exp(r.map(math.log).mean()))
    assert last["rank"].tolist() == pytest.approx(geometric.tolist(), abs=1e-9)
    per_depth = core.config.n_core * (core.config.inner_cycles + 1)
    assert frame[frame.prompt == 0].block.drop_duplicates().tolist() == list(range(1, 3 * per_depth + 1))
    end = frame[(frame.block == 3 * per_depth) & (frame.lens == "coda")]
    assert (end["rank"] == 1).all() and (end.agreement == 1).all()


@pytest.mark.parametrize("family", ["huginn", "raven", "parcae", "dory"])
def test_without_a_coda_the_two_lenses_are_one(family):
    core = make_random_core(family, n_coda=0)
    ids = torch.tensor([PROMPTS[0]])
    x = core.embed(ids)
    h = torch.randn(1, 7, core.config.d_model, dtype=core.dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(read_block(core, h, x, 2, "logit"), read_block(core, h, x, 2, "coda"), rtol=0, atol=1e-12)
    assert set(block_lens(core, PROMPTS, depth=2, progress=False).frame.lens) == {"coda"}


def test_with_a_coda_the_logit_lens_skips_it_and_the_block_in_the_middle_is_the_one_said():
    core = make_random_core("huginn", gain=0.5)
    frame = block_lens(core, PROMPTS[:1], depth=3, seed=5, progress=False).frame
    kept = {}
    x = core.embed(torch.tensor(PROMPTS[:1]))
    handles = [b.register_forward_hook(lambda m, i, o, n=n: kept.setdefault(n, []).append(o)) for n, b in enumerate(core.blocks)]
    final = core(torch.tensor(PROMPTS[0]), 3, seed=5)[0].argmax(-1)
    for handle in handles:
        handle.remove()
    logits = core.unembed(core.norm(core.norm(kept[1][1])))[0]
    row = frame[(frame.lens == "logit") & (frame.depth == 2) & (frame.layer == 1)].iloc[0]
    chance = logits.softmax(-1).gather(1, final[:, None]).mean()
    assert row.probability == pytest.approx(float(chance), abs=1e-7) and row.block == 1 * core.config.n_core + 2
    other = frame[(frame.lens == "coda") & (frame.depth == 2) & (frame.layer == 1)].iloc[0]
    assert other.probability == pytest.approx(float(core.read(kept[1][1])[0].softmax(-1).gather(1, final[:, None]).mean()), abs=1e-7)
    assert abs(other.probability - row.probability) > 1e-4 and len(x) == 1


def test_of_equal_logits_the_lower_id_ranks_first():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 4)
    assert ranks(logits, torch.arange(4)).tolist() == [3, 1, 2, 4]


def test_inner_cycles_run_before_the_slow_stack():
    core = make_random_core("hrm_text", inner_cycles=2)
    n = core.config.n_core
    assert list(unrolled_blocks(core, 1)) == [(1, c, layer) for c in (1, 2, 0) for layer in range(n)]


def test_an_unknown_lens_and_a_table_on_disk(tmp_path):
    core = make_random_core("ouro")
    with pytest.raises(SettingError, match="lens 'tuned' is unknown.*'coda'"):
        block_lens(core, PROMPTS, lenses=["tuned"], progress=False)
    result = block_lens(core, PROMPTS, depth=1, progress=False)
    result.save(tmp_path)
    assert BlockLensResult.load(tmp_path).frame.equals(result.frame)


# ---- layer fixed points -------------------------------------------------------------------------------------


def test_the_state_of_the_layer_table_is_that_of_trajectories_and_layers_are_their_own():
    core = make_random_core("ouro", gain=0.4)
    frame = layer_fixed_points(core, PROMPTS, depth=8, progress=False).frame
    assert len(frame) == 2 * (core.config.n_core + 1) * 8
    state = frame[frame.layer == -1]
    known = trajectories(core, PROMPTS, depth=8, progress=False).frame
    known = known[known.depth > 0]
    assert state.distance.tolist() == pytest.approx(known.distance.tolist(), abs=1e-12)
    assert state[state.depth > 1].step.tolist() == pytest.approx(known[known.depth > 1].step.tolist(), abs=1e-12)
    kept = []
    handle = core.blocks[1].register_forward_hook(lambda m, i, o: kept.append((i[0][0], o[0])))
    core(torch.tensor(PROMPTS[0]), 8)
    handle.remove()
    own = frame[(frame.prompt == 0) & (frame.layer == 1)].set_index("depth")
    end = kept[-1][1]
    assert own.distance[3] == pytest.approx(float(((kept[2][1] - end).norm(dim=-1) / end.norm(dim=-1)).mean()), abs=1e-12)
    assert own.apart[3] == pytest.approx(float(((kept[2][1] - kept[2][0]).norm(dim=-1) / kept[2][1].norm(dim=-1)).mean()), abs=1e-12)
    assert own.fixed_point[4:].notna().all() and own.fixed_point[:4].isna().all()


def test_a_contraction_has_a_fixed_point_of_its_own_in_every_layer():
    core = make_random_core("huginn", gain=0.05)
    frame = layer_fixed_points(core, PROMPTS[:1], depth=10, progress=False).frame
    last = frame[frame.depth == 10].set_index("layer")
    assert (last.fixed_point == 1).all() and (last.distance == 0).all()
    before = frame[(frame.depth == 9) & (frame.layer >= 0)]
    assert (before.distance < 1e-6).all() and (before.apart > 0.01).all()


@pytest.mark.parametrize("turns", [3, 5])
def test_the_period_of_an_orbit_is_found_and_of_a_fixed_point_there_is_none(turns):
    r = torch.arange(16, dtype=torch.float64)
    circle = torch.stack(((2 * math.pi * r / turns).cos(), (2 * math.pi * r / turns).sin()), -1)[:, None] + 3
    still = torch.ones_like(circle) + 0.1 ** r[:, None, None]
    assert period(torch.cat((circle, still), 1), 1e-12) == turns
    assert math.isnan(period(still, 1e-12)) and math.isnan(period(circle[:4], 1e-12))


def test_the_block_before_the_first_is_the_last_of_the_recurrence_before():
    layers = [torch.full((3, 2, 4), v, dtype=torch.float64) for v in (1.0, 2.0)]
    layers[1][0] = 4.0
    assert math.isnan(apart(layers, 0)[0]) and apart(layers, 0)[1:] == [3.0, 1.0] and apart(layers, 1) == [0.75, 0.5, 0.5]
