"""Config values of the wrong kind are refused, never taken for something near them."""

from __future__ import annotations

import pytest

from loopscope.errors import CheckpointError
from loopscope.models.registry import config_from_dict
from loopscope.random_models import random_config


@pytest.mark.parametrize("family, key, value", [
    ("ouro", "tie_word_embeddings", "false"), ("ouro", "tie_word_embeddings", 1), ("ouro", "bos_token_id", "x"),
    ("ouro", "bos_token_id", 1.5),
    ("huginn", "bos_token_id", [1]), ("huginn", "pad_token_id", {}), ("huginn", "intermediate_size", 10**18), ("ouro", "head_dim", 10**18)])
def test_a_value_of_the_wrong_kind_is_refused(family, key, value):
    with pytest.raises(CheckpointError):
        config_from_dict({**random_config(family), key: value})


def test_a_missing_tie_means_what_the_family_means_by_it():
    raw = random_config("ouro")
    raw.pop("tie_word_embeddings")
    assert config_from_dict(raw).tied is False
