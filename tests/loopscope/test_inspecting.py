"""`loopscope inspect`: on the goldens, and on the published configs, whose parameter and K/V counts are known (docs/families.md)."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import (
    DoryConfig,
    DoryForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)
from typer.testing import CliRunner

from loopscope.cli.app import app
from loopscope.inspecting import inspect_checkpoint
from loopscope.models.loading import load_core
from loopscope.models.registry import config_from_dict, family_class

HUGINN = {
    "model_type": "huginn_raven", "block_class_name": "SandwichBlock", "injection_type": "linear", "state_init": "like-init", "bias": False,
    "n_embd": 5280, "n_heads": 55, "num_key_value_heads": 55, "head_dim": 96, "intermediate_size": 17920, "vocab_size": 65536,
    "padded_vocab_size": 65536, "block_size": 4096, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2,
    "mean_recurrence": 32, "norm_eps": 1e-6, "rope_base": 50000, "qk_bias": True, "tie_embeddings": True,
    "init_values": {"std": 0.008703882797784892, "embed_scale": 72.66360849833398}, "bos_token_id": 65504, "eos_token_id": [65505, 65508]}
RETROFIT = HUGINN | {
    "n_embd": 2048, "n_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "padded_vocab_size": 128256, "block_size": 1024, "n_layers_in_prelude": 4, "n_layers_in_recurrent_block": 6, "n_layers_in_coda": 4,
    "norm_eps": 1e-5, "rope_theta": 500000.0, "qk_bias": False, "tie_embeddings": False, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "init_values": {"std": 0.008703882797784892, "embed_scale": 1.0}}
OURO = {
    "model_type": "ouro", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 5632, "vocab_size": 49152, "rope_theta": 1e6, "rope_scaling": None,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "total_ut_steps": 4,
    "use_sliding_window": False, "layer_types": ["full_attention"] * 24}
NANBEIGE = {
    "model_type": "nanbeige", "hidden_act": "silu", "hidden_size": 3072, "num_hidden_layers": 22, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10752, "vocab_size": 166144, "rope_theta": 7e7, "rope_scaling": None,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_loops": 2, "loop_loss_weights": [],
    "skip_loop_final_norm": False, "attention_bias": False}

# The config classes of transformers default to what is released. Dory's counts sub-layers: 16 + 40 + 16, "mlp" in between.
DORY, HRM_TEXT = DoryConfig().to_dict(), HrmTextConfig().to_dict()


def parcae(width: int, heads: int, part: int) -> dict:
    return {
        "_class_name": "ParcaeConfig", "model_class_name": "Parcae", "block_class_name": "TransformerPreNormBlock",
        "mlp_class_name": "BaseMLP", "nonlin_name": "ReLU2", "norm_class_name": "RMSNorm", "injection_type": "diagonal",
        "init_strategy": "scaled-zero",
        "state_init": "like-init", "bias": False, "qk_bias": False, "qk_norm": True, "prelude_norm": True, "tie_embeddings": True,
        "n_embd": width, "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 4 * width, "vocab_size": 32768,
        "n_layers_in_prelude": part, "n_layers_in_recurrent_block": part, "n_layers_in_coda": part, "mean_recurrence": 8,
        "mean_backprop_depth": 4, "block_size": 2048, "norm_eps": 1e-5,
        "rope_settings": {"use_rope": True, "rope_base": 50000, "rope_condense_ratio": 1}}


# name: (config, family, T, layer calls per token, official tensors incl. tied copies and tables, total parameters or None, K/V bytes bf16)
PUBLISHED = {
    "Huginn-0125": (HUGINN, "huginn", 32, 132, 77, None, 132 * 2 * 5280 * 2),
    "Recurrent-Llama-3.2": (RETROFIT, "raven", 32, 200, None, None, 200 * 2 * 512 * 2),
    "Recurrent-TinyLlama": (RETROFIT | {"vocab_size": 32000, "padded_vocab_size": 32000, "n_layers_in_recurrent_block": 8,
                                        "rope_scaling": None,
                                        "num_key_value_heads": 4, "intermediate_size": 5632, "rope_theta": 10000.0, "mean_recurrence": 8},
                            "raven", 8, 72, None, None, 72 * 2 * 256 * 2),
    "Recurrent-OLMo-2": (RETROFIT | {"vocab_size": 100352, "padded_vocab_size": 100352, "n_heads": 16, "num_key_value_heads": 16,
                                     "head_dim": 128, "rope_scaling": None, "mean_recurrence": 4, "_name_or_path": "Recurrent-OLMo-2"},
                         "raven", 4, 32, None, None, 32 * 2 * 2048 * 2),
    "Ouro-1.4B": (OURO, "ouro", 4, 96, 269, 1434652673, 768 * 1024),
    "Ouro-2.6B": (OURO | {"num_hidden_layers": 48, "layer_types": ["full_attention"] * 48}, "ouro", 4, 192, None, 2667974657, 1536 * 1024),
    "Nanbeige4.2-3B": (NANBEIGE, "nanbeige", 2, 44, None, None, 44 * 2 * 1024 * 2),
    "parcae-140m": (parcae(768, 6, 2), "parcae", 8, 20, None, None, 20 * 2 * 768 * 2),
    "parcae-370m": (parcae(1024, 8, 4), "parcae", 8, 40, None, None, 40 * 2 * 1024 * 2),
    "parcae-770m": (parcae(1280, 10, 6), "parcae", 8, 60, None, None, 60 * 2 * 1280 * 2),
    "parcae-1.3b": (parcae(1536, 12, 8), "parcae", 8, 80, 225, None, 80 * 2 * 1536 * 2),
    "Dory-4B": (DORY, "dory", 2, 8 + 2 * 20 + 8, None, None, 56 * 2 * 1024 * 2),
    "HRM-Text-1B": (HRM_TEXT, "hrm_text", 2, 2 * 4 * 16, None, None, 128 * 2 * 1536 * 2),
}


@pytest.fixture
def inspect_config(tmp_path):
    def inspect(raw: dict):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return inspect_checkpoint(path)
    return inspect


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_alone_is_enough(name, inspect_config):
    raw, family, depth, calls, tensors, total, kv = PUBLISHED[name]
    found = inspect_config(raw)
    assert (found.config.family, found.config.depth) == (family, depth)
    assert f"{calls} layer calls per token" in str(found) and "only tensor names can tell" in str(found)
    assert found.kv_bytes() == kv and found.kv_bytes(dtype=torch.float32) == 2 * kv
    if total:
        assert found.total == total
    if name.startswith("parcae"):
        assert found.total == pytest.approx({"m": 1e6, "b": 1e9}[name[-1]] * float(name[7:-1]), rel=0.05)
    if tensors:
        cls = family_class(family)
        names = {n for group in cls.official_names(found.config).values() for n in group} | set(cls.optional_names(found.config))
        assert len(names) == tensors


def stack(config) -> int:
    """Parameters of the class that transformers has for `config`, embedding and head included."""
    with torch.device("meta"):
        model = {LlamaConfig: LlamaForCausalLM, Olmo2Config: Olmo2ForCausalLM, DoryConfig: DoryForCausalLM,
                 HrmTextConfig: HrmTextForCausalLM}[type(config)](config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name, config, adapter", [
    ("Recurrent-Llama-3.2", LlamaConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
                                        vocab_size=128256, num_hidden_layers=14), 2 * 2048**2),
    ("Recurrent-TinyLlama", LlamaConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632,
                                        vocab_size=32000, num_hidden_layers=16), 2 * 2048**2),
    ("Nanbeige4.2-3B", LlamaConfig(hidden_size=3072, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
                                   intermediate_size=10752, vocab_size=166144, num_hidden_layers=22), 0),
    ("Recurrent-OLMo-2", Olmo2Config(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, intermediate_size=8192,
                                     vocab_size=100352, num_hidden_layers=14), 2 * 2048**2),
    ("Dory-4B", DoryConfig(), 0),
    ("HRM-Text-1B", HrmTextConfig(), 0),
])
def test_parameters_of_published_configs_are_those_of_the_stacks_they_were_made_of(name, config, adapter, inspect_config):
    found = inspect_config(PUBLISHED[name][0])
    c = found.config
    assert found.total == stack(config) + adapter
    if name == "Recurrent-OLMo-2":
        assert c.variant == "olmo"
    if name == "Dory-4B":
        assert (c.n_prelude, c.n_core, c.n_coda, sum(c.sliding), c.window) == (8, 20, 8, 27, 1024)
        assert (c.sliding_theta, c.rope_theta) == (1e4, 1e7)
    if name == "HRM-Text-1B":
        assert (c.n_core, c.inner_cycles, c.depth) == (16, 3, 2)


def test_no_parameter_is_given_memory(monkeypatch, inspect_config):
    built, cls = [], family_class("parcae")  # the smallest, for the day this fails
    monkeypatch.setattr("loopscope.inspecting.family_class", lambda family: lambda config: built.append(cls(config)) or built[-1])
    inspect_config(PUBLISHED["parcae-140m"][0])
    assert len(built) == 1 and all(t.is_meta for t in (*built[0].parameters(), *built[0].buffers()))


def test_huginn_has_the_parameters_that_are_published():
    config = config_from_dict(HUGINN)
    with torch.device("meta"):
        core = family_class("huginn")(config)
    # 3.565 billion with the rotary table that the checkpoint stores
    assert sum(p.numel() for p in core.parameters()) + 4096 * 96 == pytest.approx(3.565e9, rel=2e-4)
    assert config.state_std == pytest.approx(0.632, abs=1e-3)


@pytest.mark.support("inspect")
@pytest.mark.parametrize("golden", ["huginn", "ouro", "retrofit_llama", "retrofit_olmo", "nanbeige", "parcae", "dory", "hrm_text"])
def test_goldens_are_complete_and_counted_right(goldens, golden, monkeypatch):
    monkeypatch.setattr("loopscope.models.tensors.Stored.load", None)  # nothing may be read
    found = inspect_checkpoint(goldens / golden)
    monkeypatch.undo()
    core = load_core(goldens / golden)
    assert found.config == core.config and found.total == sum(p.numel() for p in core.parameters())
    assert "all that the config asks for" in found.weights
    cache = core.make_cache(1)
    held = sum(k.numel() + v.numel() for part in (cache.prelude, cache.core, cache.coda) for k, v in part)
    assert found.kv_elements["shared" if core.config.kv_slots else "per depth"] == held


def test_an_incomplete_folder_is_still_described_and_says_what_is_missing(goldens, tmp_path):
    shutil.copy(goldens / "ouro" / "config.json", tmp_path)
    shutil.copy(goldens / "nanbeige" / "weights.safetensors", tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.config.family == "ouro" and "INCOMPLETE" in found.weights and "model.early_exit_gate.weight" in found.weights


def test_the_command_prints_it_and_refuses_in_one_line(goldens, tmp_path):
    done = CliRunner().invoke(app, ["inspect", str(goldens / "retrofit_olmo")])
    assert done.exit_code == 0 and "raven (olmo)" in done.stdout and "60 tensors" in done.stdout
    (tmp_path / "config.json").write_text('{"model_type": "inkling_2"}')
    failed = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert failed.exit_code != 0 and "not supported, because" in failed.stderr and "Traceback" not in failed.stderr
