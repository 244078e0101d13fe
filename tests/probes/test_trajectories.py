"""Trajectories: measures and labels on paths whose shape is known, and on tiny models."""

from __future__ import annotations

import math

import pytest
import torch

from probes import TrajectoriesResult, trajectories
from probes.paths import LABELS, labels, measure, plane

EPS = 1e-14


def path(point, depth=12):
    """[depth + 1, 1, 2] of point(r)."""
    return torch.tensor([[point(r)] for r in range(depth + 1)], dtype=torch.float64)


def kind(states):
    index = int(labels(states, EPS)[0])
    return LABELS[index] if index < len(LABELS) else "wandering"


@pytest.mark.parametrize("point, expected", [
    (lambda r: (5 + 0.5**r, 1.0), "fixed_point"), (lambda r: (5.0, 1.0), "fixed_point"),
    (lambda r: (math.cos(1.1 * r), math.sin(1.1 * r)), "orbit"), (lambda r: (3 + (-1) ** r, 0.0), "orbit"),
    (lambda r: (math.cos(0.9 * r), math.sin(0.9 * r)), "wandering"),  # a round takes longer than half the path
    (lambda r: (1.0 + r, 0.5), "slider"), (lambda r: (1.0 + 1.1**r, 0.1 * (-1) ** r), "slider"),
    (lambda r: (1.6**r * math.cos(2.2 * r), 1.6**r * math.sin(2.2 * r)), "wandering"),
])
def test_paths_of_known_shape_get_their_name(point, expected):
    assert kind(path(point)) == expected


def test_slowly_shrinking_steps_are_no_fixed_point_until_the_rest_of_the_way_is_short():
    assert kind(path(lambda r: (1 + 0.95**r, 0.0))) == "slider"
    assert kind(path(lambda r: (1 + 0.95**r, 0.0), 120)) == "fixed_point"


def test_a_spiral_has_the_step_angle_distance_and_contraction_that_it_was_made_with():
    turn, q = 0.7, 0.8
    states = path(lambda r: (q**r * math.cos(turn * r), q**r * math.sin(turn * r)), 9)
    rows = measure(states, EPS)
    factor = abs(q * complex(math.cos(turn), math.sin(turn)) - 1)
    assert len(rows) == 10 and all(math.isnan(x) for x in (rows[0][0], rows[1][1], rows[1][3], rows[3][4]))
    for r in range(2, 10):
        step, angle, distance, contraction = rows[r][:4]
        assert step == pytest.approx(factor) and angle == pytest.approx(math.degrees(turn)) and contraction == pytest.approx(q)
        assert distance == pytest.approx(float((states[r] - states[-1]).norm() / states[-1].norm()))
    assert rows[-1][2] == 0


def test_steps_down_to_rounding_have_no_angle_and_a_zero_state_no_step():
    still = measure(path(lambda r: (min(r, 3), 1.0)), EPS)
    assert math.isnan(still[5][1]) and math.isnan(still[5][3]) and still[3][1] == pytest.approx(0, abs=1e-5)
    assert math.isnan(measure(path(lambda r: (float(r), 0.0)), EPS)[1][0])


def test_a_path_in_a_plane_keeps_its_distances():
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q[:2]
    points = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat, explained = plane(points @ turn)
    assert torch.allclose(torch.cdist(flat, flat), torch.cdist(points, points)) and sum(explained) == pytest.approx(1)
    assert explained[0] >= explained[1] and torch.allclose(flat, plane(points @ turn)[0])


@pytest.mark.parametrize("family", ["huginn", "ouro", "parcae", "hrm_text"])
def test_the_table_is_that_of_the_states_of_the_run(family, random_core):
    core = random_core(family, gain=0.3)
    prompts = [[3, 4, 5, 6], [9, 8]]
    frame = trajectories(core, prompts, depth=4, progress=False, task="code").frame
    assert len(frame) == 2 * 5 and frame.groupby("prompt").depth.apply(list).tolist() == [[0, 1, 2, 3, 4]] * 2
    x = core.embed(torch.tensor([prompts[1]]))
    states, width = [core.start(x)], core.config.d_model
    for _ in range(4):
        states.append(core.recur(states[-1], x))
    states = torch.cat(states)[..., :width]
    expected = ((states[2] - states[1]).norm(dim=-1) / states[1].norm(dim=-1)).mean().item()
    row = frame[(frame.prompt == 1) & (frame.depth == 2)].iloc[0]
    assert row.step == pytest.approx(expected, abs=1e-12) and row.n_positions == 2
    last = frame[frame.depth == 4]
    assert (last.distance == 0).all() and last[["pc1", "pc2"]].abs().to_numpy().max() < 1e-9
    assert ((0 <= last[list(LABELS)].sum(axis=1)) & (last[list(LABELS)].sum(axis=1) <= 1 + 1e-12)).all()


def test_a_contraction_ends_in_a_fixed_point_and_the_table_comes_back(random_core, tmp_path):
    result = trajectories(random_core("huginn", gain=0.05), [[1, 2, 3]], depth=12, progress=False)
    assert result.frame.fixed_point.iloc[-1] == 1 and result.frame.contraction.iloc[4] < 0.5
    result.save(tmp_path)
    assert TrajectoriesResult.load(tmp_path).frame.equals(result.frame)
