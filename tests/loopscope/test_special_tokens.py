"""Special tokens that config.json gets wrong are corrected from the checkpoint's own tokenizer, with a notice, and only then."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from loopscope.errors import CheckpointError, SpecialTokenNotice
from loopscope.models.loading import load_core, shipped_models

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer_file(path: Path, special: dict[str, int], words: int = 256) -> None:
    """A tokenizer of the words w0, w1, ...; `special` tokens are control tokens at their ids."""
    vocab = {f"w{i}": i for i in range(words) if i not in special.values()} | special
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w9"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in sorted(special, key=special.__getitem__)])
    tokenizer.save(str(path))


@pytest.fixture
def checkpoint(goldens, tmp_path):
    def make(golden: str, config: dict, special: dict[str, int] | None = None, generation: dict | None = None, file="tokenizer_config.json",
             **settings) -> Path:
        folder = tmp_path / golden
        shutil.copytree(goldens / golden, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if special is not None:
            tokenizer_file(folder / "tokenizer.json", special)
        if settings:
            (folder / file).write_text(json.dumps(settings))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


def ids(folder: Path):
    config = load_core(folder).config
    return config.bos, config.eos, config.pad


def quiet(folder: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ids(folder)


def notice(folder: Path) -> tuple[tuple, str]:
    with pytest.warns(SpecialTokenNotice) as said:
        found = ids(folder)
    assert len(said) == 1
    return found, str(said[0].message)


HUGINN = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}
LLAMA = {"<|begin_of_text|>": 128, "<|end_of_text|>": 129, "<|eot_id|>": 137}


def test_a_retrofits_huginn_ids_beyond_its_vocabulary_become_its_tokenizers(checkpoint):
    folder = checkpoint("retrofit_llama", HUGINN, LLAMA, bos_token="<|begin_of_text|>", eos_token={"content": "<|end_of_text|>"})
    found, text = notice(folder)
    assert found == (128, (129,), None)
    for part in (str(folder), "bos_token_id 65504 is now 128", "outside the vocabulary of 256",
                 "tokenizer_config.json has '<|begin_of_text|>'", "eos_token_id 65505 is now 129", "pad_token_id 65509 is now none"):
        assert part in text


def test_a_retrofits_huginn_ids_that_are_words_of_its_vocabulary_become_its_tokenizers(checkpoint):
    folder = checkpoint("retrofit_olmo", {"bos_token_id": 104, "eos_token_id": 105, "pad_token_id": 109}, LLAMA | {"<|pad|>": 140},
                        file="special_tokens_map.json", bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", pad_token="<|pad|>")
    found, text = notice(folder)
    assert found == (128, (129,), 140)
    for part in ("104 is 'w104', an ordinary token", "105 is 'w105', an ordinary token", "109 is 'w109'",
                 "special_tokens_map.json has '<|pad|>'"):
        assert part in text


OURO = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SMOL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_ouros_base_config_also_ends_at_the_end_of_a_chat_turn(checkpoint):
    folder = checkpoint("ouro", OURO, SMOL, bos_token="<|endoftext|>", eos_token="<|endoftext|>", chat_template=CHATML)
    found, text = notice(folder)
    assert found == (0, (0, 2), None) and "eos_token_id 0 is now [0, 2]: the chat template closes turns with '<|im_end|>'" in text


def test_ouros_tokenizer_is_believed_about_its_own_tokens(checkpoint):
    folder = checkpoint("ouro", OURO, SMOL, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    found, text = notice(folder)
    assert found == (1, (0, 2), 0) and "bos_token_id 0 is now 1" in text and "pad_token_id none is now 0" in text


def test_a_turn_end_that_the_template_does_not_write_is_no_evidence(checkpoint):
    folder = checkpoint("ouro", OURO, SMOL, bos_token="<|endoftext|>", eos_token="<|endoftext|>", chat_template="{{ messages }}")
    assert quiet(folder) == (0, (0,), None)


def test_ends_that_the_generation_config_lists_are_added_where_they_are_control_tokens(checkpoint):
    folder = checkpoint("ouro", OURO, SMOL, {"eos_token_id": [2, 77, 9999]}, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    found, text = notice(folder)
    assert found == (0, (0, 2), None) and "generation_config.json lists it" in text


def test_several_ends_of_a_chat_model_all_stay(checkpoint):
    folder = checkpoint("nanbeige", {"bos_token_id": 128, "eos_token_id": [137, 129], "pad_token_id": 137}, LLAMA,
                        bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    assert quiet(folder) == (128, (137, 129), 137)


def test_a_config_that_agrees_gives_no_notice(checkpoint):
    folder = checkpoint("ouro", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": -1}, SMOL, bos_token="<|endoftext|>",
                        eos_token="<|im_end|>")
    assert quiet(folder) == (0, (2,), None)


@pytest.mark.parametrize("special", [None, {}, SMOL])
def test_without_evidence_nothing_is_changed(checkpoint, special):
    """No tokenizer, one without control tokens, and one that declares none of them as begin, end or pad."""
    assert quiet(checkpoint("ouro", {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 10}, special)) == (7, (8, 9), 10)


def test_ids_beyond_the_vocabulary_are_dropped_without_any_tokenizer(checkpoint):
    found, text = notice(checkpoint("ouro", {"bos_token_id": 256, "eos_token_id": [2, 300], "pad_token_id": -2}))
    assert found == (None, (2,), None)
    for part in ("bos_token_id 256 is now none", "eos_token_id [2, 300] is now 2", "300 is outside", "pad_token_id -2"):
        assert part in text


def test_a_token_that_the_tokenizer_does_not_have_is_not_made_up(checkpoint):
    folder = checkpoint("ouro", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, SMOL, bos_token="<s>", eos_token=None)
    assert quiet(folder) == (1, (2,), 0)


def test_tokens_of_the_tokenizer_beyond_the_model_are_not_used(checkpoint):
    folder = checkpoint("ouro", {"bos_token_id": 0, "eos_token_id": 2}, SMOL | {"<|far|>": 256}, bos_token="<|endoftext|>",
                        eos_token="<|far|>")
    assert quiet(folder)[1] == (2,)


def test_what_was_corrected_is_corrected_again_after_saving(checkpoint, tmp_path):
    folder = checkpoint("retrofit_llama", HUGINN, LLAMA, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    with pytest.warns(SpecialTokenNotice):
        core = load_core(folder)
    core.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert notice(tmp_path / "again")[0] == (core.config.bos, core.config.eos, core.config.pad) == (128, (129,), None)


def test_a_generation_config_that_makes_no_sense_is_named(checkpoint):
    with pytest.raises(CheckpointError, match="generation_config.json: token ids must be whole numbers"):
        ids(checkpoint("ouro", OURO, SMOL, {"eos_token_id": ["</s>"]}))


@pytest.mark.parametrize("name", shipped_models())
def test_the_shipped_models_need_no_correction(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_core(name)
