"""What holds in every family whatever its sizes: a row does not depend on its batch, on pads, on the cache, or on how its prompt is split.

Models and prompts are drawn in float64. Dory's shared slots are left out of the splits: there the chunks are part of the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopscope.models.looped import LoopedCore
from loopscope.random_models import FAMILIES, make_random_core, settings_of
from loopscope.tap import FunctionTap

EXAMPLES = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MOST = 20  # positions


@dataclass
class Case:
    core: LoopedCore
    tokens: torch.Tensor  # [batch, n]
    seed: int  # of the start states
    prefix: int

    def __call__(self, tokens: torch.Tensor, **options) -> torch.Tensor:
        return self.core(tokens, seed=self.seed, **{"prefix": self.prefix} | options)

    @cached_property
    def tolerance(self) -> float:
        """docs/algorithms.md, 2.7: 100 times what rounding does to this model and prompt, at least 1e-12.

        Measured by moving every embedding by one unit in the last place: another row count would be what is tested here.
        """
        sign = torch.randn(self.core.config.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sign()
        nudged = FunctionTap(self.core, [("hook_embed", lambda x, hook: x * (1 + sign * 2.0**-52))])
        moved = (self(self.tokens, tap=nudged) - self(self.tokens)).abs().max().item()
        assert moved < 1e-7, "this draw is too chaotic to show anything"
        return max(1e-12, 100 * moved)

    def close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got, want, atol=self.tolerance, rtol=0)


@st.composite
def cases(draw, family: str, prefix: bool = False) -> Case:
    kv, group, d_head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(2, 6))
    known = settings_of(family)
    heads = kv * group
    if family == "parcae":  # its value gates read 32 channels
        d_head = 2 * -(-32 // (2 * heads))
    width = 4 * draw(st.integers(2, 10)) if "d_head" in known else heads * d_head
    drawn = {
        "n_heads": heads, "n_kv_heads": kv, "d_head": d_head, "d_model": width, "d_mlp": draw(st.integers(8, 60)),
        "n_prelude": draw(st.integers(0, 2)), "n_core": draw(st.integers(1, 3)), "n_coda": draw(st.integers(0, 2)),
        "depth": draw(st.integers(1, 5)), "inner_cycles": draw(st.integers(1, 3)), "window": draw(st.integers(1, 8)),
        "vocab_size": draw(st.integers(20, 90)), "context": draw(st.integers(2 * MOST, 90)), "norm_eps": 10.0 ** -draw(st.integers(3, 7)),
        "rope_theta": 10.0 ** draw(st.integers(2, 7)), "tied": draw(st.booleans()), "qk_bias": draw(st.booleans())}
    if family.startswith("raven"):
        drawn["qk_bias"] = False
    core = make_random_core(family, seed=draw(st.integers(0, 99)), gain=draw(st.sampled_from([0.2, 0.6, 1.0])),
                            **{name: value for name, value in drawn.items() if name in known})
    n = draw(st.integers(2, MOST))
    tokens = torch.randint(0, core.config.vocab_size, (draw(st.integers(1, 3)), n),
                           generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return Case(core, tokens, draw(st.integers(0, 9)), draw(st.integers(0, n)) if prefix and core.config.prefix_lm else 0)


def splits(n: int, first: int = 1):
    """Sizes of the chunks of n positions, the first at least `first`."""
    cuts = st.sets(st.integers(first, n - 1)) if first < n else st.just(set())
    return cuts.map(lambda at: [b - a for a, b in zip((0, *sorted(at)), (*sorted(at), n))])


@pytest.mark.support("batches")
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@EXAMPLES
@torch.inference_mode()
def test_a_row_of_a_batch_is_the_row_alone(family, data):
    case = data.draw(cases(family, prefix=True))
    together = case(case.tokens)
    for row, tokens in enumerate(case.tokens):
        case.close(together[row], case(tokens)[0])


@pytest.mark.support("splits")
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@EXAMPLES
@torch.inference_mode()
def test_any_split_of_a_prompt_through_the_cache_is_one_pass_without_one(family, data):
    case = data.draw(cases(family, prefix=True))
    batch, n = case.tokens.shape
    whole, once = case(case.tokens), case.core.make_cache(n, batch=batch)
    case.close(case(case.tokens, cache=once), whole)
    for sizes in (data.draw(splits(n, max(1, case.prefix))), [max(1, case.prefix)] + [1] * (n - max(1, case.prefix))):
        cache = case.core.make_cache(n, batch=batch)
        case.close(torch.cat([case(chunk, cache=cache) for chunk in case.tokens.split(sizes, dim=1)], 1), whole)
        held = cache.materialised()
        for name, tensor in once.materialised().items():
            case.close(held[name], tensor)


@pytest.mark.support("padding")
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@EXAMPLES
@torch.inference_mode()
def test_a_padded_row_is_the_row_alone_in_one_pass_and_in_chunks_through_the_cache(family, data):
    case = data.draw(cases(family))
    batch, n = case.tokens.shape
    pads = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=batch, max_size=batch)))
    mask = torch.arange(n) >= pads[:, None]
    cache, at, parts = case.core.make_cache(n, batch=batch), 0, []
    for size in data.draw(splits(n)):  # a chunk may hold nothing but pads of a row
        chunk = case.tokens[:, at : at + size]
        parts.append(case(chunk, cache=cache, attention_mask=mask[:, at : at + size] if at < pads.max() else None))
        at += size
    for padded in (case(case.tokens, attention_mask=mask), torch.cat(parts, 1)):
        assert padded.isfinite().all()
        for row, begin in enumerate(pads.tolist()):
            case.close(padded[row, begin:], case(case.tokens[row, begin:])[0])
