"""Head attribution: heads add up to their attention on every wiring, and a head is what leaving it out takes away."""

from __future__ import annotations

import pytest
import torch

from loopscope.errors import NumericsError, SettingError
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.tap import FunctionTap
from probes import HeadAttributionResult, attribution, head_attribution
from probes import head_shares

PROMPTS = [[3, 141, 59, 26, 5, 35, 89], [7, 8, 9, 10]]
KEYS = ["prompt", "part", "depth", "cycle", "layer"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_of_every_attention_add_up_to_it(family):
    core = make_random_core(family, seed=4)
    options = {"target": "top", "against": "mean", "depth": 3, "seed": 5, "progress": False}
    whole = attribution(core, PROMPTS, **options).frame
    frame = head_attribution(core, PROMPTS, **options).frame
    sums = frame.groupby(KEYS).value_logits.sum()
    expected = whole[whole.branch == "attn"].set_index(KEYS).value_logits
    assert len(sums) == len(expected) and (sums - expected).abs().max() < 1e-9
    assert set(frame["head"]) == set(range(core.config.n_heads))
    assert frame.groupby("prompt")["logit"].first().tolist() == pytest.approx(whole.groupby("prompt")["logit"].first().tolist())


@pytest.mark.parametrize("family", ["nanbeige", "raven", "parcae"])
def test_the_last_attentions_head_is_what_leaving_it_out_takes_from_the_stream(family):
    """Where a block adds to its stream and norms nothing behind its attention, a head's part is z times its rows of the matrix."""
    core, head = make_random_core(family, seed=2), 2
    ids = torch.tensor(PROMPTS[0])
    kept = {}

    def keep(name):
        def look(t, hook):
            kept[name] = t.clone()
        return look

    def without(t, hook):
        t[:, :, head] = 0
        return t

    name = f"depth.2.blocks.{core.config.n_core - 1}."
    core(ids, 2, tap=FunctionTap(core, [(name + "attn.hook_z", keep("z")), (name + "hook_attn_out", keep("all")),
                                        (name + "hook_resid_pre", keep("pre"))], 2))
    core(ids, 2, tap=FunctionTap(core, [(name + "attn.hook_z", without), (name + "hook_attn_out", keep("less"))], 2))
    parts = head_shares.head_outputs(core.blocks[-1], kept["pre"][0].double(), kept["z"][0].double())
    torch.testing.assert_close(parts[:, head], (kept["all"] - kept["less"])[0], rtol=0, atol=1e-12)


def test_float32_adds_up_and_a_wrong_split_is_refused(monkeypatch, tmp_path):
    core = make_random_core("hrm_text", dtype=torch.float32)
    result = head_attribution(core, PROMPTS, depth=2, progress=False)
    result.save(tmp_path)
    assert HeadAttributionResult.load(tmp_path).frame.equals(result.frame)
    with pytest.raises(SettingError, match="positions 'first' is unknown"):
        head_attribution(core, PROMPTS, positions="first", progress=False)
    right = head_shares.head_outputs
    monkeypatch.setattr(head_shares, "head_outputs", lambda *a: right(*a) * 1.01)
    with pytest.raises(NumericsError, match="the components add up to .*but what attention . of .* adds at depth"):
        head_attribution(core, PROMPTS, depth=2, progress=False)
