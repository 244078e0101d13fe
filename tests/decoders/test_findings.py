"""Findings: all tables of a model on some prompts, saved, loaded, and planned from alike."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from decoders import DASWave, DraftThenVerify, Findings, Wavefront, plan
from decoders.carried import Refinements
from decoders.hops import hops
from loopscope.errors import RunFolderError, SettingError
from loopscope.random_models import make_random_core
from probes import depth_lens

PROMPTS = [[1, 2, 3, 4], [9, 8, 7, 6, 5]]
TRIED = [Wavefront(1), DraftThenVerify(1, 3, "deep_kv"), DASWave(3, 1)]
KINDS = {"convergence", "depth_lens", "settle", "second_candidate", "agreement_runs", "prefix_channels", "depth_grid", "replay", "hops"}


@pytest.fixture(scope="module")
def core():
    return make_random_core("huginn", gain=0.2, seed=1, n_core=1, vocab_size=48, depth=5)


@pytest.fixture(scope="module")
def found(core):
    return Findings.collect(core, PROMPTS, new_tokens=14, max_positions=4, nulls=("none",), rounds=5, task="t", model_name="m",
                            progress=False)


def test_every_table_is_there_and_keeps_prompts_apart(found):
    assert set(found.tables) - {"outcomes"} == KINDS
    for kind, table in found.tables.items():
        assert sorted(table.frame.prompt.unique()) == [0, 1] and (table.frame.model == "m").all() and (table.frame.task == "t").all(), kind
    channels = found.tables["prefix_channels"].frame
    assert set(channels.policy) == {"aligned", "deep_v", "deep_k", "deep_kv"} and set(channels.lag) == {1, 2}  # the shorter prompt has 4
    assert set(found.tables["depth_grid"].frame.k_depth) == {1, 2, 4, 5}


def test_the_hops_of_the_first_anchor_are_the_first_block_of_the_decoder(core, found):
    made = Refinements(core, PROMPTS, found.tables["replay"], rounds=5)
    for decoder in (DASWave(2, 1), DASWave(4, 1), DASWave(5, 1, read="deep_v")):
        frame = hops(made, decoder, anchors=1).frame
        for index, prompt in enumerate(PROMPTS):
            first = decoder.generate(core, prompt, 14).runs
            own = frame[(frame.prompt == index) & (frame["round"] == decoder.rounds)]
            accepted = next((r.accepted for r in first), 0)
            assert own.chain.sum() == accepted and (own.n_positions == 1).all(), decoder.label
    table = found.tables["hops"].frame
    assert (table.chain <= table.agreement).all() and (table[table.hop == 1].chain == table[table.hop == 1].agreement).all()
    assert table[table["round"] == 5].hop.max() == 6 and table.n_positions.max() == 8
    with pytest.raises(SettingError, match="at most 5 rounds"):
        hops(made, DASWave(9, 1))


def test_what_was_saved_is_planned_from_alike_without_the_model(found, timing, tmp_path):
    price = timing(per_row=0.05, depth=5)
    before = plan(found, price, decoders=TRIED)
    assert before.frame.exact_calls.all() and set(before.frame.decoder) == {"AR", *(d.label for d in TRIED)}
    loaded = Findings.load(found.save(tmp_path / "f"))
    assert set(loaded.tables) == KINDS | {"outcomes"}
    for kind, table in found.tables.items():
        pd.testing.assert_frame_equal(loaded.tables[kind].frame, table.frame, check_dtype=False)
    after = plan(loaded, price, decoders=TRIED)
    pd.testing.assert_frame_equal(after.frame, before.frame)
    assert after.evidence == before.evidence and after.best.label == before.best.label


def test_further_decoders_need_the_model(core, found, tmp_path):
    found.save(tmp_path)
    new = DASWave(5, 1, growth=2)
    assert Findings.load(tmp_path).outcome(0, new) is None
    again = Findings.load(tmp_path, core)
    assert again.outcome(1, new) == found.outcome(1, new) is not None
    assert again.outcome(0, Wavefront(2)) == found.outcome(0, Wavefront(2)) is not None


def test_the_best_of_a_plan_generates(core, found, timing):
    best = plan(found, timing(depth=5), decoders=TRIED).best
    assert best.generate(core, PROMPTS[0], 14).tokens == found.tables["replay"].prompts()[0].tokens


def test_tables_that_were_measured_already_make_findings_whose_replay_is_on_fewer_prompts(core, timing, tmp_path):
    from decoders.replay import replay

    prompts = [[7, 7, 1], *PROMPTS]
    names = {"task": "t", "model_name": "m", "progress": False}
    tables = {"depth_lens": depth_lens(core, [[*p, 3, 2] for p in prompts], **names), "replay": replay(core, prompts[:2], 12, **names)}
    made = Findings.of(core, tables, prompts, new_tokens=12, probed_tokens=2, task="t", model_name="m", rounds=4, decoders=TRIED)
    assert all(made.tables[kind] is table for kind, table in tables.items())
    before = [made.outcome(1, d) for d in TRIED]
    assert all(before) and made.outcome(0, TRIED[0]) == Findings.collect(core, prompts[:1], new_tokens=12, max_positions=2, nulls=("none",),
                                                                         rounds=2, progress=False).outcome(0, TRIED[0])
    made.trace_hops(1)
    loaded = Findings.load(made.save(tmp_path / "f"), core)
    decoded = {"prompts": [0, 1], "new_tokens": 12}
    assert loaded.meta["stands_on"] == {"depth_lens": {"prompts": [0, 1, 2], "new_tokens": 2}, "replay": decoded, "hops": decoded}
    assert loaded.meta["prompts"] == prompts and [d.label for d in loaded.decoders] == [d.label for d in TRIED]
    loaded._outcomes.clear()  # so that they are replayed again
    assert [loaded.outcome(1, d) for d in TRIED] == before
    assert plan(loaded, timing(depth=5), decoders=TRIED).frame.exact_calls.all()


@pytest.mark.parametrize("change, message", [
    ({"prompts": [[1, 2]]}, r"the table depth_lens is of the prompts \[0, 1\], of which there are 1"),
    ({"task": "code"}, "has rows of task 't', these findings are of 'code'"),
    ({"start_state": "zero"}, "has rows of start 'keyed', these findings are of 'zero'"),
    ({"depth": 3}, "was measured at T = 5, these findings are at T = 3"),
    ({"tables": {"settle": "depth_lens"}}, "no table 'settle' made of depth_lens"),
    ({"tables": {"replay": "late"}}, "a replay is of the first so many")])
def test_tables_that_do_not_fit_are_refused(core, found, change, message):
    lens, replay = (found.tables[kind] for kind in ("depth_lens", "replay"))
    late = type(replay)(replay.frame[replay.frame.prompt == 1], replay.meta)
    tables = {kind: {"depth_lens": lens, "late": late}[of] for kind, of in change.get("tables", {"depth_lens": "depth_lens"}).items()}
    settings = {"prompts": PROMPTS, "task": "t", "model_name": "m"} | {k: v for k, v in change.items() if k != "tables"}
    with pytest.raises(SettingError, match=message):
        Findings.of(core, tables, settings.pop("prompts"), new_tokens=14, **settings)


def test_hops_need_the_model(found, tmp_path):
    with pytest.raises(SettingError, match="give Findings.load the model"):
        Findings.load(found.save(tmp_path)).trace_hops()


def test_it_shows_itself(found):
    assert "2 t" in repr(found) and "hops (" in repr(found)
    html = found._repr_html_()
    assert "T = 5" in html and all(kind in html for kind in KINDS) and "<img" in html


def test_a_folder_that_is_not_findings_is_refused(found, tmp_path):
    with pytest.raises(RunFolderError, match="does not hold complete findings"):
        Findings.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"models": ["m"]}))
    for act in (lambda: Findings.load(tmp_path), lambda: found.save(tmp_path)):
        with pytest.raises(RunFolderError, match="something else than findings"):
            act()
    folder = found.save(tmp_path / "whole")
    facts = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(facts | {"tables": ["depth_lens", "tarot"]}))
    with pytest.raises(RunFolderError, match="names the tables tarot"):
        Findings.load(folder)
    (folder / "manifest.json").unlink()  # as a save that was broken off leaves it
    with pytest.raises(RunFolderError, match="complete"):
        Findings.load(folder)


def test_another_model_is_refused(core, found, tmp_path):
    folder = found.save(tmp_path)
    other = make_random_core("huginn", gain=0.2, seed=2, n_core=1, vocab_size=48, depth=5)
    with pytest.raises(SettingError, match="findings of m with weights [0-9a-f]{16}, the model given has weights [0-9a-f]{16}: give"):
        Findings.load(folder, other)
    facts = json.loads((folder / "manifest.json").read_text())
    del facts["findings"]["weights"]  # as findings that were saved before
    (folder / "manifest.json").write_text(json.dumps(facts))
    assert Findings.load(folder, other).outcome(0, Wavefront(3)) is not None


@pytest.mark.parametrize("tables, message", [([["replay"]], r"names the tables \['replay'\]"), ([5], "names the tables 5"),
                                             (None, "should have a list of tables, found NoneType"), ({"replay": 1}, "found dict")])
def test_a_manifest_with_other_things_for_tables_is_refused(found, tmp_path, tables, message):
    folder = found.save(tmp_path)
    facts = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(facts | {"tables": tables}))
    with pytest.raises(RunFolderError, match=message):
        Findings.load(folder)


@pytest.mark.parametrize("column, value", [("runs", "torn"), ("runs", "null"), ("widths", "[]"), ("read", '{"1": "x"}'), ("fresh", None),
                                           ("embedded", '{"1": 1e999}'), ("recur", None), ("exact", "no")])
def test_damaged_outcomes_are_refused(found, tmp_path, column, value):
    found.outcome(0, Wavefront(1))
    table = Findings.load(found.save(tmp_path)).tables["outcomes"]
    type(table)(table.frame.assign(**{column: [value] * len(table.frame)})).save(tmp_path)
    with pytest.raises(RunFolderError, match="row 0 of the outcomes table cannot be read"):
        Findings.load(tmp_path)


def test_outcomes_of_before_calls_were_told_apart_are_refused(found, tmp_path):
    found.outcome(0, Wavefront(1))
    path = found.save(tmp_path) / "outcomes.parquet"
    kept = pq.read_table(path)
    pq.write_table(kept.drop_columns(["embedded", "read"]), path)
    with pytest.raises(RunFolderError, match="needs the columns embedded, read"):
        Findings.load(tmp_path)


def test_a_manifest_without_what_a_replay_needs_is_refused(core, found, tmp_path):
    folder = found.save(tmp_path)
    facts = json.loads((folder / "manifest.json").read_text())
    del facts["findings"]["prompts"]
    (folder / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(RunFolderError, match="does not say prompts"):
        Findings.load(folder, core)
