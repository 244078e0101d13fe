"""Taps: what LoopedCore calls where an activation may be seen or replaced. No TransformerLens here.

    RecordingTap(names_filter)            collects activations by hook name
    FunctionTap(core, fwd_hooks)          calls fn(tensor, hook) like TransformerLens, and puts back what it returns
    LoopedModel.tap()                     fires TransformerLens hook points (loopscope/models/hooked.py)
    tapped(model, fwd_hooks, hook_drafts) what a decoder uses: a tap for any model, or None where nothing is hooked

A tap is passed to embed, recur, read or forward of a LoopedCore; None costs nothing. In a call whose rows lie at
different depths each depth's hook fires once, with that depth's rows only, [batch, rows, ...], and what it returns is
written back into those rows. `hook.ctx["positions"]` (int64 [rows], CPU) are their absolute positions,
`hook.ctx["role"]` says whether they are "target" rows or rows of a "draft", and `hook.ctx["sequence"]` which sequence of a
batched decode they belong to (0 elsewhere): a hook never sees two sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from loopscope.errors import HookError, closest
from loopscope.hook_names import (
    BLOCK_NAMES,
    EMBED,
    FINAL,
    PATTERN,
    STATE,
    NamesFilter,
    block_prefix,
    depth_of,
    hook_names,
    layer_of,
    match_names,
    position_axis,
)
from loopscope.rows import Merged

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore
    from loopscope.rows import Rows

TARGET, DRAFT = "target", "draft"
HookFn = Callable[..., Any]
Hooks = Sequence[tuple[NamesFilter, HookFn]]


class _Group(NamedTuple):
    """Rows of one call that one hook sees: their depth, their places in the call (None: all rows), and the context."""

    depth: int | None
    places: Tensor | None
    context: dict[str, Any]


class Tap:
    """Sorts the rows of a call by depth and role and fires hook names; a subclass says which and what they do.

    `role`: what the rows of the next calls are, "target" or "draft", or one of them per row. Draft rows fire only if
    `hook_drafts`. A tap is always true (LoopedCore tests it), so subclasses define no __len__.
    """

    def __init__(self, hook_drafts: bool = False) -> None:
        self.role: str | Sequence[str] = TARGET
        self.hook_drafts = hook_drafts

    # ---- what a subclass supplies ---------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        raise NotImplementedError

    def fire(self, name: str, tensor: Tensor, context: dict[str, Any]) -> Tensor:
        """The tensor to go on with. context: positions and role, for the hook's ctx."""
        raise NotImplementedError

    # ---- what decoders use ----------------------------------------------------------------------------------

    @property
    def draft(self) -> Tap | None:
        """The tap for calls whose rows are all drafts; None unless `hook_drafts`."""
        return self.as_role(DRAFT) if self.hook_drafts else None

    def as_role(self, role: str | Sequence[str]) -> Tap:
        """This tap for rows of another role: "target", "draft", or one of them per row of a mixed call."""
        unknown = {role} if isinstance(role, str) else set(role)
        if unknown - {TARGET, DRAFT}:
            raise HookError(f"a row's role is 'target' or 'draft', got {sorted(unknown - {TARGET, DRAFT})}")
        other = copy(self)  # shallow: hooks and records are shared
        other.role = role
        return other

    # ---- what LoopedCore calls ------------------------------------------------------------------------------

    def embed(self, x: Tensor, rows: Rows) -> Tensor:
        return self._at_once(EMBED, x, rows)

    def prelude(self, layer: int, rows: Rows) -> BlockTap | None:
        return self._block("prelude", layer, rows)

    def block(self, layer: int, rows: Rows, cycle: int = 0) -> BlockTap | None:
        """cycle: which run of an inner stack, from 1; 0 for the core itself."""
        return self._block("blocks", layer, rows, cycle)

    def coda(self, layer: int, rows: Rows) -> BlockTap | None:
        return self._block("coda", layer, rows)

    def state(self, h: Tensor, rows: Rows) -> Tensor:
        for group in self._groups(rows, by_depth=True):
            h = self._fire(f"depth.{group.depth}.{STATE}", h, group)
        return h

    def final(self, h: Tensor, rows: Rows) -> Tensor:
        return self._at_once(FINAL, h, rows)

    # ---- sorting rows ---------------------------------------------------------------------------------------

    def _groups(self, rows: Rows, by_depth: bool) -> list[_Group]:
        """Rows by (depth, role), rows without a role that fires left out."""
        if self.role == DRAFT and not self.hook_drafts:
            return []
        count = rows.count
        roles = [self.role] * count if isinstance(self.role, str) else list(self.role)
        if len(roles) != count:
            raise HookError(f"the tap was told the roles of {len(roles)} rows, but the call has {count}")
        depths = rows.depths if by_depth else [None] * count
        owners = rows.owners if isinstance(rows, Merged) else [0] * count
        members: dict[tuple[int | None, str, int], list[int]] = {}
        for i, key in enumerate(zip(depths, roles, owners)):
            if key[1] == TARGET or self.hook_drafts:
                members.setdefault(key, []).append(i)
        positions = torch.tensor(rows.positions)
        groups = []
        for (depth, role, sequence), found in members.items():
            places = None if len(found) == count else torch.tensor(found)
            context = {"positions": positions if places is None else positions[places], "role": role, "sequence": sequence}
            groups.append(_Group(depth, places, context))
        return groups

    def _block(self, part: str, layer: int, rows: Rows, cycle: int = 0) -> BlockTap | None:
        """None where no hook of this block is wanted: it then runs as if there were no tap at all."""
        groups = [(block_prefix(part, layer, g.depth, cycle), g) for g in self._groups(rows, by_depth=part == "blocks")]
        groups = [(prefix, g) for prefix, g in groups if any(self.wants(prefix + name) for name in BLOCK_NAMES)]
        return BlockTap(self, groups) if groups else None

    def _at_once(self, name: str, tensor: Tensor, rows: Rows) -> Tensor:
        if self.wants(name):
            for group in self._groups(rows, by_depth=False):
                tensor = self._fire(name, tensor, group)
        return tensor

    def _fire(self, name: str, tensor: Tensor, group: _Group, axis: int = 1) -> Tensor:
        if not self.wants(name):
            return tensor
        if group.places is None:
            return self._checked(name, tensor, group.context)
        index = group.places.to(tensor.device)
        # Always written back, since a hook may have edited its rows in place; out of place, for autograd.
        return tensor.index_copy(axis, index, self._checked(name, tensor.index_select(axis, index), group.context))

    def _checked(self, name: str, tensor: Tensor, context: dict[str, Any]) -> Tensor:
        """What the hooks of `name` make of a tensor. Another shape would be broadcast by some calls and refused by others."""
        shape, dtype = tensor.shape, tensor.dtype  # before: a hook may also resize what it is given
        new = self.fire(name, tensor, context)
        if not isinstance(new, Tensor) or new.shape != shape or new.dtype != dtype:
            found = f"{new.dtype} {list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise HookError(f"a hook on {name!r} returned {found}; it must return None or a tensor of {dtype} {list(shape)}")
        return new


class BlockTap:
    """The tap of one block call."""

    __slots__ = ("tap", "groups")

    def __init__(self, tap: Tap, groups: list[tuple[str, _Group]]) -> None:
        self.tap, self.groups = tap, groups

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for prefix, group in self.groups:
            tensor = self.tap._fire(prefix + name, tensor, group)
        return tensor

    def pattern(self, name: str = PATTERN) -> PatternEdit | None:
        """None where nobody looks at the pattern, so that the fused kernel runs and no pattern exists."""
        wanted = [(prefix + name, group) for prefix, group in self.groups if self.tap.wants(prefix + name)]
        return PatternEdit(self.tap, wanted) if wanted else None


class PatternEdit:
    """The hooks of one attention pattern: called with it, [batch, heads, rows, keys], gives what they make of it."""

    __slots__ = ("tap", "wanted")

    def __init__(self, tap: Tap, wanted: list[tuple[str, _Group]]) -> None:
        self.tap, self.wanted = tap, wanted

    def __call__(self, pattern: Tensor) -> Tensor:
        for full, group in self.wanted:
            pattern = self.tap._fire(full, pattern, group, axis=2)
        return pattern

    def part(self, start: int, count: int) -> PatternEdit | None:
        """The hooks of rows start..start+count-1 of a merged call: the rows of one sequence, whose keys are its own."""
        kept = []
        for full, group in self.wanted:
            if group.places is None:  # a merged call of one sequence
                kept.append((full, group))
            elif start <= int(group.places[0]) < start + count:
                kept.append((full, group._replace(places=None if len(group.places) == count else group.places - start)))
        return PatternEdit(self.tap, kept) if kept else None


@dataclass
class Record:
    """One firing: the activation (a copy), the absolute positions of its rows, and their role."""

    tensor: Tensor
    positions: Tensor
    role: str


class RecordingTap(Tap):
    """Keeps activations by hook name, over as many calls as it is passed to.

    `tap[name]`: [batch, pos, ...] over all positions seen, ascending; of a position seen twice, the last. `tap.records[name]`
    lists every firing. names_filter: None, a name, several names, or a predicate.
    """

    def __init__(self, names_filter: NamesFilter = None, hook_drafts: bool = False) -> None:
        super().__init__(hook_drafts)
        self.records: dict[str, list[Record]] = {}
        if names_filter is None:
            self._accepts: Callable[[str], bool] = lambda name: True
        elif callable(names_filter):
            self._accepts = names_filter
        else:
            self._accepts = frozenset([names_filter] if isinstance(names_filter, str) else names_filter).__contains__
        self._wanted: dict[str, bool] = {}

    def wants(self, name: str) -> bool:
        if name not in self._wanted:
            self._wanted[name] = bool(self._accepts(name))
        return self._wanted[name]

    def fire(self, name, tensor, context):
        record = Record(tensor.detach().clone(), context["positions"], context["role"])
        self.records.setdefault(name, []).append(record)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        """Raises HookError for a name that was not recorded, and for a pattern seen in several calls."""
        if name not in self.records:
            raise HookError(f"nothing was recorded at {name!r}; closest: {closest(name, self.records) or 'none, the tap saw no call'}")
        records = self.records[name]
        if len(records) == 1:
            return records[0].tensor
        if name.endswith(PATTERN):
            raise HookError(f"{name!r} was recorded in {len(records)} calls, whose rows read different numbers of keys; "
                            f"take them one by one from .records[{name!r}]")
        axis = position_axis(name)
        last = {int(p): i for i, p in enumerate(torch.cat([r.positions for r in records]))}
        index = torch.tensor([last[p] for p in sorted(last)])
        whole = torch.cat([r.tensor for r in records], axis)
        return whole.index_select(axis % whole.ndim, index.to(whole.device))


@dataclass
class HookSite:
    """What a FunctionTap's functions get as `hook`: the parts of a TransformerLens HookPoint that say where one is."""

    name: str
    ctx: dict[str, Any] = field(default_factory=dict)

    def depth(self) -> int:
        """Recurrences applied, 1..T. Raises HookError outside the core."""
        return _known(depth_of(self.name), self.name, "depth")

    def layer(self) -> int:
        """Block index within prelude, core or coda. Raises HookError where there is none."""
        return _known(layer_of(self.name), self.name, "layer")


def check_pairs(hooks: Any) -> Hooks:
    """`hooks` if they are (name or filter, function) pairs. Raises HookError."""
    if isinstance(hooks, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 and callable(pair[1]) for pair in hooks):
        return hooks
    raise HookError(f"hooks are a list of (name or filter, function) pairs, such as [('hook_embed', fn)], got {repr(hooks)[:80]}")


def _known(value: int | None, name: str, what: str) -> int:
    if value is None:
        raise HookError(f"{name!r} has no {what}")
    return value


class FunctionTap(Tap):
    """Forward hooks on a bare LoopedCore: [(name or filter, fn(tensor, hook))], None returned means unchanged.

    depth: the deepest recurrence hooked, T by default. Raises HookError for a name or filter that matches nothing.
    """

    def __init__(self, core: LoopedCore, fwd_hooks: Hooks, depth: int | None = None, hook_drafts: bool = False) -> None:
        super().__init__(hook_drafts)
        known = dict.fromkeys(hook_names(core.config, core.check_depth(depth)))
        self._functions: dict[str, list[HookFn]] = {}
        self._sites: dict[str, HookSite] = {}
        for wanted, fn in check_pairs(fwd_hooks):
            for name in match_names(wanted, known):
                self._functions.setdefault(name, []).append(fn)
                self._sites[name] = HookSite(name)

    def wants(self, name: str) -> bool:
        return name in self._functions

    def fire(self, name, tensor, context):
        site = self._sites[name]
        site.ctx.update(context)
        for fn in self._functions[name]:
            result = fn(tensor, hook=site)
            tensor = tensor if result is None else result
        return tensor


def tapped(model: Any, fwd_hooks: Hooks = (), hook_drafts: bool = False, depth: int | None = None) -> AbstractContextManager[Tap | None]:
    """`with tapped(model, fwd_hooks, hook_drafts, depth) as tap:` for a LoopedModel or a bare LoopedCore.

    tap is None where nothing is hooked; otherwise it fires `fwd_hooks`, and on a LoopedModel the hooks already there.
    depth: how many recurrences the target runs. Raises HookError for a name or filter that matches nothing.
    """
    own = getattr(model, "tapped", None)
    return own(fwd_hooks, hook_drafts, depth) if own is not None else _tapped_core(model, fwd_hooks, hook_drafts, depth)


@contextmanager
def _tapped_core(core: LoopedCore, fwd_hooks: Hooks, hook_drafts: bool, depth: int | None) -> Iterator[Tap | None]:
    yield FunctionTap(core, fwd_hooks, depth, hook_drafts) if fwd_hooks else None
