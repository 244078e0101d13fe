"""Compiled norms and gates: the same numbers, and hooks that fire all the same."""

import pytest
import torch

from decoders import Autoregressive, Wavefront
from loopscope.models.compiled import compile_pointwise, uncompile
from loopscope.models.layers import GatedMLP, RMSNorm
from loopscope.random_models import make_random_core


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_decodes_and_hooks_are_what_they_were(family, backend):
    core = make_random_core(family, gain=0.3, depth=3)
    edit = [("depth.3.hook_state", lambda x, hook: x.flip(-1))]

    def decoded():
        return [d.generate(core, [1, 2, 3], 8, fwd_hooks=hooks).tokens for d in (Autoregressive(), Wavefront(1)) for hooks in ((), edit)]

    plain = decoded()
    state = core(torch.tensor([[5, 6, 7]]))
    seen = []
    norm = RMSNorm.forward
    RMSNorm.forward = lambda self, x: seen.append(1) or norm(self, x)
    try:
        assert compile_pointwise(core, backend=backend) == sum(type(m) in (RMSNorm, GatedMLP) for m in core.modules()) > 4
        compiled = decoded()
        assert not seen, "every norm runs compiled"
        assert torch.allclose(core(torch.tensor([[5, 6, 7]])), state, rtol=1e-9)
        uncompile(core)
        core(torch.tensor([[5]]))
        assert seen
    finally:
        RMSNorm.forward = norm
    assert compiled == plain and plain[0] != plain[1], "and the edit does something"
