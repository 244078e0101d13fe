"""Dory matches its goldens and transformers' own class on fresh random configs, in both K/V modes."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.verify import verify_generation
from loopscope.errors import CheckpointError, SettingError
from loopscope.models.dory import RELEASED, DoryCore
from loopscope.models.loading import load_core
from loopscope.models.registry import config_from_dict
from loopscope.rows import ALIGNED, At, Chain, Draft, Forest, ReadPolicy, Wave
from loopscope.tap import RecordingTap

ATOL = 3e-4
DECODERS = [Wavefront(1), Wavefront(2), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"), DASWave(4, 1)]


def in_mode(core: DoryCore, mode: str, **changes) -> DoryCore:
    """The same weights in another K/V mode."""
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, kv_slots={"per_loop": None, "last_loop": 1}[mode], **changes)
    return other


@pytest.fixture(scope="module")
def golden(goldens):
    return load_core(goldens / "dory"), load_file(goldens / "dory" / "io.safetensors")


# ---- the goldens ------------------------------------------------------------------------------------------------


@pytest.mark.support("golden logits", family="dory")
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_logits_match_at_every_depth_in_one_pass_and_through_the_cache_in_chunks(golden, depth):
    core, io = golden
    torch.testing.assert_close(core(io["input_ids"], depth=depth), io[f"logits_T{depth}"], atol=ATOL, rtol=0)
    cache = core.make_cache(24, depth, batch=2)
    parts = [core(chunk, depth=depth, cache=cache) for chunk in io["input_ids"].split([9, 1, 14], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), io[f"logits_T{depth}"], atol=ATOL, rtol=0)


@pytest.mark.support("golden tokens", family="dory")
@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
@pytest.mark.parametrize("depth", [2, 4])
def test_greedy_tokens_match_exactly_in_both_modes(golden, depth, mode):
    core, io = golden
    core = in_mode(core, mode, eos=())
    for row in range(2):
        got = Autoregressive().generate(core, io["input_ids"][row], max_new_tokens=16, depth=depth)
        assert got.tokens == io[f"greedy_T{depth}_{mode}"][row].tolist()
    assert core.make_cache(24, depth).core[0][0].shape[1] == (depth if mode == "per_loop" else 1)


def test_the_modes_differ_so_that_matching_both_means_something(golden):
    io = golden[1]
    assert any(not torch.equal(io[f"greedy_T{t}_per_loop"], io[f"greedy_T{t}_last_loop"]) for t in (2, 4))


def test_the_mode_is_read_from_the_config(goldens, tmp_path):
    raw = json.loads((goldens / "dory" / "config.json").read_text())["to_dict"]
    assert config_from_dict(raw).kv_slots is None
    assert config_from_dict(raw | {"recurrent_kv_cache_mode": "last_loop"}).kv_slots == 1
    with pytest.raises(CheckpointError, match="recurrent_kv_cache_mode 'newest'.*per_loop, last_loop"):
        config_from_dict(raw | {"recurrent_kv_cache_mode": "newest"})


# ---- transformers' own class ------------------------------------------------------------------------------------


def draw_reference(seed: int):
    """(a random DoryForCausalLM in eager float32, its serialised config)."""
    from transformers import DoryConfig, DoryForCausalLM

    draw = random.Random(seed)
    sections = [draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 2)]
    kv = draw.choice([1, 2, 3])
    types = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(sum(sections))]
    config = DoryConfig(
        vocab_size=draw.randint(40, 90), hidden_size=draw.choice([24, 40]), intermediate_size=draw.choice([20, 36]),
        num_hidden_layers=sum(sections), num_attention_heads=kv * draw.choice([1, 2, 3]), num_key_value_heads=kv,
        head_dim=draw.choice([4, 8, 10]), max_position_embeddings=64, initializer_range=draw.choice([0.0177, 0.05]),
        sliding_window=draw.randint(2, 9),  # with 1, transformers' cached layers keep everything and differ from its own full pass
        layer_types=types, ngpt_alpha_init=draw.uniform(0.05, 0.4), n_input_layers=sections[0], n_recurrent_layers=sections[1],
        n_output_layers=sections[2], n_recurrent_loops=draw.randint(1, 4), tie_word_embeddings=draw.random() < 0.3,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10 ** draw.uniform(2, 7)} for kind in set(types)},
        bos_token_id=1, eos_token_id=None, pad_token_id=None, attn_implementation="eager")
    torch.manual_seed(seed)
    model = DoryForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.ndim > 1
                    else torch.randn_like(p).mul(0.2).add(1) * (1 if ".suv_" in name else config.initializer_range))
    return model, config.to_dict()


def write(folder, state: dict, raw: dict):
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def state_of(model) -> dict:
    return {name: t.detach() for name, t in model.named_parameters()}  # a tied head is listed once


@pytest.mark.support("transformers", family="dory")
@pytest.mark.parametrize("seed", range(10))
def test_any_config_gives_the_logits_and_tokens_of_the_transformers_class_in_both_modes(seed, tmp_path):
    reference, raw = draw_reference(seed)
    core = load_core(write(tmp_path, state_of(reference), raw))
    ids = torch.randint(0, raw["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(seed))
    own = core.config.depth
    with torch.inference_mode():
        for depth in (own, own + 2):
            reference.config.n_recurrent_loops = depth
            torch.testing.assert_close(core(ids, depth=depth), reference(ids, use_cache=False).logits, atol=ATOL, rtol=0)
            for mode in ("per_loop", "last_loop"):
                reference.config.recurrent_kv_cache_mode = mode
                ours, theirs = in_mode(core, mode), None
                cache = ours.make_cache(13, depth, batch=2)
                for chunk in ids.split([6, 1, 4, 1, 1], dim=1):  # in last_loop mode the chunks are part of the definition
                    out = reference(chunk, cache=theirs, use_cache=True)
                    theirs = out.cache
                    torch.testing.assert_close(ours(chunk, depth=depth, cache=cache), out.logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_a_padded_batch_gives_the_logits_of_the_transformers_class(seed, tmp_path):
    reference, raw = draw_reference(seed)
    core = load_core(write(tmp_path, state_of(reference), raw))
    ids = torch.randint(0, raw["vocab_size"], (3, 13), generator=torch.Generator().manual_seed(seed))
    pads = torch.tensor([0, 5, 1 + seed])
    mask = (torch.arange(13) >= pads[:, None]).long()
    with torch.inference_mode():
        theirs = reference(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False).logits
        cache = core.make_cache(13, batch=3)
        parts = [core(ids[:, :9], cache=cache, attention_mask=mask[:, :9])] + [core(chunk, cache=cache) for chunk in ids[:, 9:].split(1, 1)]
        for ours in (core(ids, attention_mask=mask), torch.cat(parts, 1)):
            torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=ATOL, rtol=0)


# ---- names ------------------------------------------------------------------------------------------------------


def released_names(state: dict) -> dict:
    """transformers' names -> those of the released files, spelled out independently of loopscope.models.dory."""
    out = {}
    for name, tensor in state.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            first, second = 2 * int(layer), 2 * int(layer) + 1
            rest = {"lambda_1": f"{first}.attn_alpha", "lambda_2": f"{second}.mlp_alpha"}.get(rest, rest)
            rest = rest.replace("self_attn.gate_proj", "self_attn.g_proj").replace("self_attn.", f"{first}.mixer.")
            rest = rest.replace("mlp.", f"{second}.mixer.")
            name = f"backbone.layers.{rest}"
        out[name.replace("model.embed_tokens", "backbone.embeddings")] = tensor
    return out


def test_released_names_load_here_as_they_do_in_transformers(tmp_path):
    from transformers import DoryForCausalLM

    reference, raw = draw_reference(3)
    raw["architectures"] = ["DoryForCausalLM"]
    write(tmp_path, released_names(state_of(reference)), raw)
    core = load_core(tmp_path)
    assert core.config.variant == RELEASED
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        theirs = DoryForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")(ids, use_cache=False).logits
        torch.testing.assert_close(theirs, reference(ids, use_cache=False).logits, atol=ATOL, rtol=0)
        torch.testing.assert_close(core(ids), theirs, atol=ATOL, rtol=0)
    core.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(released_names(state_of(reference)))


@pytest.mark.support("save", family="dory")
def test_what_was_loaded_can_be_written_and_loaded_again_bit_for_bit(golden, tmp_path):
    core, io = golden
    core.save_pretrained(tmp_path)
    again = load_core(tmp_path)
    assert again.config == core.config
    assert torch.equal(again(io["input_ids"]), core(io["input_ids"]))


def test_a_config_that_contradicts_itself_is_refused(goldens):
    raw = json.loads((goldens / "dory" / "config.json").read_text())["to_dict"]
    for change, match in (({"n_input_layers": 6}, "should equal num_hidden_layers"), ({"layer_types": ["mamba"] * 12}, "layer_types"),
                          ({"layer_types": ["mlp", "full_attention"] * 6}, "every layer is an attention and an mlp"),
                          ({"rope_parameters": None}, "rope_parameters"), ({"attention_bias": True}, "attention_bias"),
                          ({"initializer_range": 0}, "initializer_range"), ({"sliding_window": None}, "sliding_window"),
                          ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e7}}}, "sliding_attention")):
        with pytest.raises(CheckpointError, match=match):
            config_from_dict(raw | change)


# ---- windows, in every kind of rows -----------------------------------------------------------------------------


def test_a_window_hides_what_lies_outside_it_whatever_the_rows(random_core):
    """The pattern of a sliding layer is zero beyond the window and nowhere inside, for chains, waves, At, Draft and Forest."""
    core = random_core("dory", window=3, depth=2)
    tokens = torch.arange(10)[None]
    cache = core.make_cache(14, 2)
    x = core.embed(tokens, Chain(0, 10), cache)
    state = x
    for r in (1, 2):
        state = core.recur(state, x, Chain(0, 10, r), cache)
    cache.commit(10)
    n = 3
    tri = torch.ones(n, n, dtype=torch.bool).tril()
    rows = [(Chain(10, n, 1), ALIGNED), (Chain(10, n, 2), ReadPolicy(2, 2)), (Wave(10, (2, 1)), ALIGNED), (Wave(10, (2, 2, 1)), ALIGNED),
            (At((7, 9, 10), 2), ALIGNED), (Draft(10, 10, 1), ReadPolicy(2, 2)), (Draft(10, 11, 1, 2), ReadPolicy(2, 2)),
            (Forest(torch.tensor([8, 9, 10]), torch.tensor([8, 8, 8]), tri, 1), ALIGNED),
            (Forest(torch.tensor([8, 9, 10]), torch.tensor([8, 8, 8]), tri, (1, 2, 1)), ALIGNED)]
    for kind, policy in rows:
        tap = RecordingTap(lambda name: name.endswith("hook_pattern"))
        x = state = torch.randn(1, kind.count, core.config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        core.recur(state, x, kind, cache.clone(), policy, tap)
        assert core.config.sliding[2:4] == (True, False)
        keys = list(range(8)) + kind.positions if isinstance(kind, Forest) else list(range(kind.positions[-1] + 1))
        depths = kind.depths
        for layer, window in ((0, 3), (1, 1000)):
            for i, (position, depth) in enumerate(zip(kind.positions, depths)):
                pattern = tap[f"depth.{depth}.blocks.{layer}.attn.hook_pattern"]
                row = pattern[0, :, [j for j, d in enumerate(depths) if d == depth].index(i)]
                inside = torch.tensor([position - window < key <= position for key in keys])
                assert torch.equal(row > 0, inside.expand_as(row)), (kind, layer, i)


# ---- decoding and hooks -----------------------------------------------------------------------------------------


@pytest.mark.support("decoders", family="dory")
@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_decoders_are_lossless_with_a_slot_per_loop(random_core, decoder):
    accepted, proposed = 0, 0
    for seed, gain in enumerate((0.1, 0.4, 1.0)):
        core = random_core("dory", gain=gain, seed=seed, vocab_size=64, window=3 + seed)
        verdict = verify_generation(decoder, core, [5, 6, 7, 8, 9], 16)
        assert verdict.ok, str(verdict)
        accepted, proposed = accepted + verdict.generation.accepted, proposed + verdict.generation.proposed
    assert 0 < accepted < proposed


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_a_shared_slot_is_refused_by_all_but_autoregression(random_core, decoder):
    core = random_core("dory", kv_slots=1)
    with pytest.raises(SettingError, match="approximate on this dory model.*shared K/V slot.*Autoregressive"):
        decoder.generate(core, [1, 2, 3], 4)
    assert len(Autoregressive().generate(core, [1, 2, 3], 4).tokens) == 4


def test_a_shared_slot_has_no_other_depth_to_read(random_core):
    core = random_core("dory", kv_slots=1)
    x = torch.zeros(1, 2, core.config.d_model, dtype=torch.float64)
    with pytest.raises(SettingError, match="4 depths of this cache share 1 K/V slot"):
        core.recur(x, x, Chain(0, 2, 1), core.make_cache(4), ReadPolicy(4, 4))
    core.recur(x, x, Chain(0, 2, 1), core.make_cache(4), ReadPolicy())


def test_what_the_hooks_of_a_block_show_are_steps_from_the_sphere(random_core):
    from loopscope.models.hooked import LoopedModel

    _, run = LoopedModel(random_core("dory", depth=2)).run_with_cache(torch.arange(8)[None])
    step = run["resid_mid", 1, 0] - run["attn_out", 1, 0]
    torch.testing.assert_close(step.norm(dim=-1), torch.ones(1, 8, dtype=torch.float64), atol=1e-5, rtol=0)
