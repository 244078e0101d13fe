"""torch.compile for what lies between a block's matrix products: norms, and the gate of its MLP. An option, off by default.

    compile_pointwise(core)        # from now on
    uncompile(core)

Whole blocks are not compiled: their attention reads a cache at places that change with every call. So hooks stay alive, since no hook
point lies within what is compiled. On a CPU compiling costs more per call than fusing saves (docs/howto/fast.md); it is meant for
devices on which a kernel's launch counts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.models.layers import GatedMLP, RMSNorm
from loopscope.models.looped import LoopedCore


def compile_pointwise(core: LoopedCore, **options: Any) -> int:
    """Compile a model's norms and MLP gates; how many modules run compiled now. options: of torch.compile, such as backend.

    Results may differ from uncompiled ones by rounding, as fused kernels keep more digits between operations.
    """
    options = {"dynamic": True, **options}
    norm, gate = torch.compile(_normed, **options), torch.compile(_gated, **options)
    count = 0
    for module in core.modules():
        if type(module) in (RMSNorm, GatedMLP):
            forward = _norm_forward(module, norm) if type(module) is RMSNorm else _mlp_forward(module, gate)
            object.__setattr__(module, "forward", forward)
            count += 1
    return count


def uncompile(core: LoopedCore) -> None:
    """Undo compile_pointwise."""
    for module in core.modules():
        module.__dict__.pop("forward", None)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm_forward(module: nn.Module, norm: Any) -> Any:
    return lambda x: norm(x, module.weight, module.eps)


def _mlp_forward(module: nn.Module, gate: Any) -> Any:
    return lambda x: module.down(gate(module.gate_up(x)))  # type: ignore[operator]
