"""Recorded runs in others' tools: xarray datasets, circuitsvis views, and what of TransformerLens's caches is right here."""

from __future__ import annotations

import sys

import pytest
import torch

from loopscope.errors import HookError, SettingError
from loopscope.models.hooked import LoopedModel
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.recorded import why_heads_do_not_add_up

IDS = torch.tensor([[3, 14, 15, 92, 65], [27, 18, 28, 45, 90]])


# ---- xarray -------------------------------------------------------------------------------------------------


def test_a_dataset_holds_what_was_recorded_under_named_axes():
    pytest.importorskip("xarray")
    model = LoopedModel(make_random_core("raven", gain=0.5))  # fewer key-value heads than heads
    _, run = model.run_with_cache(IDS, depth=3)
    data = run.to_xarray()
    assert data["q"].dims == ("depth", "layer", "batch", "position", "head", "d_head") and data["v"].dims[4] == "kv_head"
    assert data["pattern"].dims == ("depth", "layer", "batch", "head", "position", "key")
    assert data["state"].dims == ("depth", "batch", "position", "d_model") and data["embed"].dims == ("batch", "position", "d_model")
    assert data.depth.values.tolist() == [1, 2, 3] and data.layer.values.tolist() == list(range(model.config.n_core))
    for short in ("q", "v", "pattern", "resid_post"):
        assert torch.equal(torch.from_numpy(data[short].sel(depth=2, layer=1).values.copy()), run[short, 2, 1])
    assert torch.equal(torch.from_numpy(data["v"].values.copy()), run.stack("v"))
    assert torch.equal(torch.from_numpy(data["state"].sel(depth=3).values.copy()), run["state", 3])
    assert torch.equal(torch.from_numpy(data["coda_z"].sel(coda_layer=1).values.copy()), run["z", "coda", 1])
    assert data.attrs == {"model": "random-raven", "family": "raven", "depth": 3}
    mean = data["v"].sel(depth=1).mean(["batch", "position"])  # what it is for
    assert mean.dims == ("layer", "kv_head", "d_head")


def test_a_partial_recording_keeps_its_depths_and_its_positions():
    pytest.importorskip("xarray")
    core = make_random_core("ouro", dtype=torch.bfloat16)
    model = LoopedModel(core)
    names = ["depth.2.blocks.1.attn.hook_v", "depth.3.blocks.0.attn.hook_v", "depth.2.hook_state"]
    _, run = model.run_with_cache(IDS, depth=3, names_filter=names, pos_slice=(1, 4))
    data = run.to_xarray()
    assert set(data.data_vars) == {"v", "state"} and data.position.values.tolist() == [1, 2, 3]
    assert data["v"].dims[4] == "head" and data["v"].dtype == "float32"
    assert torch.equal(torch.from_numpy(data["v"].sel(depth=3, layer=0).values.copy()), run["v", 3, 0].float())
    assert data["v"].sel(depth=3, layer=1).isnull().all() and data["state"].sel(depth=3).isnull().all()
    cache = model.make_cache(8, 3, batch=2)
    model(IDS, depth=3, cache=cache)
    _, later = model.run_with_cache(IDS[:, :1], depth=3, cache=cache, names_filter="depth.1.hook_state")
    assert later.to_xarray().position.values.tolist() == [5]


def test_inner_cycles_have_an_axis_and_a_run_without_batch_has_none():
    pytest.importorskip("xarray")
    model = LoopedModel(make_random_core("hrm_text", inner_cycles=2))
    _, run = model.run_with_cache(IDS[:1], depth=2, remove_batch_dim=True)
    data = run.to_xarray()
    assert data["inner_v"].dims == ("depth", "cycle", "layer", "position", "head", "d_head") and data.cycle.values.tolist() == [1, 2]
    theirs = run["depth.2.l_cycle.1.blocks.0.attn.hook_v"]
    assert torch.equal(torch.from_numpy(data["inner_v"].sel(depth=2, cycle=1, layer=0).values.copy()), theirs)
    assert "batch" not in data.dims


@pytest.mark.parametrize("module, call", [("xarray", lambda run: run.to_xarray()),
                                          ("circuitsvis", lambda run: run.attention_view(1, 0))])
def test_without_the_extra_the_error_names_it(module, call, monkeypatch):
    _, run = LoopedModel(make_random_core("ouro")).run_with_cache(IDS, depth=1)
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=rf"needs {module}, which is not installed; pip install 'loopscope\[interop\]'"):
        call(run)


# ---- circuitsvis --------------------------------------------------------------------------------------------


def test_the_view_of_a_layer_is_given_its_pattern_and_its_tokens(monkeypatch):
    attention = pytest.importorskip("circuitsvis.attention")
    _, run = LoopedModel(make_random_core("raven")).run_with_cache(IDS, depth=2)
    html = str(run.attention_view(2, 1))
    assert "AttentionHeads" in html and '"depth 2, L1H3"' in html and '"92"' in html  # no tokenizer: ids are the words
    given = {}
    monkeypatch.setattr(attention, "attention_heads", lambda **options: given.update(options))
    run.attention_view(2, 1, batch=1, tokens=list("abcde"))
    assert torch.equal(torch.from_numpy(given["attention"]), run["pattern", 2, 1][1].float()) and given["tokens"] == list("abcde")
    run.apply_slice_to_batch_dim((1, 2)).attention_view("coda", 0)
    assert given["tokens"] == ["27", "18", "28", "45", "90"]
    with pytest.raises(SettingError, match="5 positions, but 2 tokens"):
        run.attention_view(1, 0, tokens=["a", "b"])


def test_a_pattern_of_a_slice_has_no_view():
    pytest.importorskip("circuitsvis")
    _, run = LoopedModel(make_random_core("ouro")).run_with_cache(IDS, depth=1, pos_slice=(1, 3))
    with pytest.raises(HookError, match="2 rows and 5 keys; a view needs a pass over whole sequences"):
        run.attention_view(1, 0)


# ---- TransformerLens's own utilities -------------------------------------------------------------------------

ADD_UP = ("huginn", "raven", "nanbeige", "parcae")


@pytest.mark.parametrize("family", FAMILIES)
def test_head_results_run_where_heads_add_up_and_are_refused_where_they_do_not(family):
    core = make_random_core(family, gain=0.5)
    _, run = LoopedModel(core).run_with_cache(IDS, depth=2)
    unrolled = run.unrolled()
    assert (why_heads_do_not_add_up(core) == "") == (family in ADD_UP)
    if family not in ADD_UP:
        z, out = run["z", 2, 1], core.blocks[1].attn.out.weight
        sums = z.flatten(-2) @ out.T  # what TransformerLens would call the heads' sum
        assert (sums - run["attn_out", 2, 1]).abs().max() > 1e-3
        for method in ("stack_head_results", "compute_head_results"):
            with pytest.raises(HookError, match=f"{method} would be wrong on {core.family}.*(norm|gate) acts.*probes.head_attribution"):
                getattr(unrolled, method)()
        return
    n, heads = core.config.n_core, core.config.n_heads
    stack, labels = unrolled.stack_head_results(return_labels=True)
    assert stack.shape == (2 * n * heads, *IDS.shape, core.config.d_model) and labels[n * heads + 1] == f"L{n}H1"
    sums = stack.unflatten(0, (2 * n, heads)).sum(1)
    assert (sums - unrolled.stack_activation("attn_out")).abs().max() < 1e-10
    assert torch.equal(run.at_depth(2).stack_head_results(), stack[n * heads :])
    unrolled.compute_head_results()
    assert torch.equal(unrolled["blocks.0.attn.hook_result"][:, :, 1], stack[1])
    with pytest.raises(HookError, match=r"stack_head_results\(incl_remainder=True\) would be wrong"):
        unrolled.stack_head_results(incl_remainder=True)
    with pytest.raises(HookError, match="unrolled"):
        run.stack_head_results()


def test_accumulated_resid_is_the_stream_of_the_unrolled_core():
    _, run = LoopedModel(make_random_core("parcae", gain=0.5)).run_with_cache(IDS, depth=2)
    n = run.looped.config.n_core
    stream, labels = run.unrolled().accumulated_resid(incl_mid=True, return_labels=True)
    assert torch.equal(stream[0], run["resid_pre", 1, 0]) and torch.equal(stream[2 * n], run["resid_pre", 2, 0])
    assert torch.equal(stream[2 * n + 1], run["resid_mid", 2, 0]) and labels[2 * n + 1] == f"{n}_mid" and len(stream) == 4 * n + 1
