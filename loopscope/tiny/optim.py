"""Muon for the matrices, AdamW for everything else.

``torch.optim.Muon`` runs its Newton-Schulz iteration in bf16, which is slow on a CPU; this one stays in fp32.
Muon: K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of ``g`` [rows, cols] towards 1 (quintic Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: each update has a spectral norm of about ``lr`` times the shape's scale."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(m, group["momentum"]))  # Nesterov
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def build(model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """The two optimizers of a looped model; embeddings, heads, biases and norms go to AdamW.

    ``initial_lr`` is kept in every group so that a schedule can scale it.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        table = any(word in name for word in ("wte", "head", "gate.", "bias"))
        (matrices if p.ndim == 2 and not table else rest).append(p)
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, muon_lr, weight_decay=weight_decay),
        torch.optim.AdamW(rest, adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's learning rate to ``factor`` of its initial one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
