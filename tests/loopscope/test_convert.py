"""What is written can be read again, bit for bit: `convert`, and save_pretrained, whole and in shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopscope.errors import CheckpointError, SettingError
from loopscope.models.convert import convert
from loopscope.models.loading import SHIPPED, load_core
from loopscope.models.saving import save_checkpoint

FAMILIES = ["dory", "hrm_text", "huginn", "nanbeige", "ouro", "parcae", "retrofit_llama", "retrofit_olmo"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = [file for file in folder.glob("*.safetensors") if file.name != "io.safetensors"]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def pickled(goldens, tmp_path):
    """Parcae as it is released, the tied head being one tensor under two names."""
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(goldens / "parcae" / "config.json", folder)
    state = load_file(goldens / "parcae" / "weights.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_converts_bit_for_bit(family, goldens, tmp_path):
    done = convert(goldens / family, tmp_path / "out")
    assert same(tensors(tmp_path / "out"), tensors(goldens / family)) and done.files == ("config.json", "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (goldens / family / "config.json").read_bytes()
    assert done.nbytes == sum(t.nbytes for t in tensors(tmp_path / "out").values())


def test_a_converted_pickle_needs_no_warning_again(pickled, tmp_path, recwarn):
    with pytest.warns(UserWarning, match="is a pickle"):
        convert(pickled, tmp_path / "out")
    with pytest.warns(UserWarning, match="is a pickle"):
        before = load_core(pickled)
    recwarn.clear()
    after = load_core(tmp_path / "out")
    assert torch.equal(before(torch.arange(9)), after(torch.arange(9))) and not recwarn.list
    assert not list((tmp_path / "out").glob("*.bin"))
    assert same(tensors(tmp_path / "out"), torch.load(pickled / "pytorch_model.bin", weights_only=True))


def test_every_tensor_keeps_its_own_dtype_unless_one_is_asked_for(goldens, tmp_path):
    source = tmp_path / "mixed"
    shutil.copytree(goldens / "ouro", source)
    (source / "io.safetensors").unlink()
    state = {name: t.bfloat16() if "norm" in name else t for name, t in load_file(source / "weights.safetensors").items()}
    save_file(state, source / "weights.safetensors")
    convert(source, tmp_path / "kept")
    assert same(tensors(tmp_path / "kept"), state)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "float32"}))
    done = convert(source, tmp_path / "half", torch.float16)
    assert same(tensors(tmp_path / "half"), {name: t.half() for name, t in state.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    assert done.nbytes == 2 * sum(t.numel() for t in state.values())


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_shards_have_an_index_and_are_no_larger_than_asked(family, goldens, tmp_path):
    done = convert(goldens / family, tmp_path / "out", max_shard_size=60_000)
    shards = [name for name in done.files if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors.index.json" in done.files and "model.safetensors" not in shards
    state, sizes = tensors(goldens / family), {}
    for shard in shards:
        held = load_file(tmp_path / "out" / shard)
        sizes[shard] = sum(t.nbytes for t in held.values())
        assert sizes[shard] <= 60_000 or len(held) == 1
    assert same(tensors(tmp_path / "out"), state)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values()) and index["weight_map"].keys() == state.keys()
    assert torch.equal(load_core(tmp_path / "out")(torch.arange(9)), load_core(goldens / family)(torch.arange(9)))


def test_the_tokenizer_goes_along(tmp_path):
    convert("tiny-ouro", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (SHIPPED / "tiny-ouro" / name).read_bytes()
    assert load_core(tmp_path / "out").to_tokens("Q: 1").tolist() == load_core("tiny-ouro").to_tokens("Q: 1").tolist()


def test_what_cannot_be_converted_leaves_nothing_behind(goldens, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(goldens / "ouro", broken)
    (broken / "io.safetensors").unlink()
    state = load_file(broken / "weights.safetensors")
    save_file(state | {"model.norm.weight": torch.ones(3)}, broken / "weights.safetensors")
    with pytest.raises(CheckpointError, match="model.norm.weight should be"):
        convert(broken, tmp_path / "deep" / "out")
    save_file(state | {"model.norm.weight": torch.full((64,), 1e6)}, broken / "weights.safetensors")
    with pytest.raises(CheckpointError, match="model.norm.weight does not fit into float16"):
        convert(broken, tmp_path / "out", torch.float16)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "deep"] and not list((tmp_path / "deep").iterdir())


def test_what_is_there_is_never_written_over(goldens, tmp_path):
    (tmp_path / "empty").mkdir()
    assert convert(goldens / "ouro", tmp_path / "empty").files == ("config.json", "model.safetensors")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="taken exists and is not empty"):
        convert(goldens / "ouro", tmp_path / "taken")
    with pytest.raises(CheckpointError, match="notes.txt is a file"):
        convert(goldens / "ouro", tmp_path / "taken" / "notes.txt")
    with pytest.raises(CheckpointError, match="notes.txt.* cannot be made"):
        convert(goldens / "ouro", tmp_path / "taken" / "notes.txt" / "out")
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("size", ["5 parsecs", "", None, 0, -1, "0GB", "-5GB", float("nan")])
def test_a_shard_size_that_is_none_is_said(size, goldens, tmp_path):
    with pytest.raises(SettingError, match="largest size of a shard"):
        convert(goldens / "ouro", tmp_path / "out", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_is_none_is_said(goldens, tmp_path):
    with pytest.raises(SettingError, match="dtype must be one of float64, float32, bfloat16, float16"):
        convert(goldens / "ouro", tmp_path / "out", torch.int8)


# ---- save_pretrained ----------------------------------------------------------------------------------------


def test_a_model_is_saved_in_shards_and_loads_again_bit_for_bit(goldens, tmp_path):
    core = load_core(goldens / "retrofit_olmo", dtype=torch.bfloat16)
    save_checkpoint(core, tmp_path / "out", max_shard_size=60_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again = load_core(tmp_path / "out", dtype=torch.bfloat16)
    assert same(dict(again.named_parameters()), dict(core.named_parameters()))


def test_saving_into_a_folder_of_other_weights_is_refused_and_of_the_same_names_replaces(goldens, tmp_path):
    core, other = load_core(goldens / "ouro"), load_core(goldens / "ouro")
    other.norm.weight *= 2
    save_checkpoint(core, tmp_path / "out")
    save_checkpoint(other, tmp_path / "out")
    assert torch.equal(load_core(tmp_path / "out").norm.weight, other.norm.weight)
    with pytest.raises(CheckpointError, match="holds other weights .model.safetensors"):
        save_checkpoint(core, tmp_path / "out", max_shard_size=60_000)
    assert torch.equal(load_core(tmp_path / "out").norm.weight, other.norm.weight)
    save_checkpoint(core, tmp_path / "shards", max_shard_size=60_000)
    with pytest.raises(CheckpointError, match="holds other weights .*, which would be read in place of the new ones"):
        save_checkpoint(other, tmp_path / "shards")
    assert torch.equal(load_core(tmp_path / "shards").norm.weight, core.norm.weight)


def test_a_save_that_fails_leaves_what_was_there(goldens, tmp_path, monkeypatch):
    core = load_core(goldens / "ouro")
    save_checkpoint(core, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError):
        save_checkpoint(core, tmp_path / "out")
    with pytest.raises(OSError):
        save_checkpoint(core, tmp_path / "new")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
