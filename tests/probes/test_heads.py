"""Head stability: Jensen-Shannon divergence of attention patterns to full depth."""

from __future__ import annotations

import math

import pytest
import torch

from loopscope.errors import PromptError
from loopscope.tap import RecordingTap
from probes import HeadStabilityResult, head_stability
from probes.heads import js_nats

IDS = [3, 141, 59, 26, 5]


def test_js_is_0_for_equal_ln_2_for_disjoint_and_the_mean_of_two_kl_between():
    p, q = torch.tensor([0.2, 0.8, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    m = (p + q) / 2
    expected = sum(a * math.log(a / c) for a, c in zip(p.tolist(), m.tolist()) if a) / 2
    expected += sum(b * math.log(b / c) for b, c in zip(q.tolist(), m.tolist())) / 2
    assert float(js_nats(p, q)) == pytest.approx(expected) == float(js_nats(q, p)) and float(js_nats(p, p)) == 0
    assert float(js_nats(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))) == pytest.approx(math.log(2))


@pytest.mark.parametrize("family", ["huginn", "ouro", "dory"])
def test_each_row_is_the_divergence_of_that_heads_pattern(family, random_core):
    core = random_core(family)
    frame = head_stability(core, [IDS], progress=False).frame
    depth, heads = core.config.depth, core.config.n_heads
    assert len(frame) == core.config.n_core * heads * depth and set(frame.n_positions) == {4}
    tap = RecordingTap()
    core(torch.tensor(IDS), tap=tap)
    for r in (1, depth - 1):
        early, full = (tap[f"depth.{d}.blocks.1.attn.hook_pattern"][0, 2] for d in (r, depth))
        expected = sum(float(js_nats(early[i], full[i])) for i in range(1, 5)) / 4
        row = frame[(frame.layer == 1) & (frame["head"] == 2) & (frame.depth == r)].iloc[0]
        assert row.js_nats == pytest.approx(expected, abs=1e-12) and row.js_nats > 0
    assert (frame[frame.depth == depth].js_nats == 0).all()


def test_one_token_is_refused_and_the_table_comes_back(ouro, tmp_path):
    with pytest.raises(PromptError, match="a choice of keys needs at least 2"):
        head_stability(ouro, [[1]], progress=False)
    result = head_stability(ouro, [IDS], progress=False)
    result.save(tmp_path)
    assert HeadStabilityResult.load(tmp_path).frame.equals(result.frame)
