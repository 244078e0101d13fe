"""What a checkpoint is, from its config and its file headers: nothing of its weights is read.

    inspect_checkpoint("tiny-ouro")            -> Inspection; print it, or use its fields
    inspect_checkpoint("some/folder")             with weights: the tensor names are held to the config as well
    inspect_checkpoint("some/config.json")        a config alone is enough
    inspect_checkpoint("organisation/name")       a Hub id: its config and headers are fetched, a few kilobytes
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from loopscope.errors import CheckpointError, ContextError, SettingError
from loopscope.memory import Memory, kv_bytes, memory_needed, sized
from loopscope.models.config import LoopedConfig
from loopscope.models.loading import check_names, find_checkpoint, find_local
from loopscope.models.registry import config_from_dict, family_class
from loopscope.models.tensors import FLOATS, Stored, has_tensors, open_tensors, read_json
from loopscope.models.unfilled import unfilled

# First part of our own parameter names -> part of the model.
_PARTS = {"wte": "embedding", "prelude": "prelude", "blocks": "core", "low": "core", "adapter": "injection", "coda": "coda", "head": "head",
          "value_embeds": "value embeddings"}
_REST = "norms, gates, read-out"


@dataclass(frozen=True)
class Inspection:
    """parameters: count by part. kv_elements: K/V numbers that one token occupies, by slot policy. weights: what was found."""

    source: str
    config: LoopedConfig
    parameters: dict[str, int]
    kv_elements: dict[str, int]
    weights: str

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def kv_bytes(self, policy: str = "per depth", dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of K/V that one token occupies: "per depth" (what lossless decoding keeps) or "shared" (one slot for all depths)."""
        return self.kv_elements[policy] * dtype.itemsize

    def memory(self, positions: int, slots: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Memory:
        """What decoding so many positions takes; slots: K/V slots that depths share, None for the model's own."""
        return memory_needed(self.config, positions, self.total, slots=slots, dtype=dtype)

    def context_table(self, positions: int, dtype: torch.dtype = torch.bfloat16) -> str:
        """Lines: memory at this context, by how many K/V slots the depths share."""
        c = self.config
        own = c.kv_slots or c.depth
        if positions > c.context:
            raise ContextError(f"{positions} positions were asked for, but this model's context is {c.context}; ask for fewer")
        lines = [f"  memory at {positions:,} positions, {str(dtype).removeprefix('torch.')}"]
        for slots in sorted({own, *(s for s in (1, 4) if s < own)}, reverse=True):
            m = self.memory(positions, slots, dtype)
            name = ("a slot per depth" if slots == c.depth else f"{slots} shared slot{'s' if slots > 1 else ''}") + (
                " (this model)" if slots == own else ", approximate")
            lines.append(f"    {name:31}{sized(m.total)}: weights {sized(m.weights)}, K/V {sized(m.kv)}, "
                         f"what calls make {sized(m.working)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def text(self, dtype: torch.dtype = torch.bfloat16) -> str:
        """All of it, K/V for a cache of that dtype."""
        c = self.config
        heads = f"{c.n_heads} heads" if c.n_heads == c.n_kv_heads else f"{c.n_heads} heads on {c.n_kv_heads} key-value heads"
        calls = c.n_prelude + c.n_coda + c.depth * c.n_core * (1 + c.inner_cycles)
        inner = f" of 1 slow and {c.inner_cycles} fast cycles" if c.inner_cycles else ""
        scaling = "" if c.rope_scaling is None else f", {c.rope_scaling['rope_type']} scaling by {c.rope_scaling['factor']:g}"
        own = "shared" if c.kv_slots else "per depth"
        start = f"random, standard deviation {c.state_std:.4g}" if c.state_std else "the embedding" if c.state_std is None else "zero"
        number = str(dtype).removeprefix("torch.")
        lines = [
            ("family", c.family + (f" ({c.variant})" if c.variant else "")),
            ("loops", f"T = {c.depth}{inner}"),
            ("layers", f"{c.n_prelude} prelude + {c.n_core} looped + {c.n_coda} coda; {calls} layer calls per token"),
            ("width", f"{c.d_model}; {heads} of {c.d_head}; MLP {c.d_mlp}"),
            ("vocabulary", f"{c.vocab_size} tokens{', tied head' if c.tied else ''}"),
            ("context", f"{c.context} positions; rotary theta {c.rope_theta:g}{scaling}"),
            ("start state", start),
            *((name, f"{self.kv_bytes(policy, dtype):,} bytes per token in {number}{' (this model)' if policy == own else ''}")
              for policy, name in (("per depth", "K/V, a slot per depth"), ("shared", "K/V, one shared slot"))),
            ("parameters", f"{self.total:,}"),
            *((f"  {part}", f"{count:,}") for part, count in self.parameters.items() if count),
            ("weights", self.weights),
        ]
        return "\n".join([self.source, *(f"  {name:25}{text}" for name, text in lines)])


def inspect_checkpoint(source: str | os.PathLike, revision: str | None = None) -> Inspection:
    """source: a shipped model's name, a checkpoint folder, a config.json, or a Hub id, of which only the config and the headers
    of the weight files are fetched (revision: its branch, tag or commit). Raises UnknownModelError, CheckpointError.
    """
    raw, stored = _look(source, revision)
    config = config_from_dict(raw, None if stored is None else stored.keys())
    with unfilled():
        core = family_class(config.family)(config)
    if stored is None:
        weights = "none here; what only tensor names can tell was assumed"
    else:
        try:
            check_names(core, stored)
            weights = f"{len(stored)} tensors, all that the config asks for; {sum(t.nbytes for t in stored.values()) / 1e6:,.1f} MB"
        except CheckpointError as error:
            weights = f"INCOMPLETE: {error}"
    parameters = dict.fromkeys((*dict.fromkeys(_PARTS.values()), _REST), 0)
    for name, p in core.named_parameters():
        parameters[_PARTS.get(name.partition(".")[0], _REST)] += p.numel()
    kv = {name: kv_bytes(config, 1, slots=slots, dtype=torch.int8) for name, slots in (("per depth", config.depth), ("shared", 1))}
    return Inspection(str(source), config, parameters, kv, weights)


def _look(source: str | os.PathLike, revision: str | None) -> tuple[dict, dict[str, Stored] | None]:
    """config.json, and the tensors that lie beside it or None. Nothing of the weights is read."""
    try:
        path = Path(source).expanduser()
        alone = path.is_file()
    except (RuntimeError, OSError, ValueError):  # find_local says what is wrong with the name
        alone = False
    if alone and revision is None:
        return read_json(path), None
    if find_local(source) is None:
        from loopscope.models.hub import peek

        return peek(str(source), revision)
    folder = find_checkpoint(source, revision)
    return read_json(folder / "config.json"), open_tensors(folder) if has_tensors(folder) else None


def inspected(source: str | os.PathLike, context: int | None = None, dtype: str = "bfloat16") -> str:
    """The text of `loopscope inspect`. Raises also SettingError for an unknown dtype, ContextError beyond the model's context."""
    known = {str(d).removeprefix("torch."): d for d in FLOATS}
    if dtype not in known:
        raise SettingError(f"dtype {dtype!r} is unknown; use {', '.join(known)}")
    found = inspect_checkpoint(source)
    text = found.text(known[dtype])
    return text if context is None else f"{text}\n{found.context_table(context, known[dtype])}"
