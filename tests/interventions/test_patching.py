"""Activation patching: a patch is what a hook does by hand, nothing comes from nothing, and everything restores everything."""

from __future__ import annotations

import pytest
import torch

import loopscope
from interventions import Patch, PatchingResult, activation_patching, sum_pairs
from interventions.patching import SITES, Pair, sweep
from loopscope.errors import PromptError, SettingError
from loopscope.hook_names import SHORT_NAMES
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.tap import FunctionTap, RecordingTap

CLEAN, CORRUPTED = [3, 141, 59, 26, 5], [3, 14, 59, 27, 5]
T = 3


def by_hand(core, patch, seed=5):
    """Logits of the corrupted prompt with one activation of the clean run put in by an ordinary hook."""
    name = f"depth.{patch.depth}.blocks.{patch.layer}.{SHORT_NAMES[patch.site]}"
    record = RecordingTap(name)
    core(torch.tensor(CLEAN), T, seed=seed, tap=record)

    def put(tensor, hook):
        tensor = tensor.clone()
        if patch.head is None:
            tensor[0, patch.position] = record[name][0, patch.position]
        else:
            tensor[0, patch.position, patch.head] = record[name][0, patch.position, patch.head]
        return tensor

    return core(torch.tensor(CORRUPTED), T, seed=seed, tap=FunctionTap(core, [(name, put)], T))[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_batch_is_its_own_patch(family):
    core = make_random_core(family, gain=0.5)
    patches = [p for p in sweep(core, SITES, T, 5, positions="each") if (p.position, p.layer) == (3, 1) and p.head in (None, 1) and p.depth]
    pair = Pair(core, torch.tensor(CLEAN), torch.tensor(CORRUPTED), T, patches, seed=5)
    found = pair.run(patches, batch=7)
    expected = torch.stack([by_hand(core, p) for p in patches])
    assert (found - expected).abs().max() < 1e-9
    spread = {site: (found[[p.site == site for p in patches]] - pair.corrupted_logits).abs().amax() for site in SITES}
    assert all(change > 1e-6 for change in spread.values())  # every site does something here


@pytest.mark.parametrize("family", ["huginn", "hrm_text", "dory"])
def test_clean_into_clean_changes_nothing_at_all(family):
    core = make_random_core(family)
    frame = activation_patching(core, [(CLEAN, CLEAN)], SITES, answers=[(7, 9)], depth=2, layers=[1], positions=[1, 4],
                                batch=1, progress=False).frame
    logits = core(torch.tensor(CLEAN), 2)[0, -1]
    assert (frame.difference_logits == float(logits[7] - logits[9])).all() and frame.restored.isna().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_the_last_state_everywhere_restores_all_and_one_place_does_not(family):
    core = make_random_core(family, gain=0.5, **({"n_coda": 0} if family == "parcae" else {}))  # its coda looks up the prompt's tokens
    result = activation_patching(core, [(CLEAN, CORRUPTED)], ["resid_post"], depths=[T], layers=[core.config.n_core - 1], positions="all",
                                 answers=[(7, 9)], depth=T, batch=1, progress=False)
    row = result.frame.iloc[0]
    assert row.restored == 1 and row.difference_logits == row.clean_logits != row.corrupted_logits
    assert (row.position, row["head"], row.depth, row.token) == (-1, -1, T, "")
    every = activation_patching(core, [(CLEAN, CORRUPTED)], ["resid_post"], depths="all", layers="all", positions="all",
                                answers=[(7, 9)], depth=T, batch=1, progress=False).frame
    assert every.restored.tolist() == [1.0]
    alone = activation_patching(core, [(CLEAN, CORRUPTED)], ["z"], answers=[(7, 9)], depth=T, progress=False).frame
    assert len(alone) == (T + 1) * core.config.n_core * core.config.n_heads and (alone.restored != 1).all()
    assert set(alone.depth) == {-1, 1, 2, 3} and set(alone.position) == {-1}


def test_restored_is_the_share_of_the_difference_between_the_two_answers():
    core = make_random_core("raven", gain=0.5)
    pairs = [(CLEAN, CORRUPTED), ([9, 8, 7], [9, 8, 6])]
    frame = activation_patching(core, pairs, ["v"], depths=[2], layers=[1], positions=[2], heads=[1], answers=[(4, 5), (6, 7)], depth=T,
                                seed=5, progress=False).frame
    row = frame.iloc[0]
    found = by_hand(core, Patch("v", 2, 1, 2, 1))
    clean, corrupted = (core(torch.tensor(ids), T, seed=5)[0, -1] for ids in (CLEAN, CORRUPTED))
    d = [float(z[4] - z[5]) for z in (found, clean, corrupted)]
    assert row.difference_logits == pytest.approx(d[0], abs=1e-10)
    assert row.restored == pytest.approx((d[0] - d[2]) / (d[1] - d[2]), abs=1e-9)
    assert (row.token, row.corrupted_token) == ("59", "59") and frame.prompt.tolist() == [0, 1]
    assert core.config.n_kv_heads == 2
    assert set(activation_patching(core, pairs[:1], ["k"], depths=[1], depth=T, answers=[(4, 5)], progress=False).frame["head"]) == {0, 1}


def test_by_default_the_answers_are_the_models_own():
    core = make_random_core("ouro", gain=0.5)
    where = {"depths": [1], "layers": [0], "positions": [0]}
    frame = activation_patching(core, [(CLEAN, CORRUPTED)], ["mlp_out"], **where, depth=T, progress=False).frame
    clean, corrupted = (core(torch.tensor(ids), T)[0, -1] for ids in (CLEAN, CORRUPTED))
    right, wrong = clean.argmax(), corrupted.argmax()
    assert frame.clean_logits[0] == float(clean[right] - clean[wrong]) > 0 > frame.corrupted_logits[0]


@pytest.mark.parametrize("pairs, options, error, message", [
    ([(CLEAN, CLEAN[:3])], {}, PromptError, "pair 0: the clean prompt has 5 tokens and the corrupted one 3"),
    ([CLEAN], {}, PromptError, "pairs are .clean, corrupted. prompts; pair 0 is"), ([], {}, PromptError, "no pairs"),
    ([(CLEAN, CLEAN)], {}, SettingError, "same token on top after both"),
    ([(CLEAN, CORRUPTED)], {"answers": [(3, 3)]}, SettingError, "both answers are token 3"),
    ([(CLEAN, CORRUPTED)], {"answers": [(3, 999)]}, SettingError, "token ids from 0 to 255, got 999"),
    ([(CLEAN, CORRUPTED)], {"answers": []}, SettingError, "got 0 for 1"),
    ([(CLEAN, CORRUPTED)], {"depths": [0]}, SettingError, "depths are .*from 1 to 4; got 0"),
    ([(CLEAN, CORRUPTED)], {"positions": "last"}, SettingError, "positions are 'each', 'all'.*got 'last'"),
    ([(CLEAN, CORRUPTED)], {"sites": ["pattern"]}, SettingError, "site 'pattern' is unknown"),
    ([(CLEAN, CORRUPTED)], {"batch": 0}, SettingError, "batch must be .*got 0")])
def test_what_cannot_be_patched_is_said(pairs, options, error, message):
    with pytest.raises(error, match=message):
        activation_patching(make_random_core("ouro"), pairs, progress=False, **options)


def test_the_built_in_pairs_are_answered_by_a_shipped_model_and_the_digit_carries_the_answer(tmp_path):
    model, pairs = loopscope.load("tiny-ouro", hooked=False), sum_pairs(3, seed=1)
    assert pairs == sum_pairs(3, seed=1) != sum_pairs(3)
    result = activation_patching(model, pairs, ["resid_post"], depths=[1, 4], layers=[0, 2], progress=False)
    result.save(tmp_path)
    assert PatchingResult.load(tmp_path).frame.equals(result.frame)
    frame = result.frame
    early = frame[(frame.depth == 1) & (frame.layer == 0)]
    differ = early[early.token != early.corrupted_token]
    assert len(differ) == 6 and set(differ.position) == {7, 20}
    best = early.loc[early.groupby("prompt").restored.idxmax()]
    assert set(best.position) == {20}  # the digit in the working, not the one in the question
    late = frame[(frame.depth == 4) & (frame.layer == 2) & (frame.position == frame.position.max())]
    assert (late.restored - 1).abs().max() < 1e-4
    with pytest.raises(SettingError, match="at least one pair"):
        sum_pairs(0)
