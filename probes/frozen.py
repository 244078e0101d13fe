"""The residual stream of a looped model as a linear map, read backwards: what one direction of the logits sees of each component.

In a given run every norm divides by a number that the run has fixed. With those numbers held, what follows a
component's output is linear and acts on each position alone: norms on the sum, norms that close a loop, the adapter,
the readout matrix. A covector on the logits is pulled back through these maps once, last block first, and its product
with each component's output is that component's direct contribution. Attention and MLPs are not passed through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.errors import SettingError
from loopscope.hook_names import EMBED, STATE, block_prefix, hook_names
from loopscope.models.dory import DoryBlock, L2_EPS
from loopscope.models.layers import BranchSandwichBlock, PostNormBlock, PreNormBlock, SumSandwichBlock
from loopscope.models.parcae import ParcaeBlock
from loopscope.tap import RecordingTap

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

# Blocks that add what their hooks show, and nothing else, to a stream that they do not touch.
_ADDITIVE = (BranchSandwichBlock, PreNormBlock, PostNormBlock, ParcaeBlock)
FAMILIES = ("huginn", "raven", "ouro", "nanbeige", "parcae", "dory", "hrm_text")
_NEEDED = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")


class Share(NamedTuple):
    """A component's contribution at every position: value [n] in logits."""

    part: str
    depth: int
    cycle: int
    layer: int
    branch: str
    value: Tensor


def rms_factor(norm: Any, x: Tensor) -> Tensor:
    """What an RMS norm multiplies x [n, d] by, channel by channel, with its scale as x has it: [n, d]."""
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    weight = getattr(norm, "weight", None)
    return factor.expand_as(x) if weight is None else factor * weight.double()


def l2_factor(x: Tensor) -> Tensor:
    """Dory's norm as a factor: [n, 1]."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class FrozenRun:
    """One run over ids [n], recorded, whose stream can be read backwards.

    `logits` [n, vocab] are the run's own; everything else is computed in float64. also: further block hooks to record. `onto`:
    after `shares`, the covector [n, d] on what each attention adds, by (part, depth, cycle, layer). Raises SettingError for a
    model whose wiring this page does not know.
    """

    def __init__(self, core: LoopedCore, ids: Tensor, depth: int, *, start_state: str | Tensor | None = None, seed: int = 0,
                 also: Iterable[str] = ()) -> None:
        blocks = [*core.prelude, *core.blocks, *core.coda]
        unknown = next((b for b in blocks if not isinstance(b, (*_ADDITIVE, SumSandwichBlock, DoryBlock))), None)
        if core.family not in FAMILIES or unknown is not None:
            found = core.family if unknown is None else f"{core.family}, with blocks of type {type(unknown).__name__}"
            raise SettingError(f"what a component adds to a logit is defined by how a model is wired, and the wiring of {found} is not "
                               f"known here; known: {', '.join(FAMILIES)}")
        self.core, self.depth = core, depth
        self.onto: dict[tuple[str, int, int, int], Tensor] = {}
        wanted = {name for name in hook_names(core.config, depth) if name.endswith((*_NEEDED, STATE, EMBED, *also))}
        self._tap = RecordingTap(wanted)
        self.logits = core(ids, depth, start_state=start_state, seed=seed, tap=self._tap)[0]
        x = core.embed(core.as_tokens(ids))
        self._start = core.start(x, seed=seed, start_state=start_state)[0].double()
        self._x = x[0, :, : core.config.d_model].double()

    def at(self, name: str) -> Tensor:
        """A recorded activation [n, d] in float64."""
        return self._tap[name][0].double()

    def directions(self, tokens: Tensor) -> Tensor:
        """tokens [n] -> [n, d]: the covector of each token's logit on what the head reads."""
        weight = (self.core.wte if self.core.head is None else self.core.head).weight
        rows = weight[tokens].double()
        return rows * self._logit_scale()[tokens, None] if self.core.family == "dory" else rows

    def mean_direction(self) -> Tensor:
        """[d]: the covector of the mean logit of the vocabulary."""
        weight = (self.core.wte if self.core.head is None else self.core.head).weight.double()
        return (weight * self._logit_scale()[:, None] if self.core.family == "dory" else weight).mean(0)

    def _logit_scale(self) -> Tensor:
        core = cast(Any, self.core)
        return core.logit_scale.double() / core.config.init_range

    # ---- backwards ------------------------------------------------------------------------------------------

    def shares(self, g: Tensor) -> list[Share]:
        """g [n, d], a covector on what the head reads -> every component's contribution. They add up to g times that."""
        found: list[Share] = []
        g = self._pull_readout(g, found)
        entered: dict[int, Tensor] = {}  # depth -> the covector on x of what the recurrence injected; 0: of x as the start state
        for r in range(self.depth, 0, -1):
            if self.core.family == "hrm_text":
                g = self._pull_cycles(r, g, found)
                continue
            g = self._pull_close(r, g)
            for layer in reversed(range(len(self.core.blocks))):
                g = self._pull_block(self.core.blocks[layer], "core", r, 0, layer, g, found)
            g, onto_x = self._pull_inject(r, g)
            if onto_x is not None:
                entered[r] = onto_x
        width = self.core.config.d_model
        if self.core.family == "hrm_text":  # z_H starts as the embedding, z_L as a learned vector
            entered[0] = g[..., :width]
            found.append(Share("start", 0, 0, -1, "start", (g[..., width:] * self._start[..., width:]).sum(-1)))
        elif self.core.has_start_state:
            found.append(Share("start", 0, 0, -1, "start", (g * self._start[..., :width]).sum(-1)))
        else:
            entered[0] = g
        for depth, onto_x in sorted(entered.items()):
            self._pull_prelude(depth, onto_x, found)
        return found

    def _pull_readout(self, g: Tensor, found: list[Share]) -> Tensor:
        """From what the head reads to the last state."""
        core, family = cast(Any, self.core), self.core.family
        coda, last = len(core.coda), self.at(f"depth.{self.depth}.{STATE}")
        if family == "huginn":
            into = rms_factor(core.norm, last)
        end = self.at(block_prefix("coda", coda - 1) + "hook_resid_post") if coda else last
        if not coda and family == "huginn":
            end = last * into
        elif not coda and family == "parcae":
            end = F.linear(last, core.readout.weight.double())
        if family in ("huginn", "raven", "parcae") or (family == "nanbeige" and core.config.variant == "norm once"):
            g = g * rms_factor(core.norm, end)
        elif family == "dory":
            g = g * l2_factor(end)
        for layer in reversed(range(coda)):
            g = self._pull_block(core.coda[layer], "coda", 0, 0, layer, g, found)
        if family == "huginn":
            return g * into
        return g @ core.readout.weight.double() if family == "parcae" else g

    def _pull_close(self, r: int, g: Tensor) -> Tensor:
        """Through the norm that closes a recurrence, where there is one."""
        core = self.core
        if core.family == "ouro" or (core.family == "nanbeige" and core.config.variant != "norm once"):
            last = block_prefix("blocks", len(core.blocks) - 1, r) + "hook_resid_post"
            return g * rms_factor(core.norm, self.at(last))
        return g

    def _pull_inject(self, r: int, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """From a core's input to (the state before it, x)."""
        core = cast(Any, self.core)
        if core.family in ("huginn", "raven"):
            onto_state, onto_x = (g @ core.adapter.weight.double()).chunk(2, dim=-1)
            return onto_state, onto_x
        if core.family == "parcae":
            a = core.adapter
            dt = F.softplus(a.dt_bias.double())
            return g * torch.exp(-dt * torch.exp(a.A_log.double())), (g * dt) @ a.B.double()
        if core.family == "dory":
            state = self.at(f"depth.{r - 1}.{STATE}") if r > 1 else self._start
            return g * l2_factor(state), g * l2_factor(self._x)
        return g, None

    def _pull_cycles(self, r: int, g: Tensor, found: list[Share]) -> Tensor:
        """HRM-Text's recurrence: z_H <- norm(slow(z_H + z_L)), after z_L <- norm(fast(z_L + z_H)) several times."""
        core, width = cast(Any, self.core), self.core.config.d_model
        g_high, g_low = (g, torch.zeros_like(g)) if g.shape[-1] == width else (g[..., :width], g[..., width:])
        for cycle in (0, *range(core.config.inner_cycles, 0, -1)):
            blocks = core.low if cycle else core.blocks
            end = self.at(block_prefix("blocks", len(blocks) - 1, r, cycle) + "hook_resid_post")
            onto = (g_low if cycle else g_high) * rms_factor(core.norm, end)
            for layer in reversed(range(len(blocks))):
                onto = self._pull_block(blocks[layer], "inner" if cycle else "core", r, cycle, layer, onto, found)
            g_high, g_low = (g_high + onto, onto) if cycle else (onto, g_low + onto)
        return torch.cat((g_high, g_low), dim=-1)

    def _pull_prelude(self, depth: int, g: Tensor, found: list[Share]) -> None:
        core = cast(Any, self.core)
        if core.family == "parcae" and core.prelude_norm is not None:
            last = block_prefix("prelude", len(core.prelude) - 1) + "hook_resid_post" if len(core.prelude) else EMBED
            g = g * rms_factor(core.prelude_norm, self.at(last))
        for layer in reversed(range(len(core.prelude))):
            g = self._pull_block(core.prelude[layer], "prelude", depth, 0, layer, g, found)
        found.append(Share("embedding", depth, 0, -1, "embedding", (g * self.at(EMBED)).sum(-1)))

    def _pull_block(self, block: Any, part: str, depth: int, cycle: int, layer: int, g: Tensor, found: list[Share]) -> Tensor:
        """From a block's output to its input, noting what its attention and its MLP contribute."""
        where = "blocks" if part in ("core", "inner") else part
        prefix = block_prefix(where, layer, depth, cycle)
        pre, attn, mid, mlp = (self.at(prefix + name) for name in _NEEDED[:4])
        if isinstance(block, SumSandwichBlock):
            g = g * rms_factor(block.norm_4, mid + mlp)
            onto_mlp = g
            g = g * rms_factor(block.norm_2, pre + attn)
            onto_attn = g
        elif isinstance(block, DoryBlock):  # x <- (1 - a) L2(x) + a L2(branch): the hooks show the step, a (L2(branch) - L2(x))
            rates = [(rate.double() * block.scale).abs() for rate in (block.lambda_1, block.lambda_2)]
            onto_mlp, mlp = g, mlp + rates[1] * mid * l2_factor(mid)
            g = g * (1 - rates[1]) * l2_factor(mid)
            onto_attn, attn = g, attn + rates[0] * pre * l2_factor(pre)
            g = g * (1 - rates[0]) * l2_factor(pre)
        else:
            onto_mlp = onto_attn = g
        found.append(Share(part, depth, cycle, layer, "mlp", (onto_mlp * mlp).sum(-1)))
        self.onto[part, depth, cycle, layer] = onto_attn
        found.append(Share(part, depth, cycle, layer, "attn", (onto_attn * attn).sum(-1)))
        return g
