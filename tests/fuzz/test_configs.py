"""config.json of every family, spoiled: read, or refused in our own words, before anything of its size is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loopscope.errors import CheckpointError
from loopscope.models.config import LoopedConfig
from loopscope.models.registry import config_from_dict, family_class, serialised
from loopscope.models.tensors import read_json
from loopscope.models.unfilled import unfilled

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
CONFIGS = {path.parent.name: dict(serialised(json.loads(path.read_text()))) for path in sorted(GOLDENS.glob("*/config.json"))}
SEEDS = st.integers(0, 2**48)


class Watched(dict):
    """A config that remembers which keys were asked for."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked: set[str] = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def read(raw: dict, build: bool = True) -> LoopedConfig:
    """The config, and the model of its sizes: what a loader does before it looks at any weight. Large models are not built here."""
    config = config_from_dict(raw)
    assert isinstance(hash(config), int) and str(config)
    if build and config.n_prelude + config.n_core * (1 + config.inner_cycles) + config.n_coda <= 8:
        with unfilled():
            core = family_class(config.family)(config)
        assert all(p.device.type == "meta" for p in core.parameters()) and core.official_names(config)
    return config


def test_spoiled_configs_are_read_or_refused_in_our_words(spoil):
    keys = {}
    for family, raw in CONFIGS.items():
        watched = Watched(raw)
        read(watched)
        keys[family] = tuple(sorted(watched.asked & set(raw)))
        assert len(keys[family]) > 8, family
    told = {"read": 0, "refused": 0}

    @spoil.drawn(4000)
    @given(st.sampled_from(sorted(CONFIGS)), SEEDS)
    def check(family, seed):
        raw = spoil.spoiled_json(CONFIGS[family], seed, keys[family])
        if isinstance(raw, dict):
            told["read" if isinstance(spoil.ours(lambda: read(raw, build=seed % 8 == 0)), LoopedConfig) else "refused"] += 1

    check()
    assert min(told.values()) > 200, told  # neither all nonsense nor all harmless


# What fuzzing found: a type that cannot be looked up, and layers that were listed before they were counted.
FINDINGS = [("dory", "recurrent_kv_cache_mode", {}), ("dory", "recurrent_kv_cache_mode", [[]]), ("parcae", "n_layers_in_coda", 2**63),
            ("parcae", "n_layers_in_prelude", 10**12), ("parcae", "n_layers_in_recurrent_block", 2**40)]


@pytest.mark.parametrize("family, key, value", FINDINGS)
def test_what_was_found_stays_refused(family, key, value):
    with pytest.raises(CheckpointError, match="config"):
        read(CONFIGS[family] | {key: value})


def test_any_bytes_as_config_json(spoil, tmp_path):
    path = tmp_path / "config.json"
    whole = {family: json.dumps(raw).encode() for family, raw in CONFIGS.items()}

    @spoil.drawn(700)
    @given(st.sampled_from(sorted(CONFIGS)), SEEDS)
    @example("ouro", 0)
    def check(family, seed):
        path.write_bytes(spoil.spoiled_bytes(whole[family], seed))
        spoil.ours(lambda: config_from_dict(read_json(path)))

    check()
