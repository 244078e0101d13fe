"""HRM-Text matches its goldens and transformers' own class on fresh random configs, prefixes read in both directions included."""

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
from loopscope.hook_names import cycle_of, depth_of, hook_names, layer_of
from loopscope.models.hrm_text import PACKED
from loopscope.models.loading import load_core
from loopscope.models.registry import config_from_dict
from loopscope.rows import Chain

ATOL = 3e-4
DECODERS = [Wavefront(1), Wavefront(2), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"), DASWave(4, 1)]


@pytest.fixture(scope="module")
def golden(goldens):
    core = load_core(goldens / "hrm_text")
    core.config = dataclasses.replace(core.config, eos=())  # the stored runs go on behind an end-of-sequence token
    return core, load_file(goldens / "hrm_text" / "io.safetensors")


# ---- the goldens ------------------------------------------------------------------------------------------------


@pytest.mark.support("golden logits", family="hrm_text")
@pytest.mark.parametrize("low", [1, 3])
@pytest.mark.parametrize("high", [1, 2])
def test_logits_match_for_all_numbers_of_cycles_in_one_pass_and_in_chunks(goldens, tmp_path, high, low):
    raw = json.loads((goldens / "hrm_text" / "config.json").read_text())["to_dict"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"L_cycles": low}))
    (tmp_path / "model.safetensors").symlink_to((goldens / "hrm_text" / "weights.safetensors").resolve())
    core, io = load_core(tmp_path), load_file(goldens / "hrm_text" / "io.safetensors")
    torch.testing.assert_close(core(io["input_ids"], depth=high), io[f"logits_H{high}_L{low}"], atol=ATOL, rtol=0)
    cache = core.make_cache(24, high, batch=2)
    parts = [core(chunk, depth=high, cache=cache) for chunk in io["input_ids"].split([9, 1, 14], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), io[f"logits_H{high}_L{low}"], atol=ATOL, rtol=0)
    assert len(cache.core) == 2 * (low + 1)


def test_a_prefix_read_in_both_directions_matches(golden):
    core, io = golden
    prefix = int(io["token_type_ids"][0].sum())
    assert prefix == 10
    torch.testing.assert_close(core(io["input_ids"], prefix=prefix), io["logits_H2_L3_prefix10"], atol=ATOL, rtol=0)
    cache = core.make_cache(24, batch=2)
    parts = [core(chunk, cache=cache, prefix=prefix) for chunk in io["input_ids"].split([12, 1, 11], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), io["logits_H2_L3_prefix10"], atol=ATOL, rtol=0)


@pytest.mark.support("golden tokens", family="hrm_text")
@pytest.mark.parametrize("name,prefix", [("greedy_H2_L3", 0), ("greedy_H2_L3_prefix10", 10)])
def test_greedy_tokens_match_cached_and_recomputed(golden, name, prefix):
    core, io = golden
    for row in range(2):
        want = io[name][row].tolist()
        assert Autoregressive().generate(core, io["input_ids"][row], max_new_tokens=16, prefix=prefix).tokens == want
        recomputed = core(torch.cat((io["input_ids"][row], io[name][row, :-1])), prefix=prefix)
        assert recomputed[0, 23:].argmax(-1).tolist() == want


# ---- prefixes ---------------------------------------------------------------------------------------------------


def test_splitting_a_prefix_raises(random_core):
    core = random_core("hrm_text")
    tokens, cache = torch.arange(12)[None], core.make_cache(12)
    with pytest.raises(SettingError, match="prefix of 8 positions.*one chunk.*positions 0 to 4"):
        core(tokens[:, :5], cache=cache, prefix=8)
    core(tokens[:, :5], cache=cache)
    with pytest.raises(SettingError, match="one chunk.*positions 5 to 11"):
        core(tokens[:, 5:], cache=cache, prefix=8)
    with pytest.raises(SettingError, match="one chunk"):
        Chain(3, 9, prefix=4)
    with pytest.raises(SettingError, match="prefix=4 is longer than the prompt of 3"):
        Autoregressive().generate(core, [1, 2, 3], 4, prefix=4)


def test_only_models_that_have_prefixes_take_one(random_core):
    for core in (random_core("ouro"), random_core("dory")):
        with pytest.raises(SettingError, match=f"{core.family} reads its whole prompt causally"):
            core(torch.arange(4), prefix=2)
    with pytest.raises(SettingError, match="whole number"):
        random_core("hrm_text")(torch.arange(4), prefix=-1)


def test_a_prefix_position_sees_the_whole_prefix_and_nothing_behind_it(random_core):
    core = random_core("hrm_text")
    tokens = torch.arange(12)[None]
    changed_inside, changed_behind = tokens.clone(), tokens.clone()
    changed_inside[0, 5], changed_behind[0, 6] = 99, 99
    with torch.inference_mode():
        base, inside, behind = (core(t, prefix=6) for t in (tokens, changed_inside, changed_behind))
        assert (base[0, 0] - inside[0, 0]).abs().max() > 1e-3
        torch.testing.assert_close(base[:, :6], behind[:, :6], atol=1e-12, rtol=0)
        torch.testing.assert_close(core(tokens, prefix=1), core(tokens), atol=1e-12, rtol=0)


# ---- transformers' own class ------------------------------------------------------------------------------------


def draw_reference(seed: int):
    """(a random HrmTextForCausalLM in eager float32, its serialised config)."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    draw = random.Random(seed)
    heads = draw.choice([1, 2, 4])
    config = HrmTextConfig(
        vocab_size=draw.randint(40, 90), hidden_size=heads * draw.choice([8, 12]), intermediate_size=draw.choice([20, 36]),
        num_hidden_layers=draw.randint(1, 3), num_attention_heads=heads, head_dim=draw.choice([4, 8, 10]), max_position_embeddings=64,
        initializer_range=draw.choice([0.02, 0.1]), rms_norm_eps=10 ** draw.uniform(-7, -3), H_cycles=draw.randint(1, 3),
        L_cycles=draw.randint(1, 4), embedding_scale=draw.choice([None, 1.0, 3.5]), tie_word_embeddings=draw.random() < 0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10 ** draw.uniform(2, 6)}, bos_token_id=1, eos_token_id=None,
        pad_token_id=None, attn_implementation="eager")
    torch.manual_seed(seed)
    model = HrmTextForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 * (1.0 if "embed" in name else 0.6))
    return model, config.to_dict()


def write(folder, state: dict, raw: dict):
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def state_of(model) -> dict:
    return {name: t.detach() for name, t in model.named_parameters()}  # a tied head is listed once


@pytest.mark.support("transformers", family="hrm_text")
@pytest.mark.parametrize("seed", range(10))
def test_any_config_gives_the_logits_of_the_transformers_class_with_and_without_a_prefix(seed, tmp_path):
    reference, raw = draw_reference(seed)
    core = load_core(write(tmp_path, state_of(reference), raw))
    ids = torch.randint(0, raw["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        for depth in (core.config.depth, core.config.depth + 1):
            reference.config.H_cycles = depth
            for prefix in (0, 4):
                types = (torch.arange(13) < prefix).long().expand(2, -1)
                theirs = reference(ids, token_type_ids=types, use_cache=False).logits
                torch.testing.assert_close(core(ids, depth=depth, prefix=prefix), theirs, atol=ATOL, rtol=0)
                cache = core.make_cache(13, depth, batch=2)
                parts = [core(chunk, depth=depth, cache=cache, prefix=prefix) for chunk in ids.split([6, 1, 4, 2], dim=1)]
                torch.testing.assert_close(torch.cat(parts, 1), theirs, atol=ATOL, rtol=0)


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


def released_names(state: dict) -> dict:
    """transformers' names -> those of the released files, which pack gate, query, key and value, and gate and up."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("self_attn.gate_proj.weight"):
            at = name.removesuffix("self_attn.gate_proj.weight")
            out[f"{at}attn.gqkv_proj.weight"] = torch.cat([state[f"{at}self_attn.{x}_proj.weight"] for x in ("gate", "q", "k", "v")])
            out[f"{at}mlp.gate_up_proj.weight"] = torch.cat([state[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        elif not name.endswith(tuple(f"{x}_proj.weight" for x in ("gate", "q", "k", "v", "up"))):
            out[name.replace("self_attn.o_proj", "attn.o_proj")] = tensor
    return out


def test_packed_released_tensors_load_here_as_they_do_in_transformers(tmp_path):
    from transformers import HrmTextForCausalLM

    reference, raw = draw_reference(1)
    raw["architectures"] = ["HrmTextForCausalLM"]
    core = load_core(write(tmp_path, released_names(state_of(reference)), raw))
    assert core.config.variant == PACKED
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        theirs = HrmTextForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")(ids, use_cache=False).logits
        torch.testing.assert_close(theirs, reference(ids, use_cache=False).logits, atol=ATOL, rtol=0)
        torch.testing.assert_close(core(ids), theirs, atol=ATOL, rtol=0)
    core.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {n: t.shape for n, t in again.items()} == {n: t.shape for n, t in released_names(state_of(reference)).items()}


@pytest.mark.support("save", family="hrm_text")
def test_what_was_loaded_can_be_written_and_loaded_again_bit_for_bit(goldens, golden, tmp_path):
    core, io = golden
    core.save_pretrained(tmp_path)
    stored, written = load_file(goldens / "hrm_text" / "weights.safetensors"), load_file(tmp_path / "model.safetensors")
    assert stored.keys() == written.keys() and all(torch.equal(stored[n], written[n]) for n in stored)
    assert torch.equal(load_core(tmp_path)(io["input_ids"]), core(io["input_ids"]))


def test_what_the_config_says_is_read_or_refused(goldens):
    raw = json.loads((goldens / "hrm_text" / "config.json").read_text())["to_dict"]
    config = config_from_dict(raw)
    assert (config.n_core, config.inner_cycles, config.depth, config.prefix_lm) == (2, 3, 2, True)  # num_hidden_layers is inflated
    assert config_from_dict(raw | {"num_layers_per_stack": None, "num_hidden_layers": 5}).n_core == 5
    assert config_from_dict(raw | {"embedding_scale": None, "initializer_range": 0.04}).embed_scale == 25.0
    for change, match in (({"rope_parameters": None}, "rope_theta"), ({"attention_bias": True}, "attention_bias"),
                          ({"num_key_value_heads": 2}, "num_key_value_heads"), ({"L_cycles": 0}, "L_cycles")):
        with pytest.raises(CheckpointError, match=match):
            config_from_dict(raw | change)


# ---- decoding and hooks -----------------------------------------------------------------------------------------


@pytest.mark.support("decoders", family="hrm_text")
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_decoders_are_lossless_behind_causal_prompts_and_behind_prefixes(random_core, decoder, prefix):
    accepted, proposed = 0, 0
    for seed, gain in enumerate((0.1, 0.4, 1.0)):
        core = random_core("hrm_text", gain=gain, seed=seed, vocab_size=64)
        verdict = verify_generation(decoder, core, [5, 6, 7, 8, 9], 16, prefix=prefix)
        assert verdict.ok, str(verdict)
        accepted, proposed = accepted + verdict.generation.accepted, proposed + verdict.generation.proposed
    assert 0 < accepted < proposed


def test_every_hook_fires_once_inner_cycles_before_the_slow_stack(random_core):
    from loopscope.models.hooked import LoopedModel

    model = LoopedModel(random_core("hrm_text", depth=2, inner_cycles=2))
    tokens = torch.arange(8)[None]
    fired = []
    model.run_with_hooks(tokens, depth=3, fwd_hooks=[(lambda name: True, lambda t, hook: fired.append(hook.name))])
    assert fired == hook_names(model.config, 3)
    assert fired[1].startswith("depth.1.l_cycle.1.blocks.0.") and len(fired) == 2 + 3 * (3 * 2 * 12 + 1)
    name = "depth.2.l_cycle.1.blocks.1.attn.hook_v"
    assert (depth_of(name), cycle_of(name), layer_of(name)) == (2, 1, 1)
    assert (model.hook_dict[name].depth(), model.hook_dict[name].layer()) == (2, 1)
    assert cycle_of("depth.2.blocks.1.attn.hook_v") == cycle_of("depth.2.hook_state") == 0


def test_an_edit_in_one_inner_cycle_changes_only_what_follows_it(random_core):
    from loopscope.models.hooked import LoopedModel

    model = LoopedModel(random_core("hrm_text", depth=2, inner_cycles=2))
    tokens, name = torch.arange(8)[None], "depth.1.l_cycle.2.blocks.0.attn.hook_v"
    names = hook_names(model.config, 2)
    _, plain = model.run_with_cache(tokens)
    with model.hooks([(name, lambda v, hook: 0 * v)]):
        _, edited = model.run_with_cache(tokens)
    pattern = names.index(name) + 3  # hook_v, then the rotated q and k and the pattern, which v does not reach
    for i, other in enumerate(names):
        if i != names.index(name):
            assert torch.equal(plain[other], edited[other]) == (i < names.index(name) or i <= pattern), other


def test_an_unrolled_run_counts_inner_cycles_as_blocks_in_the_order_they_run(random_core):
    from loopscope.models.hooked import LoopedModel

    model = LoopedModel(random_core("hrm_text", depth=2, inner_cycles=2))
    _, run = model.run_with_cache(torch.arange(8)[None])
    flat = run.unrolled()
    blocks = [f"depth.{r}.{cycle}blocks.{layer}." for r in (1, 2) for cycle in ("l_cycle.1.", "l_cycle.2.", "") for layer in (0, 1)]
    assert flat.blocks == len(blocks) == 12
    for i, block in enumerate(blocks):
        assert torch.equal(flat[f"blocks.{i}.hook_resid_pre"], run[f"{block}hook_resid_pre"])
    assert torch.equal(flat["blocks.5.hook_state"], run["state", 1])
    assert run["state", 2].shape[-1] == model.config.d_model  # z_H alone


def test_the_state_shown_is_what_the_head_reads_at_the_last_depth(random_core):
    from loopscope.tap import RecordingTap

    core, tap = random_core("hrm_text", depth=3), RecordingTap()
    logits = core(torch.arange(6), tap=tap)
    torch.testing.assert_close(core.unembed(tap["depth.3.hook_state"]), logits)
    assert torch.equal(tap["hook_final"], tap["depth.3.hook_state"])


@pytest.mark.parametrize("family", ["dory", "hrm_text"])
def test_values_are_a_map_of_what_the_block_says_its_attention_reads(random_core, family):
    """The random-map null of the probes builds on it."""
    from loopscope.tap import RecordingTap

    core, tap = random_core(family), RecordingTap(lambda name: name.startswith("depth.2.blocks.1."))
    core(torch.arange(6), depth=2, tap=tap)
    reads = core.blocks[1].attention_input(tap["depth.2.blocks.1.hook_resid_pre"])
    weight = core.blocks[1].attn.qkv.weight[-core.config.n_kv_heads * core.config.d_head :]
    torch.testing.assert_close((reads @ weight.T).unflatten(-1, (-1, core.config.d_head)), tap["depth.2.blocks.1.attn.hook_v"])
