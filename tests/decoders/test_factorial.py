"""The factorial of DAS-Wave: carry x deep keys x deep values, effects and interactions with paired intervals."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest

from decoders import Autoregressive, DASWave
from decoders.factorial import SWITCHES, FactorialResult, cells, design, effects, factorial
from loopscope.errors import RunFolderError, SettingError

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [5, 5, 5, 6, 7]]


def made_up(committed, prompts=4, scale=lambda p: 1.0, repeats=1) -> pd.DataFrame:
    """A table whose G in a cell is committed(carry, deep_k, deep_v) * scale(prompt); AR takes 16 calls and 2 s a token."""
    rows = []
    for c, k, v in product((False, True), repeat=3):
        for p in range(prompts):
            for repeat in range(repeats):
                g = committed(c, k, v) * scale(p)
                tokens = 10 * g + 1
                rows.append(("m", "t", p, repeat, f"{c}{k}{v}", c, k, v, tokens, 10, 10 * (g - 1), 10 * g, 280, 28.0, 160 * g, 20 * g, 0))
    return pd.DataFrame(rows, columns=list(FactorialResult.columns))


def of(table: pd.DataFrame, measure: str = "committed_per_verification") -> dict[str, float]:
    return table[table.measure == measure].set_index("term").effect.to_dict()


def test_main_effects_and_interactions_by_hand():
    found = of(effects(made_up(lambda c, k, v: 2 + c + 0.5 * k + 0.25 * v - 0.4 * (k and v) + 3 * (c and k and v))))
    assert found == pytest.approx({
        "carry": 1 + 3 / 4, "deep_k": 0.5 - 0.4 / 2 + 3 / 4, "deep_v": 0.25 - 0.4 / 2 + 3 / 4,  # averaged over the other switches
        "carry x deep_k": 3 / 2, "carry x deep_v": 3 / 2, "deep_k x deep_v": -0.4 + 3 / 2, "carry x deep_k x deep_v": 3})


def test_switches_that_add_up_have_no_interaction():
    found = effects(made_up(lambda c, k, v: 2 + 3 * c + 0.5 * k - 0.25 * v))
    assert of(found)["carry"] == pytest.approx(3) and of(found)["deep_v"] == pytest.approx(-0.25)
    assert np.allclose(found[(found.measure == "committed_per_verification") & (found.order > 1)].effect, 0)


def test_every_measure_by_hand():
    own = cells(made_up(lambda c, k, v: 4.0 if (c, k, v) == (True, False, True) else 2.0)).set_index(list(SWITCHES))
    assert list(own.index) == design(True) and own.loc[(True, False, True), "read"] == "deep_v"
    cell = own.loc[(True, False, True)]
    assert cell.committed_per_verification == pytest.approx(4) and cell.accepted_per_verification == pytest.approx(3)
    assert cell.calls_per_token == pytest.approx(28 / 4) and cell.call_speedup == pytest.approx(160 * 4 / 280)
    assert cell.time_speedup == pytest.approx(20 * 4 / 28)


def test_intervals_are_paired_over_prompts():
    """Prompts that differ a lot while the effect hardly does: an unpaired interval would be wide."""
    table = made_up(lambda c, k, v: 1.0, prompts=8)
    base = table.prompt * 10.0
    table = table.assign(committed=10 * (base + 2 * table.carry + 0.1 * (table.prompt % 2) * table.carry), verifications=10)
    found = effects(table).query("measure == 'committed_per_verification' and term == 'carry'").iloc[0]
    assert found.effect == pytest.approx(2.05) and 2.0 <= found.low < 2.05 < found.high <= 2.1 and found.n_prompts == 8
    other = effects(table).query("measure == 'committed_per_verification' and term == 'deep_k'").iloc[0]
    assert other.low == other.high == pytest.approx(0)


def test_one_prompt_has_no_interval_and_repeats_are_one_observation():
    one = effects(made_up(lambda c, k, v: 2 + c, prompts=1))
    assert of(one)["carry"] == pytest.approx(1) and one.low.isna().all()
    table = made_up(lambda c, k, v: 2 + c, repeats=3)
    table.loc[(table.repeat > 0) & table.carry, "decode_seconds"] = 1e6  # two of three were interrupted
    assert of(effects(table), "time_speedup")["carry"] == pytest.approx(20 * 3 / 28 - 20 * 2 / 28)


def test_a_table_with_a_missing_cell_or_prompt_is_refused():
    table = made_up(lambda c, k, v: 2 + c)
    with pytest.raises(SettingError, match="every cell of its 3 switches, 8 of them; found 7"):
        effects(table[~(table.carry & table.deep_k & table.deep_v)])
    with pytest.raises(SettingError, match="every prompt in every cell"):
        effects(table.drop(index=table.index[(table.prompt == 1) & table.carry]))
    with pytest.raises(RunFolderError, match="needs the columns carry"):
        FactorialResult(table.drop(columns="carry"))


@pytest.fixture(scope="module")
def small(random_core):
    core = random_core("huginn", gain=0.25, depth=6, n_core=2)
    return core, factorial(core, PROMPTS, rounds=4, updates=1, max_new_tokens=15, task="made-up")


def test_all_eight_cells_run_and_equal_ar(small):
    core, result = small
    frame = result.frame
    assert len(frame) == 8 * len(PROMPTS) and (frame.token_mismatches == 0).all() and (frame.tokens == 15).all()
    assert sorted(set(zip(*(frame[s] for s in SWITCHES)))) == design(True)
    assert (frame.ar_recur_calls == 14 * 6).all()
    assert set(frame.decoder) == {f"DAS-Wave J=4 k=1 {read} carry={carry} bonus=off" for carry in ("on", "off")
                                  for read in ("aligned", "deep_k", "deep_v", "deep_kv")}


def test_the_cells_are_what_the_decoders_do(small):
    """Committed per verification, from a decode of its own: its trace says which tokens a verification committed."""
    core, result = small
    g = DASWave(4, 1, read="deep_k", carry=True, bonus=False).generate(core, PROMPTS[0], max_new_tokens=15)
    row = result.frame.query("prompt == 0 and carry and deep_k and not deep_v").iloc[0]
    blocks = len(g.accept_lengths)
    drafted = {e.tick for e in g.trace if e.event in ("accept", "reject")}
    assert row.verifications == blocks and row.accepted == g.accepted
    assert row.committed == sum(e.event == "commit" and e.tick in drafted for e in g.trace)


def test_a_model_without_injection_runs_the_two_by_two_and_says_why(random_core):
    result = factorial(random_core("ouro", gain=0.3, n_core=1), PROMPTS, rounds=3, updates=1, max_new_tokens=8)
    assert not result.frame.carry.any() and len(result.cells()) == 4
    assert sorted(set(result.effects().term)) == ["deep_k", "deep_k x deep_v", "deep_v"]
    assert "ouro does not inject" in result.meta["reason"]


def test_saved_and_loaded(small, tmp_path):
    result = small[1]
    result.save(tmp_path)
    again = FactorialResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.effects(), result.effects())
    assert again.meta["rounds"] == 4 and again.meta["bonus"] is False


def test_cells_without_room_for_more_are_named(random_core):
    core = random_core("huginn", gain=0.0, depth=4, n_core=1)  # every guess is right
    result = factorial(core, PROMPTS[:1], rounds=3, updates=1, initial_width=1, max_new_tokens=23)
    assert len(result.full) == 8
    table = made_up(lambda c, k, v: 9.0 if c else 2.0)  # A is 8 with carry, else 1
    block = {"capacity": 32, "initial_width": 2, "growth": 1}
    assert FactorialResult(table, block | {"rounds": 12}).full == []  # 13 guesses
    assert set(FactorialResult(table, block | {"rounds": 7}).full) == {f"True{k}{v}" for k in (True, False) for v in (True, False)}
    assert FactorialResult(table, block | {"rounds": 12, "capacity": 8}).full != []


def test_a_bonus_token_adds_to_what_a_right_block_commits(random_core):
    core = random_core("huginn", gain=0.0, depth=4, n_core=1)  # every guess is right
    ar = Autoregressive().generate(core, PROMPTS[0], max_new_tokens=22).tokens
    without, with_ = (factorial(core, PROMPTS[:1], rounds=3, updates=1, max_new_tokens=22, bonus=b) for b in (False, True))
    for result in (without, with_):
        assert (result.frame.token_mismatches == 0).all() and result.frame.tokens.unique().tolist() == [len(ar)]
    g = [r.cells().set_index(list(SWITCHES)).committed_per_verification[(True, True, True)] for r in (without, with_)]
    assert g[1] > g[0]
