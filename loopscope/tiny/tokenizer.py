"""The shipped models' tokenizer: byte-level BPE, 1024 tokens, every digit a token of its own.

Any unicode text survives a round trip, because the alphabet is the 256 bytes. Digits are split singly so that a
number's columns are visible to the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB = 1024
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CONTEXT = 512


def train(texts: list[str], vocab: int = VOCAB) -> tokenizers.Tokenizer:
    """Learn the merges from ``texts`` (deterministic: the same texts give the same tokenizer)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, as ``transformers`` and ``tokenizers`` read them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path) -> tokenizers.Tokenizer:
    """Read the tokenizer of a model folder."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def special_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, int, int]:
    """Ids of the begin, end and padding tokens.

    Raises:
        KeyError: if the tokenizer lacks one.
    """
    vocabulary = tokenizer.get_vocab()
    return vocabulary[BOS], vocabulary[EOS], vocabulary[PAD]
