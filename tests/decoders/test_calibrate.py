import pytest

from decoders.calibrate import Calibration, calibrate
from loopscope.errors import SettingError


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_the_sweep_measures_every_part_at_every_row_count(random_core, family, tmp_path):
    core = random_core(family, depth=8)
    result = calibrate(core, prefix_length=20, rows=(1, 2, 4, 16), repeats=3)
    cells = set(map(tuple, result.frame[["part", "shape", "rows"]].drop_duplicates().to_numpy().tolist()))
    assert {("recur", "chain", n) for n in (1, 2, 4, 16)} <= cells
    assert {("recur", "wave", n) for n in (1, 2, 4)} <= cells and ("recur", "wave", 16) not in cells  # T = 8
    assert {("prelude", "chain", 1), ("readout", "chain", 16), ("readout", "at", 2)} <= cells
    assert (result.frame.groupby(["part", "shape", "rows"]).size() == 3).all()
    assert (result.frame.seconds > 0).all()
    assert result.meta["depth"] == 8 and result.meta["injects"] == (family == "huginn")
    result.save(tmp_path)
    assert Calibration.load(tmp_path).seconds("recur", 4) == result.seconds("recur", 4)


def test_seconds_are_medians_with_straight_lines_between(timing):
    table = timing(recur=1.0, per_row=0.25)
    assert table.seconds("recur", 1) == 1 and table.seconds("recur", 16) == pytest.approx(4.75)
    assert table.seconds("recur", 3) == pytest.approx(1.5) and table.seconds("recur", 40) == pytest.approx(10.75)
    frame = table.frame.copy()
    spoiled = frame.assign(seconds=1000.0, repeat=1).head(1)
    import pandas as pd

    three = pd.concat([frame, frame.assign(repeat=2), spoiled])
    assert Calibration(three).seconds("recur", 1) == 1  # one interrupted observation does not move the median
    low, high = Calibration(three).spread("recur", 1)
    assert low == 1 and high == pytest.approx(500.5)


def test_an_unmeasured_shape_is_read_as_a_chain_and_an_unknown_part_is_refused(timing):
    assert timing(readout=3.0).seconds("readout", 2, "at") == 3.0
    with pytest.raises(SettingError, match="no part 'coda'; it has prelude, readout, recur"):
        timing().seconds("coda", 1)


def test_a_short_context_shortens_the_prefix(random_core):
    result = calibrate(random_core("ouro", context=30), prefix_length=500, rows=(1, 2, 8), repeats=1)
    assert result.frame.prefix_length.unique().tolist() == [22]
