"""The certificate: what makes it fail, what it prints, what it saves, and how the command ends."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from decoders import Autoregressive, DraftThenVerify, Wavefront
from decoders.certificate import Certificate
from decoders.rungs import COLUMNS, LEVELS, case_records, kind_of, model_records, random_records, schedules_for
from decoders.session import Session
from loopscope.cli import verify
from loopscope.cli.app import app
from loopscope.errors import NumericsError
from loopscope.random_models import make_random_core

RECORDS = [record for number in range(6) for record in case_records(number, [Wavefront(1), DraftThenVerify(1, 3)])]


def certificate(records=RECORDS, **meta) -> Certificate:
    return Certificate.of(records, {"complete": True, **meta})


def changed(**values) -> Certificate:
    """The certificate with one generation's record changed."""
    return certificate([{**RECORDS[0], **values}, *RECORDS[1:]])


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(verify, "SOME", 5)
    monkeypatch.setattr(verify, "_NEW_TOKENS", {False: 6, True: 8})


def commits_its_draft(self, logits, read, original=Session.choose):
    """A broken rule: the first draft that is judged is taken for right."""
    tokens = original(self, logits, read)
    if read.drafts and read.drafts[0]:
        tokens[0] = read.drafts[0][0]
    return tokens


def run(*arguments) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


# ---- what is certified ------------------------------------------------------------------------------------------


def test_generations_that_hold_pass():
    held = certificate()
    assert held.passed and not len(held.failed) and held.counts()["generations"] == len(RECORDS) > 6
    assert held.counts()["tokens"] == sum(r["tokens"] for r in RECORDS) and all(r["counts_exact"] for r in RECORDS)
    assert "PASSED" in held.text() and "FAILED" not in held.text()


@pytest.mark.parametrize("values, counted", [
    ({"mismatch": True}, "unexplained"), ({"cache_mismatch": True}, "cache_mismatches"), ({"count_mismatch": True}, "count_mismatches"),
    ({"draft_mismatch": True}, "draft_mismatches"), ({"error": "NumericsError: NaN"}, "errors")])
def test_one_thing_wrong_with_one_generation_fails_it(values, counted):
    broken = changed(**values)
    assert not broken.passed and len(broken.failed) == 1 and broken.counts()[counted] == 1 and certificate().counts()[counted] == 0
    assert "FAILED" in broken.text() and f"case {RECORDS[0]['case']}" in broken.text()
    assert broken.facts()["failures"][0]["case"] == RECORDS[0]["case"]


def test_a_near_tie_is_counted_and_audited_and_does_not_fail_it():
    tied = changed(mismatch=True, explained=True, margin=1e-10, deviation=1e-9, first_difference=3)
    assert tied.passed and tied.counts()["explained"] == 1 and tied.counts()["unexplained"] == 0
    assert tied.facts()["near_tie_audit"][0]["margin"] == 1e-10 and "near tie" in tied.text()


def test_nothing_and_an_interrupted_run_certify_nothing():
    nothing = certificate([])
    assert not nothing.passed and "FAILED" in nothing.text() and json.loads(json.dumps(nothing.facts()))["generations"] == 0
    part = certificate(complete=False)
    assert not part.passed and "INCOMPLETE" in part.text() and "certifies nothing" in part.text()


def test_the_histogram_counts_every_generation_that_drafted_once():
    judged = [{**RECORDS[0], "proposed": 20, "accepted": a} for a in (0, 1, 2, 3, 18, 19, 20, 20)] + [{**RECORDS[0], "proposed": 0}]
    bins = dict(certificate(judged).acceptance())
    assert bins["0"] == 1 and bins["1"] == 2 and bins["(0.0, 0.1]"] == 2 and bins["(0.1, 0.2]"] == 1
    assert bins["(0.8, 0.9]"] == 1 and bins["(0.9, 1.0]"] == 1 and sum(bins.values()) == 8
    assert "(25% between .2 and .95)" in certificate(judged).text() and re.search(r"  1 +2  #{40}\n", certificate(judged).text())


def test_a_decoder_that_breaks_down_is_a_record_and_not_the_end(monkeypatch):
    def broken(self, drafts, targets):
        raise IndexError("lost")
    monkeypatch.setattr(Session, "settle", broken)
    records = [r for number in range(6) for r in case_records(number, [DraftThenVerify(1, 3)])]
    assert any(r["error"] == "IndexError: lost" for r in records) and not certificate(records).passed


def test_processes_give_the_records_of_one(tmp_path):
    alone, many = (list(random_records(range(3), ["ar", "wfd"], workers)) for workers in (1, 2))
    for one, other in zip(alone, many, strict=True):
        pd.testing.assert_frame_equal(pd.DataFrame(one), pd.DataFrame(other))


# ---- a model of one's own ----------------------------------------------------------------------------------------


def loaded(dtype):
    return make_random_core("huginn", gain=0.2, n_core=1, depth=3).to(dtype)


def test_a_model_is_held_in_three_precisions():
    decoders = schedules_for(loaded(torch.float64), 3)
    assert {kind_of(d) for d in decoders} == {"WFD", "WFD re-drafting", "DtV", "DtV deep reads", "DAS-Wave", "PLD", "LoopSpec"}
    records = [r for some in model_records(loaded, [[1, 2, 3], [4]], decoders[:4], 10) for r in some]
    assert len(records) == 3 * 4 * 2 and {r["level"] for r in records} == set(LEVELS) and set(records[0]) == set(COLUMNS)
    held = certificate(records)
    assert held.passed and "L2 (bfloat16" in held.text()


def test_in_bfloat16_only_a_near_tie_explains_a_difference(monkeypatch):
    """A decoder that commits what it drafted differs where nothing is tied."""
    monkeypatch.setattr(Session, "choose", commits_its_draft)
    records = [r for some in model_records(loaded, [[1, 2, 3], [4]], [Wavefront(1)], 16) for r in some]
    for level in LEVELS:
        assert any(r["mismatch"] and not r["explained"] and r["verdict"] for r in records if r["level"] == level)
    assert all(r["margin"] >= 2 * r["deviation"] for r in records if r["mismatch"] and not r["explained"])


def test_a_decoder_that_a_model_cannot_run_is_an_error_with_the_reason():
    core = make_random_core("dory", kv_slots=1, depth=3)
    records = [r for some in model_records(core.to, [[1, 2]], [Autoregressive(), Wavefront(1)], 4, ["L0"]) for r in some]
    assert records[0]["error"] == "" and "would be approximate on this dory model" in records[1]["error"]


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_and_saves_a_certificate(few, tmp_path):
    code, out, err = run("--out", tmp_path / "proof")
    assert code == 0 and re.search(r"PASSED: [5-8] generations", out) and "Drafts accepted" in out
    assert re.search(rf"\(seed 0\), \d+ s, torch {re.escape(torch.__version__)}", out) and re.search(r"(\d) of \1 cases", err)
    facts = json.loads((tmp_path / "proof/certificate.json").read_text())
    assert facts["passed"] is True and facts["complete"] is True and facts["seed"] == 0 and facts["unexplained"] == 0
    assert facts["command"] and facts["versions"]["torch"]
    assert len(Certificate.load(tmp_path / "proof").frame) == facts["generations"]
    code, again, _ = run("--out", tmp_path / "proof.json", "--seed", 1)
    assert code == 0 and (tmp_path / "proof.parquet").exists() and json.loads((tmp_path / "proof.json").read_text())["seed"] == 1
    assert run("--out", tmp_path / "proof")[0] == 2


def test_the_command_fails_when_a_rule_is_broken_and_names_the_case(few, monkeypatch):
    monkeypatch.setattr(Session, "choose", commits_its_draft)
    code, out, _ = run("--decoder", "dtv")
    assert code == 1 and "FAILED" in out
    number = re.search(r"random \w+ case (\d+)", out)[1]
    code, out, _ = run("--decoder", "dtv", "--case", number)
    assert code == 1 and f"Case(number={number}," in out and "DIFFER" in out


def test_a_case_that_breaks_down_is_told_again(few, monkeypatch):
    def broken(self, drafts, targets):
        raise NumericsError("the logits are NaN")
    monkeypatch.setattr(Session, "settle", broken)
    outcomes = [run("--decoder", "DtV d=1 K=3", "--case", number) for number in range(4)]
    assert any(code == 1 and "NumericsError: the logits are NaN" in out for code, out, _ in outcomes)
    assert {code for code, _, _ in outcomes} <= {0, 1}


def test_an_interrupted_command_says_what_was_done(few, monkeypatch, tmp_path):
    for done in (0, 1):
        def interrupted(numbers, pool, workers, done=done):
            yield from (case_records(number, pool) for number in numbers[:done])
            raise KeyboardInterrupt
        monkeypatch.setattr("decoders.rungs.random_records", interrupted)
        code, out, _ = run("--out", tmp_path / f"part{done}")
        assert code == 130 and "interrupted: this certifies nothing" in out
        assert json.loads((tmp_path / f"part{done}/certificate.json").read_text())["passed"] is False


def test_a_shipped_model_is_held_by_name(few):
    code, out, _ = run("--model", "tiny-ouro", "--decoder", "WFD d=1")
    assert code == 0 and all(f"{level} (" in out for level in LEVELS) and "PASSED: 6 generations" in out


@pytest.mark.parametrize("arguments, message", [
    (["--decoder", "quick"], "decoder 'quick' is unknown"), (["--workers", 10**6], "--workers 1000000 is not usable"),
    (["--model", "nothing-here"], "neither a shipped model")])
def test_what_cannot_be_verified_is_refused_in_one_line(few, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2 and message in err


def test_a_decoder_that_is_not_lossless_gets_no_certificate(few, monkeypatch):
    monkeypatch.setattr("decoders.named.decoder", lambda name: Wavefront(1, slots=2))
    code, _, err = run("--decoder", "WFD d=1 s=2")
    assert code == 2 and "is not lossless: it need not give the tokens of plain decoding" in err
