import pytest
import torch

from loopscope.errors import SettingError
from loopscope.models.loading import load_core
from loopscope.random_models import FAMILIES


def agreement(core, seed: int = 0) -> float:
    tokens = torch.randint(0, core.config.vocab_size, (2, 60), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        return (core(tokens, depth=1).argmax(-1) == core(tokens).argmax(-1)).double().mean().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_gain_sweeps_the_agreement_of_depth_1_from_all_to_hardly_any(random_core, family):
    swept = [agreement(random_core(family, gain=gain)) for gain in (0.0, 0.2, 0.4, 1.2)]
    assert swept[0] == 1.0
    assert swept == sorted(swept, reverse=True)
    assert 0.2 < swept[1] < 0.95 and swept[3] < 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_make_the_same_model_and_another_seed_another(random_core, family, tmp_path):
    tokens = torch.arange(10)
    one, two, other = random_core(family, seed=3), random_core(family, seed=3), random_core(family, seed=4)
    assert torch.equal(one(tokens), two(tokens))
    assert not torch.allclose(one(tokens), other(tokens))
    one.save_pretrained(tmp_path)
    saved = dict(load_core(tmp_path, dtype=torch.float64).named_parameters())
    assert all(torch.equal(saved[name], p) for name, p in one.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_overrides_use_the_names_of_the_config(random_core, family):
    shared = {} if family == "hrm_text" else {"n_kv_heads": 1}  # HRM-Text has no shared key-value heads
    core = random_core(family, depth=6, n_core=2, context=40, vocab_size=50, n_heads=2, d_model=32, **shared)
    config = core.config
    assert (config.depth, config.n_core, config.context, config.vocab_size) == (6, 2, 40, 50)
    assert (config.n_heads, config.n_kv_heads, config.d_model) == (2, shared.get("n_kv_heads", 2), 32)
    with pytest.raises(SettingError, match="no setting 'layers'"):
        random_core(family, layers=2)


def test_an_unknown_family_is_named(random_core):
    with pytest.raises(SettingError, match="'gpt2'.*huginn, ouro"):
        random_core("gpt2")
