"""Retrofits, Nanbeige and Parcae match outputs of their official code on the same weights (tests/goldens/*/README.md)."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from decoders import Autoregressive, Wavefront
from loopscope.errors import CheckpointError, ContextError, SettingError
from loopscope.models.config import LoopedConfig
from loopscope.models.loading import load_core
from loopscope.models.registry import config_from_dict, family_of
from loopscope.hook_names import hook_names
from loopscope.rows import Chain
from loopscope.tap import FunctionTap, RecordingTap

ATOL = 3e-4
FAMILIES = ("retrofit_llama", "retrofit_olmo", "nanbeige", "parcae")


@pytest.fixture(scope="module")
def cases(goldens):
    return {name: (load_core(goldens / name), load_file(goldens / name / "io.safetensors")) for name in FAMILIES}


def runs(io):
    """(suffix of the stored names, T, start state)."""
    if "init_states" not in io:
        return [(f"_T{t}", t, None) for t in range(1, 5)]
    return [(f"_{mode}_T{t}", t, "zero" if mode == "zero" else io["init_states"]) for mode in ("zero", "state") for t in range(1, 5)]


@pytest.mark.support("golden logits")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_at_every_depth_in_one_pass_and_through_the_cache_in_chunks(cases, family):
    core, io = cases[family]
    for name, depth, start in runs(io):
        logits = core(io["input_ids"], depth=depth, start_state=start)
        torch.testing.assert_close(logits, io[f"logits{name}"], atol=ATOL, rtol=0)
        cache = core.make_cache(24, depth, batch=2)
        parts = [core(chunk, depth=depth, start_state=start, cache=cache) for chunk in io["input_ids"].split([9, 1, 14], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), io[f"logits{name}"], atol=ATOL, rtol=0)


@pytest.mark.support("golden tokens")
@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1)], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_exactly(cases, family, decoder):
    core, io = cases[family]
    seen = 0
    for name, depth, start in runs(io):
        if f"greedy{name}" not in io:
            continue
        for row in range(2):
            own = start if start is None or isinstance(start, str) else start[row : row + 1]
            got = decoder.generate(core, io["input_ids"][row], max_new_tokens=16, depth=depth, start_state=own)
            want = io[f"greedy{name}"][row].tolist()
            assert got.tokens == want[: len(got.tokens)]  # the official runs go on behind an end-of-sequence token
            assert len(got.tokens) == 16 or got.tokens[-1] in core.config.eos
            seen += len(got.tokens)
    assert seen > 32


@pytest.mark.support("golden states")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_matches_after_every_recurrence(cases, family):
    core, io = cases[family]
    for mode in ("zero", "state") if "init_states" in io else ("",):
        tap = RecordingTap(lambda name: name.endswith("hook_state"))
        core(io["input_ids"], depth=4, start_state={"": None, "zero": "zero", "state": io.get("init_states")}[mode], tap=tap)
        stored = io[f"core_states_{mode}" if mode else "hidden_steps"]
        for r in range(1, 5):
            torch.testing.assert_close(tap[f"depth.{r}.hook_state"], stored[r - 1], atol=ATOL, rtol=0)


@pytest.mark.support("save")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_loaded_can_be_written_and_loaded_again_bit_for_bit(cases, goldens, family, tmp_path):
    core, io = cases[family]
    core.save_pretrained(tmp_path / "copy")
    again = load_core(tmp_path / "copy")
    assert again.config == core.config
    for (name, a), (other, b) in zip(core.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    official, written = load_file(goldens / family / "weights.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert set(official) - set(written) <= set(core.optional_names(core.config))
    assert all(torch.equal(official[name], tensor) for name, tensor in written.items())


# ---- one model_type, three wirings --------------------------------------------------------------------------


def test_retrofits_and_huginn_are_told_apart_by_names_and_without_names_by_config(goldens):
    raw = {name: json.loads((goldens / name / "config.json").read_text()) for name in ("huginn", "retrofit_llama", "retrofit_olmo")}
    names = {name: load_file(goldens / name / "weights.safetensors").keys() for name in raw}
    for given in (names, dict.fromkeys(raw)):
        assert [family_of(raw[name], given[name]) for name in raw] == ["huginn", "raven", "raven"]
    # The configs of the two retrofits could be the same; the tensors decide.
    assert config_from_dict(raw["retrofit_llama"], names["retrofit_olmo"]).variant == "olmo"
    assert config_from_dict(raw["retrofit_olmo"], names["retrofit_llama"]).variant == "llama"


def test_a_retrofit_reads_theta_start_state_and_scales_from_its_config(goldens):
    raw = json.loads((goldens / "retrofit_llama" / "config.json").read_text())
    config = config_from_dict(raw)
    assert config.state_std == 0.09128709291752768 and config.rope_scaling["factor"] == 32.0
    # the converter for TinyLlama leaves 500000 in rope_base; the official code takes rope_theta
    other = config_from_dict(raw | {"rope_theta": 10000.0, "rope_scaling": None, "init_values": {"std": 0.0087, "embed_scale": 2.0}})
    assert (other.rope_theta, other.rope_scaling, other.embed_scale) == (10000.0, None, 2.0)
    assert other.state_std == pytest.approx(0.0174)
    packed = raw | {"rope_parameters": raw["rope_scaling"] | {"rope_theta": 250000.0}, "rope_scaling": None}
    assert config_from_dict(packed).rope_theta == 250000.0 and config_from_dict(packed).rope_scaling == config.rope_scaling


@pytest.mark.parametrize("changes,depth", [({}, 2), ({"num_loops": 5}, 5), ({"loop_loss_weights": [0.1, 0.2]}, 3)])
def test_nanbeige_counts_its_loops_as_the_official_code_does(goldens, changes, depth):
    raw = json.loads((goldens / "nanbeige" / "config.json").read_text())
    assert config_from_dict(raw | changes).depth == depth


def test_nanbeige_without_the_norm_between_loops_norms_once_at_the_end(goldens, tmp_path):
    """With one loop both settings are the same maths; with two they are not."""
    shutil.copytree(goldens / "nanbeige", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skip_loop_final_norm": True}))
    every, once, tokens = load_core(goldens / "nanbeige"), load_core(tmp_path / "other"), torch.arange(12)
    torch.testing.assert_close(once(tokens, depth=1), every(tokens, depth=1))
    assert not torch.allclose(once(tokens, depth=2), every(tokens, depth=2), atol=1e-2)
    x = once.embed(tokens[None])
    state = every.recur(once.recur(x, x), x)  # only the last loop closes with a norm
    torch.testing.assert_close(once(tokens, depth=2), torch.nn.functional.linear(state, every.head.weight))


# ---- Parcae -------------------------------------------------------------------------------------------------


def test_parcae_is_read_from_its_pickle_only_with_a_warning_and_never_runs_what_is_in_it(goldens, cases, tmp_path):
    core, io = cases["parcae"]
    shutil.copy(goldens / "parcae" / "config.json", tmp_path)
    torch.save(load_file(goldens / "parcae" / "weights.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.warns(UserWarning, match=r"pickle.*weights_only=True"):
        pickled = load_core(tmp_path)
    assert torch.equal(pickled(io["input_ids"]), core(io["input_ids"]))

    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"transformer.wte.weight": Touch()}, tmp_path / "pytorch_model.bin")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="more than tensors"):
        load_core(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_parcae_states_carry_the_lookups_of_their_present_token(cases):
    core, io = cases["parcae"]
    d = core.config.d_model
    a, b = core.embed(io["input_ids"][:, :5]), core.embed(io["input_ids"][:, 5:10])
    carried = core.recur(core.start(a), b)  # a state that was carried to another token
    assert torch.equal(carried[..., d:], core.start(b)[..., d:])
    assert not torch.equal(core.start(a)[..., d:], core.start(b)[..., d:])


def test_the_default_start_states_are_keyed_and_of_the_configs_width(cases):
    for name, std in (("retrofit_llama", 0.09128709291752768), ("parcae", (2 / (5 * 48)) ** 0.5)):
        core, io = cases[name]
        config: LoopedConfig = core.config
        start = core.start(core.embed(io["input_ids"]), seed=1)[..., : config.d_model]
        assert start.std().item() == pytest.approx(std * 0.9866, rel=0.05)  # a normal cut at three standard deviations
        assert not torch.equal(start, core.start(core.embed(io["input_ids"]), seed=2)[..., : config.d_model])


# ---- hooks and invariances, on random models ----------------------------------------------------------------

RANDOM = ("raven", "raven_olmo", "nanbeige", "parcae")


@pytest.mark.parametrize("family", RANDOM)
def test_every_hook_at_every_depth_fires_once_and_sees_what_the_cache_holds(random_core, family):
    core, tokens = random_core(family, n_core=2), torch.arange(7)
    tap, cache = RecordingTap(), core.make_cache(7, 3)
    logits = core(tokens, depth=3, cache=cache, tap=tap)
    assert list(tap.records) == hook_names(core.config, 3)  # in firing order
    assert all(len(records) == 1 for records in tap.records.values())
    for layer in range(2):
        for depth in range(1, 4):
            site = f"depth.{depth}.blocks.{layer}.attn."
            torch.testing.assert_close(tap[site + "hook_rot_k"].transpose(1, 2), cache.keys(layer, depth))
            assert tap[site + "hook_q"].shape == (1, 7, core.config.n_heads, core.config.d_head)
            torch.testing.assert_close(tap[site + "hook_v"].transpose(1, 2), cache.values(layer, depth))
    torch.testing.assert_close(core.unembed(tap["hook_final"]), logits)
    edit = FunctionTap(core, [("depth.2.blocks.0.attn.hook_z", lambda z, hook: z * 0)], depth=3)
    assert not torch.allclose(core(tokens, depth=3, tap=edit), logits)


@pytest.mark.parametrize("family", ["huginn", "ouro", "raven", "raven_olmo", "nanbeige"])
def test_values_are_a_map_of_what_the_block_says_its_attention_reads(random_core, family):
    """The random-map null of the probes builds on it; OLMo's attention reads the bare stream."""
    core, tap = random_core(family), RecordingTap(lambda name: name.startswith("depth.2.blocks.1."))
    core(torch.arange(6), depth=2, tap=tap)
    reads = core.blocks[1].attention_input(tap["depth.2.blocks.1.hook_resid_pre"])
    weight = core.blocks[1].attn.qkv.weight[-core.config.n_kv_heads * core.config.d_head :]
    torch.testing.assert_close((reads @ weight.T).unflatten(-1, (-1, core.config.d_head)), tap["depth.2.blocks.1.attn.hook_v"])


def test_a_recorded_state_of_parcae_is_read_with_its_tokens_and_not_without(random_core):
    core, tokens, tap = random_core("parcae"), torch.arange(6)[None], RecordingTap("depth.2.hook_state")
    logits = core(tokens, depth=2, tap=tap)
    torch.testing.assert_close(core.read(core.carrying(tap["depth.2.hook_state"], core.embed(tokens))), logits)
    with pytest.raises(SettingError, match="48 more channels than 48, got 48.*carrying"):
        core.read(tap["depth.2.hook_state"])


def test_the_rotary_table_grows_with_the_positions_that_are_reached(random_core):
    core = random_core("nanbeige", n_core=1, context=262144)
    core(torch.arange(8))
    assert core.rotary_table.shape[0] == 4096
    cache = core.make_cache(5000, 1)
    assert core.rotary_table.shape[0] == 8192
    cache.length = 4990  # as if that many had been run: their keys are zero, their values too
    far = core(torch.arange(8), depth=1, cache=cache)
    assert far.shape == (1, 8, 256) and far.isfinite().all()
    with pytest.raises(ContextError, match="262144"):
        core.embed(torch.arange(8)[None], Chain(262140, 8))
    assert core.rotary_table.shape[0] == 8192
