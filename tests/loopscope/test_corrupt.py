"""A checkpoint with something wrong ends in one error that names the file, the tensor or key, what was expected and what was found."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopscope.errors import CheckpointError, LoopscopeError, SettingError, UnknownModelError
from loopscope.models.loading import find_checkpoint, load_core

WEIGHTS = "weights.safetensors"
QKV = "transformer.core_block.1.attn.Wqkv.weight"


class Case:
    """A copy of a golden checkpoint to spoil. All edits return None, so that they can stand in a lambda."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, **changes) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def without(self, *keys: str) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))

    def tensors(self, edit) -> None:
        state = load_file(self.folder / WEIGHTS)
        edit(state)
        save_file({k: v.contiguous() for k, v in state.items()}, self.folder / WEIGHTS)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors(lambda state: state.update({name: tensor}))

    def truncate(self, keep: float, name: str = WEIGHTS) -> None:
        path = self.folder / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    def header(self, edit) -> None:
        """Rewrite the JSON header of the safetensors file, leaving the data."""
        path = self.folder / WEIGHTS
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    def shards(self, drop: str | None = None, **weight_map) -> None:
        """Split into two shards with an index; `drop` deletes one file, weight_map overrides entries."""
        state = load_file(self.folder / WEIGHTS)
        (self.folder / WEIGHTS).unlink()
        names = sorted(state)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, held in parts.items():
            save_file({n: state[n] for n in held}, self.folder / file)
        where = {n: file for file, held in parts.items() for n in held}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where | weight_map}))
        if drop:
            (self.folder / drop).unlink()

    def pickled(self, state) -> None:
        (self.folder / WEIGHTS).unlink()
        torch.save(state, self.folder / "pytorch_model.bin")


def rename(state: dict, old: str, new: str) -> None:
    state[new] = state.pop(old)


CASES = {
    # ---- files
    "no config": ("huginn", lambda c: (c.folder / "config.json").unlink(), ["has no config.json"]),
    "config is not JSON": ("huginn", lambda c: (c.folder / "config.json").write_text('{"a": '), ["config.json", "cannot be read as JSON"]),
    "config is a list": ("huginn", lambda c: (c.folder / "config.json").write_text("[1]"), ["config.json", "JSON object", "found list"]),
    "config nested too deeply": ("huginn", lambda c: (c.folder / "config.json").write_text("[" * 100_000),
                                 ["config.json", "cannot be read"]),
    "a number of too many digits": ("huginn", lambda c: (c.folder / "config.json").write_text('{"a": ' + "1" * 9999 + "}"),
                                    ["config.json", "cannot be read"]),
    "config is not text": ("huginn", lambda c: (c.folder / "config.json").write_bytes(b"\xff\xfe\x00"), ["config.json", "cannot be read"]),
    "no weights": ("ouro", lambda c: (c.folder / WEIGHTS).unlink(), ["has no *.safetensors file", "README.md", "never loaded"]),
    "truncated": ("ouro", lambda c: c.truncate(0.6), [WEIGHTS, "bytes", "truncated or corrupt"]),
    "empty file": ("ouro", lambda c: c.truncate(0), [WEIGHTS, "(0 bytes)", "truncated or corrupt"]),
    "not safetensors": ("ouro", lambda c: (c.folder / WEIGHTS).write_bytes(b"PK" * 500), [WEIGHTS, "not a readable safetensors file"]),
    "header beyond the file": ("ouro", lambda c: c.header(lambda h: h["lm_head.weight"].update(data_offsets=[0, 10**9])),
                               [WEIGHTS, "not a readable"]),
    "no tensors": ("ouro", lambda c: save_file({}, c.folder / WEIGHTS), [WEIGHTS, "holds no tensors"]),
    "two files without an index": ("ouro", lambda c: [shutil.copy(c.folder / WEIGHTS, c.folder / f"{x}.safetensors") for x in "ab"]
                                   and (c.folder / WEIGHTS).unlink(), ["2 safetensors files", "model.safetensors.index.json"]),
    "broken tokenizer": ("ouro", lambda c: (c.folder / "tokenizer.json").write_text("{}"), ["tokenizer.json", "not a readable tokenizer"]),
    # ---- shards
    "a missing shard": ("huginn", lambda c: c.shards("model-2.safetensors"),
                        ["2 shards", "1 are missing: model-2.safetensors", "38 tensors", "lm_head.weight"]),
    "a truncated shard": ("huginn", lambda c: c.shards() or c.truncate(0.5, "model-2.safetensors"), ["model-2.safetensors", "truncated"]),
    "an index that lies": ("huginn", lambda c: c.shards(**{QKV: "model-2.safetensors"}),
                           ["model-2.safetensors lacks tensor " + QKV, "model.safetensors.index.json says it holds"]),
    "a tensor no index lists": ("huginn", lambda c: c.shards() or save_file({"stray": torch.zeros(2)}, c.folder / "model-3.safetensors")
                                or _relist(c, {"freqs_cis": "model-3.safetensors"}), ["holds tensor stray", "does not list"]),
    "an index that leaves the folder": ("huginn", lambda c: c.shards(**{QKV: "../../elsewhere.safetensors"}),
                                        ["'../../elsewhere.safetensors'", "same folder"]),
    "an index that names a pickle": ("huginn", lambda c: c.shards(**{QKV: "model.bin"}), ["'model.bin'", "*.safetensors"]),
    "a shard name no file can have": ("huginn", lambda c: c.shards(**{QKV: "m" * 5000 + ".safetensors"}), ["1 are missing: mmm", QKV]),
    "an index without a map": ("huginn", lambda c: (c.folder / "model.safetensors.index.json").write_text('{"weight_map": []}'),
                               ["index.json", "weight_map", "found list"]),
    # ---- tensors
    "a missing tensor": ("huginn", lambda c: c.tensors(lambda s: s.pop(QKV)), [WEIGHTS, "lacks 1 of 75 tensors of a huginn model", QKV]),
    "a misnamed tensor": ("huginn", lambda c: c.tensors(lambda s: rename(s, "transformer.adapter.weight", "transformer.adaptor.weight")),
                          ["transformer.adapter.weight", "it has 'transformer.adaptor.weight'"]),
    "an extra tensor": ("ouro", lambda c: c.replace("model.layers.9.input_layernorm.weight", torch.ones(64)),
                        [WEIGHTS, "1 tensor that a ouro model of this config does not have", "model.layers.9"]),
    "a misshapen tensor": ("nanbeige", lambda c: c.replace("model.layers.1.mlp.down_proj.weight", torch.ones(48, 95)),
                           [WEIGHTS, "model.layers.1.mlp.down_proj.weight should be [48, 96]", "found [48, 95]"]),
    "a transposed tensor": ("nanbeige", lambda c: c.replace("model.layers.1.mlp.down_proj.weight", torch.ones(96, 48)),
                            ["should be [48, 96]", "found [96, 48]"]),
    "parts of a wrong split": ("nanbeige", lambda c: c.tensors(lambda s: s.update({
        "model.layers.0.self_attn.q_proj.weight": torch.ones(32, 48), "model.layers.0.self_attn.k_proj.weight": torch.ones(64, 48)})),
        ["model.layers.0.self_attn.q_proj.weight should be [64, 48]", "found [32, 48]"]),
    "a scalar": ("ouro", lambda c: c.replace("model.norm.weight", torch.tensor(1.0)), ["model.norm.weight should be [64]", "found []"]),
    "integers": ("ouro", lambda c: c.replace("model.norm.weight", torch.ones(64, dtype=torch.int8)),
                 ["model.norm.weight", "found int8", "quantised"]),
    "a config of another size": ("ouro", lambda c: c.config(intermediate_size=97),
                                 ["gate_proj.weight should be [97, 64]", "found [96, 64]"]),
    "fewer layers than the config": ("ouro", lambda c: c.config(num_hidden_layers=4), ["lacks 11 of", "model.layers.3", "and 7 more"]),
    "more layers than the config": ("ouro", lambda c: c.config(num_hidden_layers=2), ["has 11 tensors", "model.layers.2"]),
    "a rotary table of another theta": ("huginn", lambda c: c.config(rope_base=10000), ["freqs_cis", "other rotary frequencies", "10000"]),
    "a rotary table of another length": ("parcae", lambda c: c.config(block_size=64),
                                         ["freqs_cis should be [1, 64, 1, 6, 2]", "found [1, 128"]),
    "a value embedding without a gate": ("parcae", lambda c: c.tensors(lambda s: s.pop("transformer.coda.1.attn.ve_gate.weight")),
                                         ["lacks 1 of", "transformer.coda.1.attn.ve_gate.weight"]),
    "a gate without a value embedding": ("parcae", lambda c: c.tensors(lambda s: s.pop("value_embeds.3.weight")),
                                         ["lacks 1 of", "value_embeds.3"]),
    "OLMo norms in half the layers": ("retrofit_olmo", lambda c: c.tensors(lambda s: s.pop("transformer.coda.0.attn.k_norm.weight")),
                                      ["a raven model", "transformer.coda.0.attn.k_norm.weight"]),
    "Llama tensors in a Huginn": ("huginn", lambda c: c.tensors(lambda s: [s.pop(k) for k in list(s) if "core_block.0.norm_" in k]),
                                  ["lacks 4 of", "transformer.core_block.0.norm_1.weight"]),
    # ---- config values
    "a missing key": ("nanbeige", lambda c: c.without("rms_norm_eps"), ["no 'rms_norm_eps'", "'nanbeige'"]),
    "a missing loop count": ("nanbeige", lambda c: c.without("num_loops"), ["no 'num_loops'"]),
    "a missing key of an inner object": ("retrofit_llama", lambda c: c.config(init_values={"embed_scale": 1.0}),
                                         ["no 'std'", "init_values"]),
    "no theta at all": ("ouro", lambda c: c.without("rope_theta", "rope_parameters"), ["no 'rope_theta'"]),
    "a null": ("huginn", lambda c: c.config(n_embd=None), ["no 'n_embd'"]),
    "text for a number": ("huginn", lambda c: c.config(n_embd="48"), ["n_embd must be a whole number of at least 1", "'48'"]),
    "a fraction for a size": ("huginn", lambda c: c.config(n_heads=3.5), ["n_heads", "3.5"]),
    "a truth value for a size": ("ouro", lambda c: c.config(num_hidden_layers=True), ["num_hidden_layers", "True"]),
    "a negative size": ("parcae", lambda c: c.config(n_layers_in_coda=-1), ["n_layers_in_coda", "at least 0", "-1"]),
    "zero loops": ("ouro", lambda c: c.config(total_ut_steps=0), ["total_ut_steps", "at least 1", "0"]),
    "NaN for a size": ("ouro", lambda c: c.config(hidden_size=float("nan")), ["hidden_size", "nan"]),
    "NaN for a constant": ("ouro", lambda c: c.config(rope_theta=float("nan")), ["rope_theta", "finite", "nan"]),
    "a negative epsilon": ("huginn", lambda c: c.config(norm_eps=-1e-6), ["norm_eps", "above 0", "-1e-06"]),
    "an infinite scale": ("retrofit_llama", lambda c: c.config(init_values={"std": 0.1, "embed_scale": float("inf")}),
                          ["embed_scale", "inf"]),
    "heads that do not divide": ("huginn", lambda c: c.config(n_heads=5, num_key_value_heads=5, head_dim=None), ["48", "5 heads"]),
    "heads that cannot share": ("nanbeige", lambda c: c.config(num_key_value_heads=3), ["4 heads cannot share 3 key-value heads"]),
    "an odd head": ("nanbeige", lambda c: c.config(head_dim=15), ["d_head must be even", "15"]),
    "absurdly many layers": ("ouro", lambda c: c.config(num_hidden_layers=10**9), ["n_core 1000000000 is more than any model has"]),
    "text for a truth value": ("parcae", lambda c: c.config(tie_embeddings="false"), ["tie_embeddings must be true or false", "'false'"]),
    "token ids that are no numbers": ("ouro", lambda c: c.config(eos_token_id=["</s>"]), ["token ids", "</s>"]),
    "a rotary scaling we do not have": ("retrofit_llama", lambda c: c.config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
                                        ["'yarn'", "llama3"]),
    "a rotary scaling without its factor": ("retrofit_llama", lambda c: c.config(rope_scaling={"rope_type": "llama3"}), ["no 'factor'"]),
    "an injection we do not have": ("parcae", lambda c: c.config(injection_type="linear"), ["injection_type 'linear'", "'diagonal'"]),
    "a switched-on extra": ("nanbeige", lambda c: c.config(enable_mhc=True), ["enable_mhc True is not supported", "nanbeige"]),
    "noise at test time": ("retrofit_olmo", lambda c: c.config(test_time_noise=0.1), ["test_time_noise 0.1"]),
}


def _relist(case: Case, where: dict[str, str]) -> None:
    path = case.folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"] | where}))


@pytest.fixture
def spoil(goldens, tmp_path):
    def make(golden: str, edit=None) -> Path:
        folder = tmp_path / golden
        folder.mkdir()
        for name in ("config.json", WEIGHTS, "README.md"):
            shutil.copy(goldens / golden / name, folder)
        if edit:
            edit(Case(folder))
        return folder

    return make


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(spoil, name):
    golden, edit, parts = CASES[name]
    folder = spoil(golden, edit)
    with pytest.raises(CheckpointError) as error:
        load_core(folder)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message and len(message) < 600


def test_a_sharded_checkpoint_loads(spoil):
    whole = load_core(spoil("huginn"))
    shutil.rmtree(str(whole.source))
    sharded = load_core(spoil("huginn", lambda c: c.shards()))
    assert torch.equal(whole(torch.arange(9)), sharded(torch.arange(9)))


# ---- families that do not run -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", None, 7, "", ["ouro"]])
def test_an_unknown_model_type_is_told_what_is_supported(spoil, model_type):
    folder = spoil("ouro", lambda c: c.config(model_type=model_type))
    with pytest.raises(UnknownModelError, match=r"model_type .* is not supported; supported: .*huginn_raven.*nanbeige.*ouro"):
        load_core(folder)


@pytest.mark.parametrize("model_type", ["inkling", "inkling_2", "Inkling2ForConditionalGeneration"])
def test_inkling_is_refused_with_the_reason(spoil, model_type):
    with pytest.raises(UnknownModelError, match="not supported, because it is multimodal, a mixture of experts"):
        load_core(spoil("ouro", lambda c: c.config(model_type=model_type)))


# ---- sources, devices and dtypes that cannot be ------------------------------------------------------------


@pytest.mark.parametrize("source", ["~nouser-of-this-name/x", "x" * 5000, "a\0b"])
def test_a_name_no_folder_can_have_is_an_unknown_model(source):
    with pytest.raises(UnknownModelError, match="neither a shipped model .* nor a folder"):
        find_checkpoint(source)


@pytest.mark.parametrize("given", [{"dtype": torch.int8}, {"dtype": torch.complex64}, {"dtype": "float32"}, {"dtype": 0},
                                   {"device": "meta"}, {"device": "abacus"}, {"device": ""}, {"device": 2.5}])
def test_a_dtype_or_device_no_model_can_have_is_said(goldens, given):
    with pytest.raises(SettingError) as error:
        load_core(goldens / "ouro", **given)
    assert str(*given.values()) in str(error.value) and str(error.value).count("\n") == 0


# ---- numbers that do not fit --------------------------------------------------------------------------------


def test_a_weight_beyond_float16_is_named_with_its_value(spoil):
    folder = spoil("parcae", lambda c: c.tensors(lambda s: s["transformer.core_block.0.mlp.fc.weight"].mul_(1e7)))
    with pytest.raises(CheckpointError, match=r"transformer.core_block.0.mlp.fc.weight does not fit into float16: its largest value is "
                                              r".*expected at most 6.55e\+04; load it as bfloat16 or float32"):
        load_core(folder, dtype=torch.float16)
    assert load_core(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


# ---- pickles ------------------------------------------------------------------------------------------------


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("golden", ["huginn", "ouro", "nanbeige", "retrofit_llama"])
def test_a_pickle_of_another_family_is_not_even_opened(spoil, golden, tmp_path, recwarn):
    folder = spoil(golden, lambda c: c.pickled({"x": Runs(tmp_path / "ran")}))
    with pytest.raises(CheckpointError, match="pickled weights are never loaded"):
        load_core(folder)
    assert not (tmp_path / "ran").exists() and not recwarn.list


PICKLES = {
    "code": (lambda path: {"transformer.wte.weight": Runs(path)}, "holds more than tensors"),
    "a list": (lambda path: [torch.zeros(2)], "dictionary of tensors by name, found list"),
    "nothing": (lambda path: {}, "dictionary of tensors by name"),
    "numbers": (lambda path: {"a": 1}, "dictionary of tensors by name"),
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_parcaes_pickle_may_hold_tensors_and_nothing_else(spoil, name, tmp_path):
    make, message = PICKLES[name]
    folder = spoil("parcae", lambda c: c.pickled(make(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=message):
        load_core(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*is a pickle")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"\x80\x04K\x01."])
def test_a_broken_pickle_is_an_error_like_any_other(spoil, content):
    folder = spoil("parcae", lambda c: c.pickled({}))
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        load_core(folder)


@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_an_old_style_pickle_of_code_is_not_run(spoil, tmp_path):
    folder = spoil("parcae", lambda c: c.pickled({}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(LoopscopeError, match="pytorch_model.bin"):
        load_core(folder)
    assert not (tmp_path / "ran").exists()
