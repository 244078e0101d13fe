import numpy as np
import pandas as pd
import pytest

from decoders.calibrate import Calibration, calibrate
from decoders.host import FEATURES, PARTS, HostTimes
from decoders.priced import Played
from decoders.replay_counts import Outcome
from loopscope.errors import SettingError


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_the_sweep_measures_every_part_at_every_row_count(random_core, family, tmp_path):
    core = random_core(family, depth=8)
    result = calibrate(core, prefix_length=20, rows=(1, 2, 4, 16), repeats=3)
    cells = set(map(tuple, result.frame[["part", "shape", "rows"]].drop_duplicates().to_numpy().tolist()))
    assert {("recur", "chain", n) for n in (1, 2, 4, 16)} <= cells
    assert {("recur", "fresh", n) for n in (1, 2, 4, 16)} <= cells and ("recur", "deep", 1) in cells
    assert {("recur", "wave", n) for n in (1, 2, 4)} <= cells and ("recur", "wave", 16) not in cells  # T = 8
    assert {("prelude", "chain", 1), ("readout", "chain", 16), ("readout", "at", 2), ("recur", "tree", 16)} <= cells
    swept, host = result.frame[~result.frame.part.isin(PARTS)], result.frame[result.frame.part == "host"]
    assert (swept.groupby(["part", "shape", "rows", "prefix_length"]).size() == 3).all() and (swept.seconds > 0).all()
    assert swept.groupby(["part", "shape", "rows"]).prefix_length.unique().map(sorted).map(list).map(lambda x: x == [10, 30]).all()
    assert set(host["shape"]) == set(FEATURES)
    assert set(host[host.seconds == 0]["shape"]) == ({"round"} if family == "ouro" else set()), "rows that freeze are looked at"
    assert result.meta["depth"] == 8 and result.meta["injects"] == (family == "huginn")
    result.save(tmp_path)
    assert Calibration.load(tmp_path).seconds("recur", 4) == result.seconds("recur", 4)


def test_seconds_are_lower_quartiles_with_straight_lines_between(timing):
    table = timing(recur=1.0, per_row=0.25)
    assert table.seconds("recur", 1) == 1 and table.seconds("recur", 16) == pytest.approx(4.75)
    assert table.seconds("recur", 3) == pytest.approx(1.5) and table.seconds("recur", 40) == pytest.approx(10.75)
    frame = table.frame.copy()
    spoiled = [frame.assign(seconds=1000.0, repeat=i).head(1) for i in (2, 3)]
    four = Calibration(pd.concat([frame, frame.assign(repeat=1), *spoiled]))
    assert four.seconds("recur", 1) == 1  # a machine that is busy for half of the rounds does not move the price
    low, high = four.spread("recur", 1)
    assert low == 1 and high == 1000
    drawn = four.resampled(200)["recur", "chain", four.frame.prefix_length.iloc[0], 1]
    assert set(drawn) <= {1.0, 250.75, 750.25, 1000.0} and drawn.min() == 1 and drawn.max() > 1


def test_an_unmeasured_shape_is_read_as_a_chain_and_an_unknown_part_is_refused(timing):
    assert timing(readout=3.0).seconds("readout", 2, "at") == 3.0
    with pytest.raises(SettingError, match="no part 'coda'; it has prelude, readout, recur"):
        timing().seconds("coda", 1)


def test_a_short_context_shortens_the_prefix(random_core):
    result = calibrate(random_core("ouro", context=30), prefix_length=500, rows=(1, 2, 8), repeats=1, host=False)
    assert result.frame.prefix_length.unique().tolist() == [22]
    given = calibrate(random_core("ouro", context=30), prefix_length=(5, 9), rows=(1, 2), repeats=1, host=False)
    assert sorted(given.frame.prefix_length.unique()) == [5, 9] and given.meta["prefix_length"] == given.length == 7
    with pytest.raises(SettingError, match="at least 1"):
        calibrate(random_core("ouro"), prefix_length=0)


@pytest.mark.parametrize("rows, context", [((1,), 30), ((2, 4), 30), ((3, 1), 3)])
def test_any_choice_of_rows_is_swept(random_core, rows, context):
    """Without a single row there is no wave of one; a deeper read on one row needs no second position in the cache."""
    made = calibrate(random_core("ouro", context=context, depth=3, n_core=1), prefix_length=2, rows=rows, repeats=1, host=False)
    assert set(made.frame.query("shape == 'chain'")["rows"]) == {n for n in rows if n < context} and made.has("recur", "deep")
    assert (("recur", "wave") in {(p, s) for p, s, _, n in made.prices if n == 1}) is False


def test_a_context_without_room_for_the_fewest_rows_is_refused(random_core):
    with pytest.raises(SettingError, match="a context of 2 positions has no room for 2 rows behind a prefix of 1"):
        calibrate(random_core("ouro", context=2, n_core=1), rows=(2, 4))


def test_a_model_whose_depths_share_their_keys_and_values_is_timed_without_deeper_reads(random_core):
    made = calibrate(random_core("dory", kv_slots=1, depth=3), prefix_length=8, rows=(1, 2), repeats=1, seconds=0.1)
    assert not made.has("recur", "deep") and made.has("recur", "fresh")
    timed = made.frame[(made.frame.part == "host") & (made.frame.seconds != 0)]
    assert set(timed["shape"]) == {"fresh", "chain", "prelude", "check"}, "only plain decoding runs on it"


def swept(cells: dict[tuple[str, str, int, int], list[float]]) -> Calibration:
    """(part, shape, prefix length, rows) -> the seconds of every round."""
    rows = [("m", part, shape, n, length, s, i) for (part, shape, length, n), seconds in cells.items() for i, s in enumerate(seconds)]
    return Calibration(pd.DataFrame(rows, columns=list(Calibration.columns)), {"depth": 8, "injects": True})


def calls(widths, **more) -> Outcome:
    """What a decode of so many block calls by rows, and of what else is given, made."""
    prelude, readout = (sum(more.get(name, {}).values()) for name in ("embedded", "read"))
    return Outcome(sum(widths.values()), prelude, readout, sum(w * n for w, n in widths.items()), 0, 0, [], {}, widths, **more)


def test_a_longer_prefix_costs_what_lies_on_the_line_through_the_two_that_were_measured():
    table = swept({("recur", "chain", length, n): [base + n] for length, base in ((64, 1.0), (192, 3.0)) for n in (1, 4)})
    assert table.seconds("recur", 1, length=64) == 2 and table.seconds("recur", 1, length=192) == 4
    assert table.seconds("recur", 1) == 3 == table.seconds("recur", 1, length=128)  # without a length: the middle
    assert table.seconds("recur", 1, length=256) == 5 and table.seconds("recur", 1, length=0) == 1
    assert table.seconds("recur", 2, length=128) == 4 and table.seconds("recur", 6, length=64) == 7
    noisy = swept({("recur", "chain", length, 1): [seconds] for length, seconds in ((64, 2.0), (192, 1.0))})
    assert noisy.seconds("recur", 1, length=1000) == 1, "a prefix that seems to cost less is not followed until it is free"


def test_trees_have_a_price_of_their_own():
    table = swept({("recur", "wave", 64, 1): [1.0], ("recur", "wave", 64, 2): [2.0], ("recur", "tree", 64, 2): [7.0],
                   ("readout", "chain", 64, 1): [0.0], ("prelude", "chain", 64, 1): [0.0]})
    assert table.has("recur", "tree") and not table.has("recur", "ring")
    assert table.cost(calls({1: 3, 2: 4}, branched={2: 1}), "LoopSpec d1=1 d2=2") == 3 * 1 + 3 * 2 + 7
    assert table.cost(calls({1: 3, 2: 4}), "LoopSpec d1=1 d2=2") == 3 * 1 + 4 * 2


def test_calls_whose_rows_are_new_have_a_price_of_their_own():
    """One for many rows, one for one row, and one for a draft that reads deeper; a wave's calls are all planned anew, in its own price."""
    table = swept({("recur", "chain", 64, 1): [1.0], ("recur", "chain", 64, 4): [2.0], ("recur", "fresh", 64, 1): [10.0],
                   ("recur", "fresh", 64, 4): [20.0], ("recur", "deep", 64, 1): [100.0], ("recur", "wave", 64, 1): [7.0],
                   ("recur", "wave", 64, 4): [7.0], ("readout", "chain", 64, 1): [0.0], ("prelude", "chain", 64, 1): [0.0]})
    made = calls({1: 5, 4: 6}, fresh={1: 2, 4: 1})
    assert table.cost(made, "DtV d=1 K=3") == 3 * 1 + 2 * 10 + 5 * 2 + 20 == table.cost(made, "DAS-Wave J=2 k=1 deep_kv")
    assert table.cost(made, "DtV d=1 K=3 deep_kv") == 3 * 1 + 2 * 100 + 5 * 2 + 20
    assert table.cost(made, "WFD d=1") == 11 * 7
    ends = {("prelude", "chain", 64, n): [n / 8] for n in (1, 4)} | {("readout", shape, 64, n): [x] for shape, n, x in (
        ("chain", 1, 3.0), ("chain", 4, 6.0), ("at", 2, 8.0))}
    read = calls({}, embedded={1: 2, 4: 1}, read={1: 1, 2: 10})
    assert swept(ends).cost(read, "DAS-Wave J=2 k=1 deep_kv") == 2 / 8 + 4 / 8 + 3 + 10 * 4
    assert swept(ends).cost(read, "WFD d=1") == 2 / 8 + 4 / 8 + 3 + 10 * 8
    unmeasured = swept({("recur", "chain", 64, 1): [1.0], ("readout", "chain", 64, 1): [0.0], ("prelude", "chain", 64, 1): [0.0]})
    assert unmeasured.cost(calls({1: 5}, fresh={1: 2}), "DtV d=1 K=3 deep_kv") == 5


def test_what_is_read_beyond_the_measured_places_is_paid_in_full():
    """A prefix shorter than those measured, and more rows: their weights are negative on one side, and count."""
    table = swept({(part, "chain", length, n): [n * length / 64] for part in ("recur", "prelude", "readout") for length in (64, 192)
                   for n in (1, 4)})
    made = calls({1: 3, 8: 2}, embedded={1: 1}, read={8: 1})
    costs = [table.cost(made, "AR", length) for length in (16, 32)]
    played = Played(np.ones(2), np.ones(2), np.zeros(2), np.zeros(2), [table.price(made, "AR", length) for length in (16, 32)], True)
    assert any(n < 0 for price in played.prices for n in price.values())
    assert played.mean(table.prices).seconds_per_token == pytest.approx(sum(costs) / 2) == pytest.approx((3 + 16 + 1 + 8) * 24 / 64)


def test_the_sweep_says_how_uncertain_it_is():
    draw = np.random.default_rng(0)
    steady, shaky = (swept({("recur", "chain", 64, n): (1 + spread * draw.standard_normal(40)).tolist() for n in (1, 8)})
                     for spread in (0.01, 0.3))
    (low, high), (lower, higher) = steady.interval("recur", 3), shaky.interval("recur", 3)
    assert low <= steady.seconds("recur", 3) <= high and lower <= shaky.seconds("recur", 3) <= higher
    assert higher - lower > 5 * (high - low) > 0
    once = swept({("recur", "chain", 64, 1): [2.0]})
    assert once.interval("recur", 1) == (2.0, 2.0)


def test_counted_cells_times_their_prices_are_the_cost(timing):
    table = timing(recur=2.0, prelude=1.0, readout=3.0, per_row=0.5)
    what = calls({1: 10, 3: 4}, read={1: 4, 2: 2}, embedded={1: 2}), "WFD d=1"
    assert sum(n * table.prices[cell] for cell, n in table.price(*what).items()) == pytest.approx(table.cost(*what))
    assert table.cost(*what) == pytest.approx(10 * 2 + 4 * 3 + 6 * 3 + 2)


def test_host_time_is_what_a_call_takes_in_a_decode_beyond_its_price(random_core, monkeypatch):
    """By a clock that a recurrence moves by 100, a prelude by 20 and a readout by 50, and a look at it by 1, against a sweep that says 90,
    21 and 50 for whatever shape and rows."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    def slow(call, seconds):
        def run(self, *args, **named):
            now[0] += seconds
            return call(self, *args, **named)
        return run

    core = random_core("huginn", gain=0.3, depth=4, n_core=1, vocab_size=48)
    for name, seconds in (("recur", 100.0), ("embed", 20.0), ("read", 50.0)):
        monkeypatch.setattr(type(core), name, slow(getattr(type(core), name), seconds))
    monkeypatch.setattr("decoders.host.time.perf_counter", tick)
    table = swept({(part, "chain", 8, 1): [s] for part, s in (("recur", 90.0), ("prelude", 21.0), ("readout", 50.0))})
    found = HostTimes(core, 8, 6).beyond(table, 8)
    assert {turn for *_, turn, _ in found} == {0} and len(found) == 2 * len(FEATURES)
    assert not any(name in vars(core) for name in ("recur", "embed", "read")), "the watch is taken off again"
    context = {"prelude": 0.0, "check": 1.0, "draft": 1.0, "round": 1.0}  # with the look at the clock that each call sees
    assert {name: seconds for part, name, _, seconds in found if part == "context"} == {name: context.get(name, 11.0) for name in FEATURES}
    assert {seconds for part, *_, seconds in found if part == "host"} == {2.0}, "two more looks, whatever the call"
    busy = swept({cell: [s, 4 * s, 4 * s, s, s] for cell, s in table.prices.items()})  # rounds 1 and 2 at a quarter of the pace
    assert busy.pace == {0: 1, 1: 4, 2: 4, 3: 1, 4: 1} and busy.prices == table.prices
    slow_turn = HostTimes(core, 8, 6)
    slow_turn.turn()
    slow_turn.turn(after=1)
    left = {(part, name): seconds for part, name, _, seconds in slow_turn.beyond(busy, 8)}
    assert left["context", "chain"] == 101 / 4 - 90 and left["host", "check"] == 2 / 4, "a turn in a slow minute is read at its pace"
    alone = HostTimes(random_core("ouro", depth=1, n_core=1, vocab_size=48), 8, 6).beyond(table, 8)
    assert {name for part, name, _, seconds in alone if part == "host" and seconds == 0} == set(FEATURES) - {"fresh", "prelude", "check"}


def test_host_time_is_paid_by_what_a_call_is():
    made = calls({1: 7, 4: 5}, fresh={1: 2, 4: 1}, embedded={1: 2}, read={1: 9}, checks=2, unread=3)
    seconds = {"chain": 1.0, "fresh": 10.0, "deep": 1e2, "wave": 1e3, "prelude": 1e4, "check": 1e5, "draft": 1e6, "round": 1e7}
    bare = {(part, "chain", 64, 1): [0.0] for part in ("recur", "prelude", "readout")}
    table = swept(bare | {(part, name, 64, 1): [s / 2] for name, s in seconds.items() for part in PARTS})
    ends = 2 * 1e4 + 2 * 1e5 + (9 - 2 - 3) * 1e6 + 3 * 1e7
    assert table.cost(made, "AR") == (5 + 4) * 1 + (2 + 1) * 10 + ends
    assert table.cost(made, "DtV d=1 K=3 deep_kv") == (5 + 4) * 1 + 2 * 1e2 + 1 * 10 + ends
    assert table.cost(made, "WFD d=1") == 12 * 1e3 + ends
    assert (table.beyond("draft"), table.beyond("draft", ("host",)), swept(bare).beyond("draft")) == (1e6, 5e5, 0)
    assert swept(bare).cost(made, "AR") == 0


def test_scatter_is_the_relative_quartile_range_of_the_median_cell():
    assert swept({("recur", "chain", 64, 1): [2.0], ("host", "tick", 64, 1): [0.0]}).scatter == 0
    table = swept({("recur", "chain", 64, 1): [8.0, 9.0, 10.0, 11.0, 12.0], ("recur", "chain", 64, 2): [1.0] * 5,
                   ("recur", "chain", 64, 4): [20.0, 30.0, 40.0, 50.0, 60.0], ("readout", "chain", 64, 1): [5.0],
                   ("host", "tick", 64, 1): [0.0, 0.0, 0.0, 1.0, 1.0]})
    assert table.scatter == pytest.approx(0.2), "of 0, 0.2 and 0.5; once measured, or of no time, is left out"


def test_a_calibration_prints_as_one_line():
    table = swept({("recur", "chain", 64, n): [s * n, 1.2 * s * n, 1.4 * s * n] for n, s in ((1, 0.001), (8, 0.002))})
    assert str(table) == repr(table) == "Calibration of m: 2 cells, scatter 17%; a block call: 1 row 1.1 ms; 8 rows 17.6 ms"
    assert str(swept({("recur", "chain", 64, 1): [1.0]})).endswith("a block call: 1 row 1000 ms")
