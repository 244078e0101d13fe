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
    swept, host = result.frame[result.frame.part != "host"], result.frame[result.frame.part == "host"]
    assert (swept.groupby(["part", "shape", "rows"]).size() == 3).all() and (swept.seconds > 0).all()
    assert sorted(host["shape"]) == ["prelude", "readout", "row", "tick"] and (host.seconds >= 0).all()
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
    result = calibrate(random_core("ouro", context=30), prefix_length=500, rows=(1, 2, 8), repeats=1, host=False)
    assert result.frame.prefix_length.unique().tolist() == [22]


def test_what_the_calls_leave_unexplained_is_laid_on_ticks_rows_readouts_and_preludes(random_core, timing):
    """Decodes whose seconds are made up from known host costs give those costs back."""
    from dataclasses import replace

    from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
    from decoders.generation import Seconds
    from decoders.host import fit_host

    core, swept = random_core("huginn", depth=6), timing(recur=2.0, prelude=1.0, readout=3.0, per_row=0.5)
    true = {"tick": 0.7, "row": 0.2, "readout": 0.9, "prelude": 0.4}
    made = []
    for d in (Autoregressive(), Wavefront(1), Wavefront(2, redraft=1), DraftThenVerify(1, 4), DASWave(3, 1)):
        g = d.generate(core, [1, 2, 3], 20)
        counted = (g.calls.recur, g.rows, g.calls.readout, g.calls.prelude)
        widths = {}
        for tick in {e.tick for e in g.trace if e.event == "run"}:
            n = sum(e.tick == tick for e in g.trace if e.event == "run")
            widths[n] = widths.get(n, 0) + 1
        seconds = swept.cost(widths, g.calls.readout, g.calls.prelude, g.decoder) + sum(a * b for a, b in zip(counted, true.values()))
        made.append(replace(g, seconds=Seconds(0.0, seconds)))
    assert fit_host(made, swept) == pytest.approx(true, rel=1e-6)
