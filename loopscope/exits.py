"""Exit rules: when a token may leave the loop before full depth. Every one is lossy: what it decides is not what depth T gives.

A rule is its settings. What it remembers of a row from depth to depth is a tensor [batch, rows, ...] that travels with the
row as its state does, so a caller may slice, concatenate and reorder rows whose depths differ:

    memory = rule.begin(core, batch, rows)
    for each recurrence:  stop, memory = rule.update(memory, state, previous, logits, core)

Sources: Ouro's gate, docs/families.md, section 2; the other criteria but one are those of Huginn's own
generate_with_adaptive_compute (seal-rg/recurrent-pretraining, recpre/raven_modeling_minimal.py, the PerIterationExitEvaluator
classes), with its default thresholds, row by row and not as a mean over the rows of a call. They read states and logits only, so
they run on every family.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore


@dataclass(frozen=True)
class ExitRule(ABC):
    """Stop a row at the first depth where the criterion passes `threshold`; rows it never stops run to full depth."""

    threshold: float
    name: ClassVar[str]
    default: ClassVar[float | None]  # the threshold where none is given; None: it has to be given
    reads: ClassVar[bool] = False  # whether it needs the logits of every depth, so that each recurrence also costs a readout
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)) or not 0 < self.threshold < math.inf:
            raise SettingError(f"the threshold of the exit rule {self.name!r} must be a positive number, got {self.threshold!r}")

    @property
    def label(self) -> str:
        """Name and threshold; `exit_rule(label)` is this rule again."""
        return f"{self.name} {self.threshold!r}"

    def check(self, core: LoopedCore) -> None:
        """Raise SettingError where this model cannot run the rule."""

    def begin(self, core: LoopedCore, batch: int, rows: int) -> Tensor:
        """What is remembered of rows that have not run yet, [batch, rows, ...]."""
        return self._memory(core, batch, rows, 0)

    @abstractmethod
    def update(self, memory: Tensor, state: Tensor, previous: Tensor, logits: Tensor | None, core: LoopedCore) -> tuple[Tensor, Tensor]:
        """After one recurrence of the rows: (whether each stops here [batch, rows], what is remembered now).

        state, previous [batch, rows, d_model or more]: after and before it; before the first that is the start state.
        logits [batch, rows, vocab]: what `state` reads out as; None where the rule does not read.
        """

    @staticmethod
    def _memory(core: LoopedCore, batch: int, rows: int, width: int, value: float = 0.0) -> Tensor:
        return torch.full((batch, rows, width), value, dtype=torch.promote_types(core.dtype, torch.float32), device=core.device)


class Gate(ExitRule):
    """Ouro's exit gate: p_t = lambda_t prod_{j<t} (1 - lambda_j); stop at the first depth where p_1 + .. + p_t >= threshold.

    At full depth the remainder makes the sum 1. The sigmoid is taken in float32 or better: in bfloat16 it saturates, and a
    threshold of 1 would stop rows early.
    """

    name, default = "gate", None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold > 1:
            raise SettingError(f"the threshold of the exit rule 'gate' is a probability, at most 1, got {self.threshold!r}")

    def check(self, core):
        check_gate(core)

    def begin(self, core, batch, rows):
        """[.., 0]: probability of still being here; [.., 1]: of having left."""
        memory = self._memory(core, batch, rows, 2)
        memory[..., 0] = 1
        return memory

    def update(self, memory, state, previous, logits, core):
        leave = torch.sigmoid(core.gate(_stream(state, core)).to(memory.dtype)).squeeze(-1)
        here, gone = memory.unbind(-1)
        memory = torch.stack((here * (1 - leave), gone + here * leave), -1)
        return memory[..., 1] >= self.threshold, memory


class LatentDiff(ExitRule):
    """Huginn's latent-diff: |h_r - h_{r-1}| / |h_r| < threshold."""

    name, default = "latent-diff", 0.03

    def update(self, memory, state, previous, logits, core):
        state, previous = (_stream(h, core).to(memory.dtype) for h in (state, previous))
        return (state - previous).norm(dim=-1) / state.norm(dim=-1) < self.threshold, memory


class StateChange(ExitRule):
    """|h_r - h_{r-1}| / max(|h_{r-1}|, 1e-6) < threshold: latent-diff as the wavefront's lanes use it (docs/algorithms.md, 2.3).

    It divides by the state before, not after; from a zero start no row can stop at depth 1.
    """

    name, default = "state-change", 0.03

    def update(self, memory, state, previous, logits, core):
        state, previous = (_stream(h, core).to(memory.dtype) for h in (state, previous))
        return (state - previous).norm(dim=-1) / previous.norm(dim=-1).clamp(min=1e-6) < self.threshold, memory


class Cosine(ExitRule):
    """1 - cos(h_r, h_{r-1}) < threshold."""

    name, default = "cosine", 1e-3

    def update(self, memory, state, previous, logits, core):
        state, previous = (_stream(h, core).to(memory.dtype) for h in (state, previous))
        return 1 - (state * previous).sum(-1) / (state.norm(dim=-1) * previous.norm(dim=-1)) < self.threshold, memory


class EntropyDiff(ExitRule):
    """|H_r - H_{r-1}| < threshold, H the entropy of the output distribution in nats. Nothing stops at depth 1."""

    name, default, reads = "entropy-diff", 1e-3, True

    def begin(self, core, batch, rows):
        return self._memory(core, batch, rows, 1, math.inf)

    def update(self, memory, state, previous, logits, core):
        entropy = torch.special.entr(logits.to(memory.dtype).softmax(-1)).sum(-1, keepdim=True)
        return (entropy - memory).abs().squeeze(-1) < self.threshold, entropy


class KL(ExitRule):
    """KL(p_{r-1} || p_r) < threshold in nats; p_0 is uniform. The code's default is 1e-3, the Huginn paper's threshold 5e-4."""

    name, default, reads = "kl", 1e-3, True

    def begin(self, core, batch, rows):
        return self._memory(core, batch, rows, core.config.vocab_size, -math.log(core.config.vocab_size))

    def update(self, memory, state, previous, logits, core):
        now = self._log_probs(logits.to(memory.dtype))
        return (memory.exp() * (memory - now)).sum(-1) < self.threshold, now

    def _log_probs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


class MinPKL(KL):
    """KL between distributions whose tokens below a tenth of the most probable one are levelled to 1 / vocab before they sum to 1."""

    name, default = "minp-kl", 1e-5

    def _log_probs(self, logits):
        probs = logits.softmax(-1)
        rare = probs < 0.1 * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(rare, 1 / logits.shape[-1])
        return (probs / probs.sum(-1, keepdim=True)).log()


class ArgmaxStability(ExitRule):
    """The top-1 token has stayed the same for `threshold` recurrences: threshold + 1 equal top-1 tokens in a row."""

    name, default, reads = "argmax-stability", 5, True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold > 2**31 or self.threshold != int(self.threshold):
            raise SettingError(f"the threshold of the exit rule {self.name!r} counts recurrences: a whole number, got {self.threshold!r}")
        object.__setattr__(self, "threshold", int(self.threshold))

    def begin(self, core, batch, rows):
        """[.., 0]: the last top-1 token; [.., 1]: for how many recurrences it has stayed."""
        return torch.tensor([-1, 0], device=core.device).repeat(batch, rows, 1)

    def update(self, memory, state, previous, logits, core):
        token = logits.argmax(-1)
        stayed = torch.where(token == memory[..., 0], memory[..., 1] + 1, 0)
        return stayed >= self.threshold, torch.stack((token, stayed), -1)


EXIT_RULES: dict[str, type[ExitRule]] = {
    rule.name: rule for rule in (Gate, LatentDiff, StateChange, Cosine, EntropyDiff, KL, MinPKL, ArgmaxStability)}


def exit_rule(name: str | ExitRule, threshold: float | None = None) -> ExitRule:
    """A rule by name, with its threshold (default: the families' own) given here or in the string: "kl", "kl 5e-4", "gate:0.5".

    Raises SettingError for names and thresholds that are none.
    """
    if isinstance(name, ExitRule) and threshold is None:
        return name
    if not isinstance(name, str):
        raise SettingError(f"an exit rule is one of {', '.join(EXIT_RULES)}, with a threshold: 'kl 5e-4'; got {name!r}")
    word, *rest = re.split(r"[\s:=]+", name.strip())
    if word not in EXIT_RULES:
        raise SettingError(f"exit rule {word!r} is unknown; the nearest are {closest(word, EXIT_RULES)}. All: {', '.join(EXIT_RULES)}")
    if len(rest) + (threshold is not None) > 1:
        given = [*rest, *([] if threshold is None else [str(threshold)])]
        raise SettingError(f"the exit rule {word!r} takes one threshold, got {' and '.join(given)}")
    rule = EXIT_RULES[word]
    if rest:
        try:
            threshold = float(rest[0])
        except ValueError:
            raise SettingError(f"the threshold of the exit rule {word!r} must be a number, got {rest[0]!r}") from None
    if threshold is None:
        threshold = rule.default
    if threshold is None:
        raise SettingError(f"the exit rule {word!r} has no default threshold; give one, for example '{word} 0.5'")
    return rule(threshold)


def check_gate(core: LoopedCore) -> None:
    """Raise SettingError on a model without an exit gate, naming the families that have one."""
    if hasattr(core, "exit_pdf"):
        return
    from loopscope.models.registry import CLASSES, family_class

    gated = [family for family in sorted(CLASSES) if hasattr(family_class(family), "exit_pdf")]
    others = ", ".join(name for name in EXIT_RULES if name != Gate.name)
    raise SettingError(f"{core.config.family} has no exit gate; families with one: {', '.join(gated)}. Rules for every family: {others}")


def _stream(state: Tensor, core: LoopedCore) -> Tensor:
    """The residual stream of a state, without what else travels with the row."""
    return state[..., : core.config.d_model]
