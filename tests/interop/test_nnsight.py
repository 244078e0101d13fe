"""nnsight, which hooks modules from outside, sees at its r-th call of a module what our hooks name depth r."""

from __future__ import annotations

import pytest
import torch

from loopscope.models.hooked import LoopedModel
from loopscope.random_models import make_random_core

nnsight = pytest.importorskip("nnsight")
IDS = torch.tensor([[3, 14, 15, 92, 65], [27, 18, 28, 45, 90]])
T = 3
# Recording the pattern writes the softmax out, and then the last bits differ: everything else is compared bit for bit.
NAMES = [f"depth.{r}.{rest}" for r in range(1, T + 1) for rest in
         ("hook_state", *(f"blocks.1.{n}" for n in ("hook_resid_pre", "attn.hook_v", "hook_attn_out", "hook_mlp_out", "hook_resid_post")))]


def recorded(core):
    return LoopedModel(core).run_with_cache(IDS, depth=T, names_filter=NAMES)


def values(core, qkv):
    """The values' part of what the packed projection gives: [batch, pos, kv_heads, d_head]."""
    c = core.config
    return qkv.unflatten(-1, (-1, c.d_head))[:, :, c.n_heads + c.n_kv_heads :]


def test_every_call_of_huginns_block_is_the_depth_we_say():
    core = make_random_core("huginn", gain=0.5)
    model = nnsight.NNsight(core)
    with model.trace(IDS, depth=T) as tracer:
        found = list().save()
        for _ in tracer.iter[:T]:
            block = model.blocks[1]
            found.append((block.input, block.attn.qkv.output, block.attn.output, block.mlp.output, block.output, model.blocks[3].output))
        logits = model.output.save()
    out, run = recorded(core)
    assert len(found) == T and torch.equal(out, logits)
    for r, (pre, qkv, attn, mlp, post, last) in enumerate(found, start=1):
        for short, theirs in (("resid_pre", pre), ("v", values(core, qkv)), ("attn_out", attn), ("mlp_out", mlp), ("resid_post", post)):
            assert torch.equal(run[short, r, 1], theirs), (short, r)
        assert torch.equal(run["state", r], last)
    assert not torch.equal(found[0][4], found[1][4])


def test_ouros_branches_and_the_norm_that_closes_each_loop_are_the_calls_in_order():
    core = make_random_core("ouro", gain=0.5)
    model = nnsight.NNsight(core)
    with model.trace(IDS, depth=T) as tracer:
        found = list().save()
        for _ in tracer.iter[:T]:
            found.append((model.blocks[1].norm_2.output, model.blocks[1].norm_4.output, model.norm.output))
    _, run = recorded(core)
    for r, (attn, mlp, state) in enumerate(found, start=1):
        assert torch.equal(run["attn_out", r, 1], attn) and torch.equal(run["mlp_out", r, 1], mlp) and torch.equal(run["state", r], state)


def test_an_edit_at_one_call_is_an_edit_at_that_depth():
    core = make_random_core("raven", gain=0.5)
    model, hooked = nnsight.NNsight(core), LoopedModel(core)
    with model.trace(IDS, depth=T) as tracer:
        for _ in tracer.iter[1:2]:
            model.blocks[0].output[:, 2] = 0
        theirs = model.output.save()

    def zero(resid, hook):
        resid[:, 2] = 0
        return resid

    ours = hooked.run_with_hooks(IDS, depth=T, fwd_hooks=[("depth.2.blocks.0.hook_resid_post", zero)])
    assert torch.equal(ours, theirs) and not torch.equal(ours, hooked(IDS, depth=T))


def test_inner_cycles_are_the_calls_of_the_fast_stack():
    core = make_random_core("hrm_text", inner_cycles=2)
    model, names = nnsight.NNsight(core), [f"depth.{r}.l_cycle.{i}.blocks.0.hook_resid_post" for r in (1, 2) for i in (1, 2)]
    with model.trace(IDS, depth=2) as tracer:
        found = list().save()
        for _ in tracer.iter[:4]:
            found.append(model.low[0].output)
    _, run = LoopedModel(core).run_with_cache(IDS, depth=2, names_filter=names)
    assert all(torch.equal(run[name], theirs) for name, theirs in zip(names, found, strict=True))
