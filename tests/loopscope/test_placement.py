"""Blocks on several devices. Two made-up GPUs show that every tensor is where its block is: operations on tensors of two
devices are errors there as they are on real ones. Numbers are compared where devices can be had."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import loopscope
from decoders import DraftThenVerify, Wavefront
from loopscope.cache import DepthCache
from loopscope.errors import SettingError
from loopscope.merged import CacheGroup
from loopscope.models.loading import load_core
from loopscope.models.placement import block_names, device_of, dispatch, plan_placement
from loopscope.models.registry import family_class
from loopscope.rows import ALIGNED, At, Chain, Draft, Merged, ReadPolicy, Tree, Wave

FAMILIES = ["dory", "hrm_text", "huginn", "nanbeige", "ouro", "parcae", "retrofit_llama", "retrofit_olmo"]
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
# Of the kinds of device that PyTorch knows by name, one that a build without GPUs lets fake tensors be indexed on.
HERE, THERE = torch.device("lazy:0"), torch.device("lazy:1")


def named(device) -> torch.device:
    """The device, not tried: no GPU is needed to read a map."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def meta(core):
    with torch.device("meta"):
        return family_class(core.family)(core.config)


@contextlib.contextmanager
def two_gpus(golden, goldens, second=lambda i, name: i % 2):
    """The golden's model with every other block (or what `second` says) on a second GPU; tensors that know their device and
    shape, but hold nothing."""
    real = load_core(goldens / golden)
    with FakeTensorMode(), torch.inference_mode():
        core = family_class(real.family)(real.config).eval()
        placement = {name: THERE if second(i, name) else HERE for i, name in enumerate(block_names(core))}
        for name, p in list(core.named_parameters()):
            module, _, leaf = name.rpartition(".")
            where = device_of(name, placement, HERE)
            setattr(core.get_submodule(module), leaf, torch.nn.Parameter(p.to(where), requires_grad=False))
        dispatch(core, placement, HERE)
        yield core


def run(core, rows, cache, depth: int = 2, policy=ALIGNED):
    x = core.embed(torch.zeros(1, rows.count, dtype=torch.long, device=HERE), rows, cache)
    state = core.start(x, rows, start_state="zero" if core.has_start_state else None)
    for _ in range(depth):
        state = core.recur(state, x, rows, cache, policy)
    logits = core.read(state, rows, cache)
    assert x.device == state.device == logits.device == HERE
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_with_its_blocks_on_two_devices(family, goldens):
    with two_gpus(family, goldens) as core:
        vocab = core.config.vocab_size
        assert run(core, Chain(0, 7, 1), None).shape == (1, 7, vocab)
        cache = DepthCache(core.config, 32, 2, device=HERE, placement=core.placement)
        assert run(core, Chain(0, 7, 1), cache).shape == (1, 7, vocab)
        cache.commit(7)
        for rows in (Chain(7, 1, 1), Chain(7, 3, 2), At((7, 9), 1), Draft(7, 2, 1, 7)):
            assert run(core, rows, cache, 1).shape == (1, rows.count, vocab)


def test_waves_policies_and_probes_run_with_blocks_on_two_devices(goldens):
    with two_gpus("huginn", goldens) as core:
        cache = DepthCache(core.config, 32, 4, device=HERE, placement=core.placement)
        cache.commit(7)
        deep = ReadPolicy(k=4, v=4)
        for rows, policy in ((Wave(7, (3, 2, 1)), ALIGNED), (Wave(7, (4, 3, 1)), ALIGNED), (Chain(7, 2, 1), deep),
                             (Draft(7, 2, 1, 7), deep)):
            x = torch.zeros(1, rows.count, core.config.d_model, device=HERE)
            assert core.recur(x, x, rows, cache, policy).device == HERE


def test_branches_and_several_sequences_run_with_blocks_on_two_devices(goldens):
    with two_gpus("dory", goldens) as core:  # MergedPlan windows each of its plans
        caches = [DepthCache(core.config, 64, 4, device=HERE, placement=core.placement, spare=4) for _ in range(2)]
        for cache in caches:
            cache.commit(40)
        rows = Merged((Chain(40, 2, 1), At((40, 42), 1)), (0, 1))
        x = torch.zeros(1, 4, core.config.d_model, device=HERE)
        assert core.recur(x, x, rows, CacheGroup(caches), (ALIGNED, ALIGNED)).device == HERE
    with two_gpus("huginn", goldens) as core:
        cache = DepthCache(core.config, 32, 4, device=HERE, placement=core.placement, spare=4)
        cache.commit(7)
        tree = Tree((7, 7), (7, 32), ((7,), (32,)), (2, 2), 7)
        x = torch.zeros(1, 2, core.config.d_model, device=HERE)
        assert core.recur(x, x, tree, cache).device == HERE


def test_sliding_windows_move_with_their_plan(goldens):
    """The window's mask is made from the plan's own device, then moved, in whichever order layers ask."""
    with two_gpus("dory", goldens, lambda i, name: i % 4 > 1) as core:
        assert any(block.attn.window and block.attn.out.weight.device == THERE for block in (*core.prelude, *core.blocks, *core.coda))
        cache = DepthCache(core.config, 64, 1, device=HERE, placement=core.placement)
        cache.commit(40)
        for rows in (Chain(40, 1, 1), Chain(40, 3, 1), At((40, 42), 1)):
            run(core, rows, cache, 1)


@pytest.mark.parametrize("family, second", [("huginn", lambda i, name: i % 2), ("hrm_text", lambda i, name: name.startswith("low"))])
def test_keys_and_values_lie_with_their_block(family, second, goldens):
    with two_gpus(family, goldens, second) as core:
        cache = DepthCache(core.config, 8, 3, device=HERE, placement=core.placement)
        pairs = [*zip(core.prelude, cache.prelude), *zip(core.coda, cache.coda)]
        stacks = [core.blocks] + [core.low] * core.config.inner_cycles if family == "hrm_text" else [core.blocks]
        pairs += zip((block for stack in stacks for block in stack), cache.core, strict=True)
        assert {block.attn.out.weight.device for block, _ in pairs} == {HERE, THERE}
        for block, (k, v) in pairs:
            assert k.device == v.device == block.attn.out.weight.device


def test_a_tensor_left_on_another_device_would_be_noticed(goldens):
    """The made-up devices are no trap that lets everything through."""
    with two_gpus("huginn", goldens) as core:
        assert core.blocks[-1].attn.out.weight.device == THERE
        core.blocks[-1]._forward_hooks.clear()  # what carries the state back
        with pytest.raises(Exception, match="same device"):
            run(core, Chain(0, 7, 1), None)


# ---- the map ------------------------------------------------------------------------------------------------


def test_what_is_named_more_exactly_wins_and_all_else_stays_on_the_main_device(goldens, monkeypatch):
    monkeypatch.setattr("loopscope.models.loading.usable_device", named)
    core = meta(load_core(goldens / "huginn"))
    placement, main = plan_placement(core, {"": "cuda:0", "blocks": "cuda:1", "blocks.1": "cuda:2"}, None, torch.float32)
    assert main == FIRST and set(placement) == set(block_names(core))
    assert placement["prelude.0"] == FIRST and placement["blocks.0"] == SECOND and placement["blocks.1"] == torch.device("cuda:2")
    assert device_of("wte.weight", placement, main) == device_of("adapter.weight", placement, main) == FIRST
    assert device_of("blocks.1.attn.out.weight", placement, main) == torch.device("cuda:2")
    assert device_of("blocks.10.attn.out.weight", {"blocks.1": SECOND}, main) == main
    assert plan_placement(core, {"prelude": "cuda:1", "blocks": "cuda:0", "coda": "cuda:0"}, None, torch.float32)[1] == SECOND
    assert plan_placement(core, {"": "cuda:1", "wte": "cuda:0"}, FIRST, torch.float32)[1] == FIRST


BAD = {
    "a block without a device": ({"blocks": "cpu"}, "gives 'prelude.0' no device"),
    "a name that is none": ({"": "cpu", "block": "cpu"}, "names 'block', which is no block or part .* 'blocks'"),
    "part of a block": ({"": "cpu", "blocks.0.attn": "cpu"}, "Blocks are placed whole"),
    "a disk": ({"": "cpu", "blocks.0": "disk"}, "'disk'; blocks are kept on devices"),
    "a device that is none": ({"": "abacus"}, "'abacus' cannot be used here"),
    "the meta device": ({"": "meta"}, "'meta' cannot be used here"),
    "another word": ("balanced", "device_map must be 'auto' or name devices"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_map_that_cannot_be_is_said(name, goldens):
    device_map, message = BAD[name]
    with pytest.raises(SettingError, match=message):
        load_core(goldens / "huginn", device_map=device_map)


def test_the_embedding_cannot_leave_the_main_device(goldens, monkeypatch):
    monkeypatch.setattr("loopscope.models.loading.usable_device", named)
    with pytest.raises(SettingError, match="'wte' on cuda:1, but all that is no block stays together on cuda:0"):
        plan_placement(meta(load_core(goldens / "ouro")), {"": "cuda:0", "wte": "cuda:1"}, None, torch.float32)


def test_max_memory_needs_auto(goldens):
    for given in ({}, {"device_map": {"": "cpu"}}):
        with pytest.raises(SettingError, match="max_memory is for device_map='auto'"):
            load_core(goldens / "ouro", max_memory={"cpu": 10**9}, **given)


def test_auto_fills_one_device_after_another_with_whole_blocks(goldens, monkeypatch):
    monkeypatch.setattr("loopscope.models.loading.usable_device", named)
    core = meta(load_core(goldens / "huginn"))
    size = {name: sum(p.numel() for p in core.get_submodule(name).parameters()) * 2 for name in block_names(core)}
    rest = 2 * sum(p.numel() for p in core.parameters()) - sum(size.values())
    one = max(size.values())
    # What the planner sees of a machine is what it is told here: room for everything but blocks and two blocks, then more.
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda given: given)
    monkeypatch.setattr("accelerate.utils.get_balanced_memory", lambda shell, room, **options: room)
    placement, main = plan_placement(core, "auto", FIRST, torch.bfloat16, {0: rest + 3 * one, 1: 4 * one, "cpu": 100 * one})
    order = [placement[name] for name in block_names(core)]
    assert main == FIRST and set(order) >= {FIRST, SECOND}
    assert order == sorted(order, key=lambda d: (d.type != "cuda", d.index or 0))  # in the order in which they run
    assert sum(size[name] for name in placement if placement[name] == FIRST) <= 3 * one
    assert sum(size[name] for name in placement if placement[name] == SECOND) <= 4 * one
    with pytest.raises(SettingError, match="cuda:0 has no room for embedding, norms and head"):
        plan_placement(core, "auto", FIRST, torch.bfloat16, {0: rest - 1, 1: 100 * one})


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"prelude": "cpu", "blocks": "cpu", "coda": "cpu"}])
@pytest.mark.parametrize("family", ["huginn", "parcae"])  # tied heads both
def test_a_map_of_one_device_gives_the_same_logits(family, device_map, goldens):
    if torch.cuda.is_available() and device_map == "auto":
        pytest.skip("auto takes the GPU here; the gpu test below compares it")
    plain, placed = load_core(goldens / family), load_core(goldens / family, device_map=device_map)
    tokens = torch.arange(12)
    assert torch.equal(plain(tokens), placed(tokens)) and set(placed.placement.values()) == {torch.device("cpu")}
    cache = placed.make_cache(16)
    torch.testing.assert_close(placed(tokens, cache=cache), plain(tokens), atol=1e-5, rtol=1e-5)


def hooks_everywhere(core) -> None:
    """The carrying that several devices need, on one: each block takes its inputs through accelerate's hook."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name in block_names(core):
        add_hook_to_module(core.get_submodule(name), AlignDevicesHook(execution_device=torch.device("cpu")))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_that_are_carried_to_compute_what_the_others_do(family, goldens):
    plain, placed, tokens = load_core(goldens / family), load_core(goldens / family), torch.arange(24)
    hooks_everywhere(placed)
    assert torch.equal(plain(tokens), placed(tokens))
    caches = plain.make_cache(32), placed.make_cache(32)
    for core, cache in zip((plain, placed), caches):
        core(tokens, cache=cache)
    assert torch.equal(plain(tokens[:3], cache=caches[0]), placed(tokens[:3], cache=caches[1]))
    for name, kept in caches[0].materialised().items():
        assert torch.equal(kept, caches[1].materialised()[name])


def test_decoders_and_hooks_run_on_blocks_that_are_carried_to(goldens):
    plain, placed = loopscope.load(goldens / "huginn"), loopscope.load(goldens / "huginn")
    hooks_everywhere(placed.core)
    prompt = list(range(5, 13))
    for decoder in (Wavefront(draft_depth=1), DraftThenVerify(draft_depth=1, block=3)):
        assert decoder.generate(placed, prompt, max_new_tokens=8).tokens == decoder.generate(plain, prompt, max_new_tokens=8).tokens
    seen = [run.stack("v") for run in (m.run_with_cache(torch.tensor([prompt]))[1] for m in (plain, placed))]
    assert torch.equal(*seen)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_on_a_gpu_and_on_the_cpu_give_the_cpus_numbers(family, goldens):
    """One GPU is enough for two devices: every other block runs on the CPU."""
    plain = load_core(goldens / family, dtype=torch.float64)
    split = {name: ("cuda:0", "cpu")[i % 2] for i, name in enumerate(block_names(plain))}
    placed = load_core(goldens / family, "cuda:0", torch.float64, device_map=split)
    tokens = torch.arange(24)
    torch.testing.assert_close(placed(tokens).cpu(), plain(tokens), atol=1e-9, rtol=1e-9)
    a, b = plain.make_cache(64), placed.make_cache(64)
    torch.testing.assert_close(placed(tokens, cache=b).cpu(), plain(tokens, cache=a), atol=1e-9, rtol=1e-9)
    if not plain.why_not_lossless:
        one, other = (Wavefront(draft_depth=1).generate(core, list(range(9)), max_new_tokens=12).tokens for core in (plain, placed))
        assert one == other
    auto = load_core(goldens / family, dtype=torch.float64, device_map="auto")
    assert {d.type for d in auto.placement.values()} == {"cuda"}
    torch.testing.assert_close(auto(tokens).cpu(), plain(tokens), atol=1e-9, rtol=1e-9)
