"""`loopscope inspect`: on the goldens, and on the published configs, whose parameter and K/V counts are known (docs/families.md)."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
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
    "Ouro-1.4B": (OURO, "ouro", 4, 96, 269, 1434652673, 768 * 1024),
    "Ouro-2.6B": (OURO | {"num_hidden_layers": 48, "layer_types": ["full_attention"] * 48}, "ouro", 4, 192, None, None, 1536 * 1024),
    "Nanbeige4.2-3B": (NANBEIGE, "nanbeige", 2, 44, None, None, 44 * 2 * 1024 * 2),
    "parcae-140m": (parcae(768, 6, 2), "parcae", 8, 20, None, None, 20 * 2 * 768 * 2),
    "parcae-1.3b": (parcae(1536, 12, 8), "parcae", 8, 80, 225, None, 80 * 2 * 1536 * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_alone_is_enough(name, tmp_path):
    raw, family, depth, calls, tensors, total, kv = PUBLISHED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    found = inspect_checkpoint(path)
    assert (found.config.family, found.config.depth) == (family, depth)
    assert f"{calls} layer calls per token" in str(found) and "only tensor names can tell" in str(found)
    assert found.kv_bytes() == kv and found.kv_bytes(dtype=torch.float32) == 2 * kv
    if total:
        assert found.total == total
    if tensors:
        cls = family_class(family)
        names = {n for group in cls.official_names(found.config).values() for n in group} | set(cls.optional_names(found.config))
        assert len(names) == tensors


def test_huginn_has_the_parameters_that_are_published():
    config = config_from_dict(HUGINN)
    with torch.device("meta"):
        core = family_class("huginn")(config)
    # 3.565 billion with the rotary table that the checkpoint stores
    assert sum(p.numel() for p in core.parameters()) + 4096 * 96 == pytest.approx(3.565e9, rel=2e-4)
    assert config.state_std == pytest.approx(0.632, abs=1e-3)


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
