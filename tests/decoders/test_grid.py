"""Every schedule of the grid predicted, then measured; what the plan's pick loses."""

import pandas as pd
import pytest

from decoders import DASWave, Wavefront
from decoders.bench import bench
from decoders.grid import GridResult, grid_cells, predict_grid, regret, schedules_of
from loopscope.random_models import make_random_core


@pytest.mark.parametrize("depth", [4, 8, 16, 32])
def test_the_grid_has_forty_different_schedules_that_fit_the_depth(depth):
    grid = list(schedules_of(depth))
    assert len({d.label for d in grid}) == len(grid) >= 40
    assert all(getattr(d, "draft_depth", 1) < depth for d in grid)


def test_cells_hold_what_was_predicted_and_what_was_counted(timing):
    core, prompts = make_random_core("huginn", gain=0.1, seed=1, vocab_size=64, depth=5), [[1, 2, 3], [9, 8, 7]]
    lens = pd.DataFrame([("m", "t", p, "keyed", d, 0.9, 50) for p in range(2) for d in (1, 2, 3, 4)],
                        columns=["model", "task", "prompt", "start", "depth", "agreement", "n_positions"])
    tried = [Wavefront(1), Wavefront(1, redraft=1), DASWave(3, 1)]
    expected = predict_grid(core, prompts, {"depth_lens": lens}, timing(depth=5), 16, task="t", name="m", decoders=tried)
    result = bench(core, prompts, expected.decoders, "t", 16, model_name="m")
    cells = grid_cells(expected, result).frame.set_index("decoder")
    assert list(cells.index) == [d.label for d in tried] and cells.exact.all() and cells.calls_equal.all()
    assert cells.calls_predicted.tolist() == pytest.approx(cells.calls_counted.tolist(), abs=1e-12)
    assert cells.index[cells.planned].tolist() == [expected.plan.best.label]
    assert (cells.ratio * cells.speedup_predicted).tolist() == pytest.approx(cells.speedup_measured.tolist())
    frame = result.frame.copy()
    frame.loc[frame.decoder == "WFD d=1", "recur_calls"] += 1
    off = grid_cells(expected, type(result)(frame, result.meta)).frame.set_index("decoder")
    assert not off.calls_equal["WFD d=1"] and off.calls_equal.sum() == 2 and regret(off.reset_index()).wrong.item() == 1


def test_regret_is_the_share_of_speed_that_the_pick_loses_to_the_best():
    rows = [("m", "t", label, 1.0, 1.0, True, True, 1.0, 1.0, said, fast, fast / said, label == "b")
            for label, said, fast in (("AR", 1.0, 1.0), ("a", 3.0, 4.0), ("b", 3.3, 3.0), ("c", 2.0, 2.2))]
    found = regret(pd.DataFrame(rows, columns=list(GridResult.columns))).iloc[0]
    assert (found.best, found.picked, found.schedules, found.wrong) == ("a", "b", 4, 0)
    assert found.regret == pytest.approx(0.25) and found.near == pytest.approx(2 / 3)
