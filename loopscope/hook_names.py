"""Names of the hooks of a looped model: TransformerLens's names with the recurrence depth in front.

    hook_embed                                   the embedding, scaled, before the prelude
    prelude.{l}.NAME                             prelude block l
    depth.{r}.blocks.{l}.NAME                    core block l in the r-th recurrence, r = 1..T
    depth.{r}.l_cycle.{i}.blocks.{l}.NAME        block l of the inner stack in inner cycle i = 1.. of the r-th recurrence, before
                                                 the core blocks (HRM-Text)
    depth.{r}.hook_state                         the state after r recurrences (Ouro: after the norm that closes a loop)
    coda.{l}.NAME                                coda block l
    hook_final                                   what the head reads, after the last norm

NAME is one of BLOCK_NAMES. Each fires once per forward pass. This module knows nothing of TransformerLens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Union

from loopscope.errors import HookError, closest

if TYPE_CHECKING:
    from loopscope.models.config import LoopedConfig

NamesFilter = Union[None, str, Iterable[str], Callable[[str], bool]]

EMBED, STATE, FINAL, PATTERN = "hook_embed", "hook_state", "hook_final", "attn.hook_pattern"

# In the order in which they fire. q, k, v, z: [batch, pos, heads, d_head] (k and v: kv heads); pattern:
# [batch, heads, query, key]; the others [batch, pos, d_model].
BLOCK_NAMES = ("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k",
               PATTERN, "attn.hook_z", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")

SHORT_NAMES = {name.split("hook_")[1]: name for name in BLOCK_NAMES}  # "q" -> "attn.hook_q", "resid_pre" -> ...

_BY_HEAD = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_rot_q", "hook_rot_k")


def block_prefix(part: str, layer: int, depth: int | None = None, cycle: int = 0) -> str:
    """`prelude.0.`, `depth.3.blocks.0.` (part "blocks"), `depth.3.l_cycle.1.blocks.0.` (in an inner cycle) or `coda.0.`."""
    if part != "blocks":
        return f"{part}.{layer}."
    return f"depth.{depth}.l_cycle.{cycle}.blocks.{layer}." if cycle else f"depth.{depth}.blocks.{layer}."


def depth_names(config: LoopedConfig, depth: int) -> list[str]:
    """The names of one recurrence, in firing order."""
    cycles = (*range(1, config.inner_cycles + 1), 0)
    blocks = [block_prefix("blocks", layer, depth, cycle) + name
              for cycle in cycles for layer in range(config.n_core) for name in BLOCK_NAMES]
    return [*blocks, f"depth.{depth}.{STATE}"]


def hook_names(config: LoopedConfig, depth: int) -> list[str]:
    """Every name of a pass of `depth` recurrences, in firing order."""
    def outer(part: str, count: int) -> list[str]:
        return [block_prefix(part, layer) + name for layer in range(count) for name in BLOCK_NAMES]

    core = [name for r in range(1, depth + 1) for name in depth_names(config, r)]
    return [EMBED, *outer("prelude", config.n_prelude), *core, *outer("coda", config.n_coda), FINAL]


def depth_of(name: str) -> int | None:
    """The recurrence a name belongs to; None for prelude, coda, embedding and head."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "depth" and number.isdigit() else None


def layer_of(name: str) -> int | None:
    """The block index within its part (prelude, core or coda); None where a name has no layer."""
    parts = name.split(".")
    at = parts.index("blocks") + 1 if parts[0] == "depth" and "blocks" in parts else 1 if parts[0] in ("prelude", "coda") else None
    return int(parts[at]) if at is not None and len(parts) > at and parts[at].isdigit() else None


def cycle_of(name: str) -> int:
    """The inner cycle a name belongs to, from 1; 0 for the core itself and outside it."""
    parts = name.split(".", 4)
    return int(parts[3]) if len(parts) > 4 and parts[2] == "l_cycle" else 0


def position_axis(name: str) -> int:
    """The axis that counts positions (query positions for the pattern), from the end."""
    return -3 if name.endswith(_BY_HEAD) else -2


def match_names(wanted: NamesFilter, known: Collection[str]) -> list[str]:
    """The known names that a filter selects, in their own order.

    wanted: None (all), one name, several names, or a predicate. Raises HookError where a name, or the whole
    predicate, matches nothing: a hook that silently never fires looks exactly like an edit without effect.
    """
    if wanted is None:
        return list(known)
    if callable(wanted):
        found = [name for name in known if wanted(name)]
        if not found:
            examples = [n for n in known if n.endswith(("attn.hook_v", STATE, EMBED))]
            raise HookError(f"the filter matches none of the {len(known)} hook names; they look like "
                            + ", ".join(map(repr, (examples or list(known))[:4])))
        return found
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in known:
            raise HookError(_unknown(name, known))
    if len(names) == 1:
        return names
    if not names:
        raise HookError("an empty list of hook names matches nothing; pass None for all of them")
    chosen = set(names)
    return [name for name in known if name in chosen]


def _unknown(name: object, known: Collection[str]) -> str:
    if not isinstance(name, str):
        return f"hook names are text, got {name!r}"
    depth, deepest = depth_of(name), max((depth_of(n) or 0 for n in known), default=0)
    if depth is not None and depth > deepest and name.replace(f"depth.{depth}.", f"depth.{deepest}.", 1) in known:
        return (f"hook name {name!r} is at depth {depth}, but depths 1 to {deepest} are hooked here; "
                f"run with depth={depth}, or call model.grow({depth}) before adding the hook")
    return f"no hook is named {name!r}; closest: {closest(name, known) or 'none'}"
