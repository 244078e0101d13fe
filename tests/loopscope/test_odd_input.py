"""Input that used to end in somebody else's error, or in silence: each case says what was wrong."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import loopscope
from decoders import Autoregressive, DASWave, LoopSpec, Sampling
from loopscope.chat import render
from loopscope.errors import CheckpointError, HookError, LoopscopeError, PromptError, RunFolderError, SettingError, UnknownModelError
from loopscope.exits import exit_rule
from loopscope.models.convert import convert
from loopscope.models.registry import config_from_dict
from loopscope.random_models import make_random_core, random_config

SAY = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_where_they_are_read(tmp_path, goldens, value):
    shutil.copytree(goldens / "huginn", tmp_path / "m")
    path = tmp_path / "m" / "weights.safetensors"
    tensors = load_file(path)
    name = "transformer.coda.0.attn.qk_bias"
    tensors[name][0, 0, 1, 2] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite"):
        loopscope.load(tmp_path / "m", hooked=False)


@pytest.mark.parametrize("template", ["{{ 'a'.ljust(3*10**9)|length }}", "{{ ('a'*1000).replace('a', 'b'*10000000)|length }}",
                                      "{% set n=namespace(x='a'*1000) %}{% for i in range(40) %}{% set n.x=n.x~n.x %}{% endfor %}"])
def test_a_chat_template_cannot_fill_the_memory(template):
    pytest.importorskip("resource")
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no limit on memory to be had here")
    with pytest.raises(PromptError, match="memory|more than|refused|fails"):
        render(template, SAY, True, {})
    assert render("{{ messages[0].content }}", SAY, True, {}) == "x"  # and the limit is gone again


@pytest.mark.parametrize("family, key, value", [
    ("ouro", "rms_norm_eps", 10**400), ("huginn", "norm_eps", 10**400), ("ouro", "rope_scaling", {"type": ["x"]}),
    ("nanbeige", "rope_scaling", {"rope_type": [1]}), ("ouro", "layer_types", 1), ("ouro", "layer_types", [{}]),
    ("dory", "layer_types", [{}]), ("hrm_text", "L_cycles", 10**9)])
def test_configs_that_make_no_sense(family, key, value):
    with pytest.raises(CheckpointError, match="config"):
        config_from_dict(random_config(family) | {key: value})


def test_arguments_that_make_no_sense():
    core = make_random_core("ouro")
    for wrong in (lambda: exit_rule("argmax-stability:1e300"), lambda: LoopSpec(1, 2, lanes=10**7), lambda: Sampling(1e-320),
                  lambda: DASWave(1, 1, carry="x"), lambda: DASWave(1, 1, read=["x"]),
                  lambda: core(torch.tensor([[1, 2], [3, 4]]), cache=core.make_cache(10)),
                  lambda: loopscope.load("tiny-ouro", device_map=5, hooked=False),
                  lambda: loopscope.load("tiny-ouro", device_map="auto", max_memory={"cpu": "xx"}, hooked=False),
                  lambda: Autoregressive().generate_batch(core, [[1], [2]], "ab")):
        with pytest.raises(SettingError):
            wrong()
    for source in (5, None, b"th"):
        with pytest.raises(UnknownModelError):
            loopscope.load(source)
    for hooks in (None, ["abc"], ("hook_embed", print), [("hook_embed", 3)]):
        with pytest.raises(HookError, match="pairs"):
            if hooks is None:
                from loopscope.tap import check_pairs

                check_pairs(hooks)
            Autoregressive().generate(core, [1], 2, fwd_hooks=hooks)
    with pytest.raises(HookError, match="returned"):
        Autoregressive().generate(core, [1, 2], 2, fwd_hooks=[("hook_embed", lambda v, hook: v.resize_(1))])


def test_converting_where_nothing_can_be_written(tmp_path):
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    for target in (tmp_path / "link", str(tmp_path / "a\0b")):
        with pytest.raises(LoopscopeError):
            convert("tiny-ouro", target)
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_a_full_disk_is_said_in_our_words(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunFolderError, match="could not be written.*free some space"):
        convert("tiny-ouro", tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_certificate_that_cannot_be_saved_is_refused_before_anything_is_decoded(tmp_path):
    from loopscope.cli.verify import _check

    (tmp_path / "file").write_text(json.dumps({}))
    for out in (tmp_path / "file" / "x", tmp_path / ("n" * 300), tmp_path / "file"):
        with pytest.raises(RunFolderError):
            _check([], 1, str(out))
    _check([], 1, str(tmp_path / "new" / "x.json"))
