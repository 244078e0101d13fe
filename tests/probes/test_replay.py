"""The replay table: every draft in it is the one that a decoder would make at that position and depth."""

from __future__ import annotations

import pytest
import torch

from loopscope.errors import SettingError
from loopscope.random_models import make_random_core
from loopscope.rows import Chain
from probes import ReplayResult, replay_table

PROMPT, NEW = list(range(40, 49)), [7, 3, 90, 15, 4, 66]


def _behind_a_real_prefix(core, verified, lanes, depth, prompt=PROMPT):
    """Logits [lanes, vocab] of a chain of drafts, made one after the other at `depth` behind `verified` tokens run in full."""
    ids = torch.tensor([*prompt, *NEW])
    cache = core.make_cache(len(ids), core.config.depth)
    core(ids[:verified], cache=cache, seed=3)
    logits = []
    for p in range(verified, verified + lanes):
        x = core.embed(ids[None, p : p + 1], Chain(p, 1), cache)
        state = core.start(x, Chain(p, 1), seed=3)
        for r in range(1, depth + 1):
            state = core.recur(state, x, Chain(p, 1, r), cache)
        logits.append(core.read(state, Chain(p, 1, depth), cache)[0, 0])
    return torch.stack(logits)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
@torch.inference_mode()
def test_each_draft_is_the_one_made_at_that_depth_behind_verified_predecessors(family, request):
    core = request.getfixturevalue(family)
    frame = replay_table(core, [PROMPT], [NEW], seed=3, progress=False).frame
    assert len(frame) == len(NEW) * core.config.depth
    for row in frame.itertuples():
        said = _behind_a_real_prefix(core, row.position, 1, row.depth)[0]
        assert said.argmax() == row.draft and said.softmax(-1).max().item() == pytest.approx(row.probability, abs=1e-6)


@torch.inference_mode()
def test_target_and_committed_are_those_of_the_same_place(huginn):
    result = replay_table(huginn, [PROMPT], [NEW], seed=3, progress=False)
    full = huginn(torch.tensor([*PROMPT, *NEW[:-1]]), seed=3)[0].argmax(-1)[len(PROMPT) - 1 :].tolist()
    for _, part in result.frame.groupby("depth"):
        assert part.target.tolist() == full and part.committed.tolist() == NEW
        assert part.position.tolist() == list(range(len(PROMPT) - 1, len(PROMPT) + len(NEW) - 1))
    done = result.passes[0]
    assert done.prompt_length == len(PROMPT) and done.lanes == len(NEW) - 1, "lane i takes new token i as its input"
    assert done.drafts[-1].tolist() == full[1:]


@pytest.mark.parametrize("family", ["huginn", "raven", "parcae", "dory"])
@torch.inference_mode()
def test_a_draft_read_behind_drafts_equals_a_chain_of_drafts(family):
    """The codas have two layers, so what a predecessor left depends on its own predecessors too."""
    core = make_random_core(family, seed=1, gain=1.0, n_core=1, context=64)
    done = replay_table(core, [PROMPT], [NEW], seed=3, progress=False).passes[0]
    chain = _behind_a_real_prefix(core, len(PROMPT) + 1, 3, 2)  # lanes 1, 2, 3, drafted at depth 2
    token, probability = done.read([1, 2, 3], [2, 2, 2], [1, 1, 1], torch.ones(3, 3, dtype=torch.bool).tril())
    assert token.tolist() == chain.argmax(-1).tolist()
    assert torch.allclose(probability.double(), chain.softmax(-1).amax(-1), atol=1e-6)
    behind_verified = done.probability[1, 1:4].double()
    assert abs(behind_verified[0] - probability[0]) < 1e-6 < (behind_verified - probability)[1:].abs().min(), "the predecessors matter"


def test_a_table_from_disk_keeps_the_drafts_and_refuses_what_needs_the_states(huginn, tmp_path):
    made = replay_table(huginn, [PROMPT, [5]], [NEW, NEW[:2]], limit=[9, 2], progress=False)
    made.save(tmp_path)
    loaded = ReplayResult.load(tmp_path)
    assert loaded.frame.equals(made.frame)
    for old, new in zip(made.passes, loaded.prompts(), strict=True):
        assert (old.prompt_length, old.tokens, old.limit, old.eos, old.attends) == (new.prompt_length, new.tokens, new.limit, new.eos, True)
        assert torch.equal(old.drafts, new.drafts) and torch.equal(old.probability, new.probability)
    with pytest.raises(SettingError, match="from disk"):
        loaded.prompts()[0].read([0], [1], [0], torch.ones(1, 1, dtype=torch.bool))


def test_a_text_of_one_token_has_no_lanes(ouro):
    result = replay_table(ouro, [PROMPT], [[7]], limit=5, progress=False)
    assert result.passes[0].lanes == 0 and len(result.frame) == ouro.config.depth


def test_what_does_not_fit_is_refused(ouro):
    with pytest.raises(SettingError, match="1 prompts need as many continuations"):
        replay_table(ouro, [PROMPT], [], progress=False)
    for new, limit in (([], 4), (NEW, 3), (NEW, 0)):
        with pytest.raises(SettingError, match=f"prompt 0 has {len(new)} new tokens"):
            replay_table(ouro, [PROMPT], [new], limit=limit, progress=False)
    with pytest.raises(SettingError, match="nothing to replay on this dory model"):
        replay_table(make_random_core("dory", n_core=1, kv_slots=1), [PROMPT], [NEW], progress=False)
