"""Predictions on disk before the measurement, and what is said when they fail."""

import json
import math
from datetime import UTC, datetime

import pandas as pd
import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.bench import bench
from decoders.carried import Refinements
from decoders.foretold import altered, held, sentence, write_down
from decoders.misses import cause, kernel_shares, misses
from decoders.misses import sentence as miss_sentence
from decoders.plan import rank
from decoders.replay import predict_from_replay, replay
from loopscope.random_models import make_random_core

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
DECODERS = [Autoregressive(), Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(1, 4), DASWave(3, 1)]


@pytest.fixture(scope="module", params=["huginn", "ouro"])
def run(request):
    """(core, expected, result) of a random model."""
    core = make_random_core(request.param, gain=0.1, seed=1, vocab_size=64)
    table = replay(core, PROMPTS, 20, depth=5, task="t", model_name="m", progress=False)
    expected = predict_from_replay(table, DECODERS, Refinements(core, PROMPTS, table))
    result = bench(core, PROMPTS, DECODERS, "t", 20, 2, depth=5, model_name="m")
    return core, table, expected, result


def test_what_was_predicted_is_counted_on_every_prompt(run):
    _, _, expected, result = run
    outcome = held(expected.frame, result.frame).set_index("decoder")
    assert set(outcome.index) == {d.label for d in DECODERS} and (outcome.prompts == 2).all()
    exact = outcome[outcome.exact]
    assert len(exact) == len(DECODERS)
    assert (exact.prompts_differ == 0).all() and (exact.calls_predicted == exact.calls_counted).all()
    assert f"all {len(exact)} decoders" in sentence(outcome.reset_index())


@pytest.mark.parametrize("column", ["recur_calls", "proposed", "accepted"])
def test_a_count_that_differs_in_one_repeat_of_one_prompt_is_said(run, column):
    _, _, expected, result = run
    frame = result.frame.copy()
    frame.loc[frame[(frame.decoder == "WFD d=1") & (frame.prompt == 1)].index[-1], column] += 1
    outcome = held(expected.frame, frame).set_index("decoder")
    assert outcome.prompts_differ.drop("WFD d=1")[outcome.exact].sum() == 0 and outcome.prompts_differ["WFD d=1"] == 1
    said = sentence(outcome.reset_index())
    assert "The replay was wrong about WFD d=1" in said and "1 of 2 prompts" in said


def test_an_altered_prediction_is_found_out(tmp_path, run):
    _, _, expected, _ = run
    before = datetime.now(UTC)
    record = write_down({"calls": expected.frame}, tmp_path, "m_t")
    assert before.replace(microsecond=0) <= datetime.fromisoformat(record["written"]) <= datetime.now(UTC)
    assert json.loads((tmp_path / "m_t.json").read_text()) == record and altered(record, tmp_path) == []
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "m_t_calls.parquet"), expected.frame)
    write_down({"calls": expected.frame.assign(recur_calls=1)}, tmp_path, "m_t")
    assert altered(record, tmp_path) == ["m_t_calls.parquet"]
    (tmp_path / "m_t_calls.parquet").unlink()
    assert altered(record, tmp_path) == ["m_t_calls.parquet"]


def test_factors_multiply_to_the_miss_and_name_its_cause(run, timing):
    core, table, _, result = run
    lens = pd.DataFrame([("m", "t", p, "keyed", d, 0.9, 50) for p in range(2) for d in (1, 2, 3, 4)],
                        columns=["model", "task", "prompt", "start", "depth", "agreement", "n_positions"])
    price = timing(recur=1e-3, prelude=1e-4, readout=1e-4, depth=5)
    plan = rank({"depth_lens": lens}, price, replay=table, decoders=DECODERS[:4])
    shares = dict.fromkeys([d.label for d in DECODERS], 0.75)
    found = misses(plan.frame, result, shares).frame.set_index("decoder")
    whole = found.speedup_measured / found.speedup_predicted
    assert (found.acceptance * found.kernel * found.host_factor).tolist() == pytest.approx(whole.tolist())
    assert found.acceptance.tolist() == pytest.approx([1.0] * 4)
    assert found.host_seconds_measured.tolist() == pytest.approx((0.25 * found.seconds_per_call_measured).tolist())
    # the same times, had the decoder made half as many calls as it was said to: acceptance, by a factor of 2
    doubled = plan.frame.copy()
    at = doubled.decoder == "WFD d=1"
    doubled.loc[at, ["calls_per_token", "seconds_per_token"]] *= 2
    assert misses(doubled, result, shares).frame.set_index("decoder").acceptance["WFD d=1"] == pytest.approx(2.0)
    if core.config.injects:
        assert miss_sentence(found.reset_index()).startswith("Of 3 decoders timed beside AR")


def test_a_cause_is_what_did_most_of_the_miss():
    assert cause({"acceptance": 1.0, "kernel": 1.02, "host": 1.0}) == ""
    assert cause({"acceptance": 1.2, "kernel": 0.6, "host": 0.9}) == "kernel"
    assert cause({"acceptance": 1.5, "kernel": 0.9, "host": 1.1}) == "acceptance"
    assert cause({"acceptance": 1.0, "kernel": 1.0, "host": 0.8}) == "host"


def test_shares_are_of_decoding_alone_and_leave_the_model_as_it_was(run):
    core = run[0]
    before = dict(vars(core))
    shares = kernel_shares(core, DECODERS, list(range(40)), 8)
    assert set(shares) == {d.label for d in DECODERS} and all(0 < share <= 1 for share in shares.values())
    assert vars(core).keys() == before.keys()
    assert not math.isnan(sum(shares.values()))
