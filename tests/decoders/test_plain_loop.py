"""The benchmark's baseline: a plain cached loop over the same modules, with K/V tensors that grow by concatenation."""

from __future__ import annotations

import pytest
import torch

from decoders import Autoregressive
from decoders.bench import bench
from decoders.plain_loop import PlainLoop, _Slot
from loopscope.errors import ContextError, PromptError, SettingError
from loopscope.random_models import FAMILIES

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["long", "one token"])
def test_the_plain_loop_gives_the_autoregressive_tokens_in_float64(random_core, family, prompt):
    core = random_core(family, gain=0.4)
    plain, ar = (d.generate(core, prompt, max_new_tokens=20, depth=5, seed=3) for d in (PlainLoop(), Autoregressive()))
    assert plain.tokens == ar.tokens and len(set(ar.tokens)) > 2
    assert plain.calls == ar.calls and plain.rows == ar.rows


def test_depths_that_share_slots_leave_the_last_recurrence_in_the_plain_cache_too(random_core):
    core = random_core("dory", gain=0.6, kv_slots=1, n_core=4)
    plain, ar = (d.generate(core, PROMPT, max_new_tokens=20, depth=5) for d in (PlainLoop(), Autoregressive()))
    assert plain.tokens == ar.tokens
    assert plain.tokens != PlainLoop().generate(random_core("dory", gain=0.6, n_core=4), PROMPT, max_new_tokens=20, depth=5).tokens


def test_it_ends_where_autoregressive_decoding_ends(random_core):
    free = Autoregressive().generate(random_core("huginn", gain=0.3), PROMPT, max_new_tokens=12).tokens
    core = random_core("huginn", gain=0.3, eos=free[5])
    ended = PlainLoop().generate(core, PROMPT, max_new_tokens=12)
    assert ended.tokens == free[: free.index(free[5]) + 1] == Autoregressive().generate(core, PROMPT, max_new_tokens=12).tokens
    assert len(PlainLoop().generate(core, PROMPT, max_new_tokens=1).tokens) == 1


def test_start_states_are_those_of_the_other_decoders(random_core):
    core = random_core("huginn", gain=1.0)
    zero = PlainLoop().generate(core, PROMPT, max_new_tokens=12, start_state="zero").tokens
    assert zero == Autoregressive().generate(core, PROMPT, max_new_tokens=12, start_state="zero").tokens
    assert zero != PlainLoop().generate(core, PROMPT, max_new_tokens=12, seed=1).tokens


def test_every_token_makes_its_keys_and_values_anew():
    """As transformers' DynamicCache does: a baseline that wrote in place would be another thing."""
    from transformers import DynamicCache

    slot = _Slot(DynamicCache(), 0)
    first, _ = slot.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    second, values = slot.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 3)
    assert second.shape == values.shape == (1, 2, 4, 4)
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_what_it_cannot_do_is_refused(random_core):
    core = random_core("huginn")
    for options in ({"fwd_hooks": [("x", print)]}, {"sampling": object()}, {"prefix": 3}):
        with pytest.raises(SettingError, match=f"takes no {next(iter(options))}"):
            PlainLoop().generate(core, PROMPT, **options)
    with pytest.raises(SettingError, match="one prompt at a time"):
        PlainLoop().generate_batch(core, [PROMPT])
    with pytest.raises(SettingError, match="whole texts"):
        PlainLoop().stream(core, PROMPT)
    with pytest.raises(ContextError):
        PlainLoop().generate(core, PROMPT, max_new_tokens=1000)
    with pytest.raises(PromptError):
        PlainLoop().generate(core, [])


def test_it_runs_in_the_benchmark(random_core):
    frame = bench(random_core("ouro", gain=0.3), [PROMPT, PROMPT[:3]], [PlainLoop()], max_new_tokens=6).frame
    own = frame[frame.decoder == "plain loop"]
    assert len(own) == 2 and (own.token_mismatches == 0).all() and own.lossless.all() and (own.decode_seconds > 0).all()
