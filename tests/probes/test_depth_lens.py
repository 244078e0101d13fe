"""Depth lens: what each depth would say, through the model's own readout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopscope.errors import PromptError
from probes import DepthLensResult, depth_lens
from probes.lens import settle_depths

PROMPTS = [list(range(40, 57)), list(range(90, 101))]


@pytest.fixture(params=["huginn", "ouro"])
def core(request):
    return request.getfixturevalue(request.param)


def test_at_full_depth_the_lens_agrees_with_itself_exactly(core):
    frame = depth_lens(core, PROMPTS, progress=False).frame
    full = frame[frame.depth == core.config.depth]
    assert len(full) == 2 and (full.agreement == 1).all() and (full.kl_nats == 0).all()
    assert (frame[frame.depth == 1].kl_nats > 0).all()


def test_each_depth_is_the_model_stopped_there(core):
    """Loss, entropy, margin and KL equal those of a separate pass with fewer recurrences."""
    frame = depth_lens(core, PROMPTS, progress=False, seed=2).frame
    ids = torch.tensor(PROMPTS[0])
    full = core(ids, seed=2)[0].log_softmax(-1)
    for depth in range(1, core.config.depth + 1):
        logits = core(ids, depth, seed=2)[0]
        log_p = logits.log_softmax(-1)
        row = frame[(frame.prompt == 0) & (frame.depth == depth)].iloc[0]
        top = logits.sort(descending=True).values
        assert row.loss_nats == pytest.approx(F.cross_entropy(logits[:-1], ids[1:]).item(), abs=1e-10)
        assert row.kl_nats == pytest.approx(F.kl_div(log_p, full, log_target=True, reduction="sum").item() / 17, abs=1e-10)
        assert row.entropy_nats == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().mean().item(), abs=1e-10)
        assert row.margin_logits == pytest.approx((top[:, 0] - top[:, 1]).mean().item(), abs=1e-10)
        assert row.agreement == pytest.approx((logits.argmax(-1) == full.argmax(-1)).double().mean().item())
        assert row.n_positions == 17


def test_settle_depth_is_the_first_depth_after_which_the_top_token_stays():
    top = torch.tensor([[7, 7, 1, 7, 2],
                        [7, 1, 1, 7, 3],
                        [7, 7, 2, 1, 4],
                        [7, 7, 2, 7, 5]])
    assert settle_depths(top).tolist() == [1, 3, 3, 4, 4], "a lucky early match that is lost again does not count"


def test_settle_counts_cover_every_position_and_agree_with_the_lens(core):
    result = depth_lens(core, PROMPTS, progress=False)
    counts = result.settle.frame.groupby("prompt").positions.sum()
    assert counts.tolist() == [17, 11]
    for prompt, n in enumerate((17, 11)):
        settled = result.settle.frame[result.settle.frame.prompt == prompt].set_index("settle_depth").positions
        assert settled.index.tolist() == list(range(1, core.config.depth + 1))
        lens = result.frame[result.frame.prompt == prompt].set_index("depth").agreement
        before_last = core.config.depth - 1
        assert lens[before_last] == pytest.approx(settled[:before_last].sum() / n)


def test_both_tables_come_back_from_disk(huginn, tmp_path):
    result = depth_lens(huginn, PROMPTS, progress=False, task="maths")
    result.save(tmp_path)
    loaded = DepthLensResult.load(tmp_path)
    assert loaded.frame.equals(result.frame) and loaded.settle.frame.equals(result.settle.frame)
    assert loaded.meta == loaded.settle.meta


def test_a_prompt_without_a_next_token_is_refused(huginn):
    with pytest.raises(PromptError, match="next-token loss needs at least 2"):
        depth_lens(huginn, [[3]], progress=False)
