"""The one place that decides how rows attend: rows and read policy -> a plan, made once per call."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from loopscope.attention import AtPlan, CausalPlan, ChainPlan, DraftPlan, Plan
from loopscope.attention_mixed import ForestPlan, MergedPlan, TreePlan, WavePlan
from loopscope.errors import SettingError
from loopscope.kernels.plan import chosen_kernel, tabled
from loopscope.rows import ALIGNED, At, Chain, Draft, Forest, Merged, ReadPolicy, Rows, Tree, Wave
from loopscope.static_rows import Static, static_core_plan, static_outer_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loopscope.cache import DepthCache
    from loopscope.merged import CacheGroup


def core_plan(rows: Rows, cache: DepthCache | CacheGroup | None, policy: ReadPolicy | Sequence[ReadPolicy] = ALIGNED) -> Plan:
    """The plan of one recurrence: each row on its own depth's K/V, or the prefix at the policy's depths.

    Merged rows: the group of their caches, and one policy for each part.
    """
    if cache is None:
        return _uncached(rows)
    if type(rows) is Static:
        return tabled(rows, cache, policy, False, static_core_plan(rows, cache, policy))
    if chosen_kernel() != "torch" and not isinstance(rows, Merged):
        return tabled(rows, cache, policy, False, _core_plan(rows, cache, policy))
    return _core_plan(rows, cache, policy)


def _core_plan(rows: Rows, cache: DepthCache | CacheGroup, policy: ReadPolicy | Sequence[ReadPolicy]) -> Plan:
    if policy is ALIGNED and type(rows) is Chain:  # the most frequent call, first
        return _kept_chain(rows, cache, cache.slot(rows.depth))
    if isinstance(rows, Merged):
        return _merged(rows, [core_plan(part, own, read) for part, own, read in zip(rows.parts, cache.members, policy)])
    if isinstance(rows, Tree):
        return TreePlan(cache, rows, [cache.slot(r) for r in rows.depths])
    if isinstance(rows, Wave):
        if not policy.aligned:
            raise SettingError("a wave reads each row at its own depth; a foreign read policy needs rows of another kind")
        if len(set(rows.depths)) > 1:
            return WavePlan(cache, rows)
        rows = Chain(rows.start, rows.count, rows.depths[0])
    return _slotted(rows, cache, policy)


def _kept_chain(rows: Chain, cache: DepthCache, slot: int) -> ChainPlan:
    """The plan of a chain's last recurrence, turned to the next slot, while the rows stay: a token asks for T of them."""
    kept = cache.chain
    if kept is not None and kept.start == rows.start and kept.count == rows.count and kept.rows.prefix == rows.prefix \
            and kept.rows.pads == rows.pads == cache.pads:
        return kept.at_slot(slot)
    cache.chain = ChainPlan(cache, rows, slot, slot)
    return cache.chain


def _slotted(rows: Chain | At | Draft | Forest, cache: DepthCache, policy: ReadPolicy) -> Plan:
    if policy is not ALIGNED and cache.slots < cache.depth and not policy.aligned:
        raise SettingError(f"the {cache.depth} depths of this cache share {cache.slots} K/V slot(s), so there is no other depth to read; "
                           "read policies need a slot per depth")
    if isinstance(rows, Forest) and not isinstance(rows.depth, int):
        own = [cache.slot(r) for r in rows.depth]
        k_slots = own if policy.k is None else [cache.slot(policy.k)] * rows.count
        v_slots = own if policy.v is None else [cache.slot(policy.v)] * rows.count
        return ForestPlan(cache, rows, k_slots, v_slots)
    # The row's own depth is looked up only where it is read: a carried draft state may have run deeper than the cache.
    own_depth = cast(int, rows.depth)
    k_slot = cache.slot(own_depth if policy.k is None else policy.k)
    v_slot = cache.slot(own_depth if policy.v is None else policy.v)
    if isinstance(rows, Forest):
        return ForestPlan(cache, rows, [k_slot], [v_slot])
    if isinstance(rows, At):
        return AtPlan(cache, rows, k_slot, v_slot)
    if isinstance(rows, Draft):
        return DraftPlan(cache, rows, k_slot, v_slot)
    return ChainPlan(cache, rows, k_slot, v_slot)


def outer_plan(rows: Rows, cache: DepthCache | CacheGroup | None) -> Plan:
    """The plan of prelude and coda layers, which have one slot whatever the rows' depths."""
    if cache is None:
        return _uncached(rows)
    if type(rows) is Static:
        return tabled(rows, cache, ALIGNED, True, static_outer_plan(rows, cache))
    if chosen_kernel() != "torch" and not isinstance(rows, Merged):
        return tabled(rows, cache, ALIGNED, True, _outer_plan(rows, cache))
    return _outer_plan(rows, cache)


def _outer_plan(rows: Rows, cache: DepthCache | CacheGroup) -> Plan:
    if isinstance(rows, Merged):
        return _merged(rows, [outer_plan(part, own) for part, own in zip(rows.parts, cache.members)])
    if isinstance(rows, Forest):
        return ForestPlan(cache, rows, [0], [0])
    if isinstance(rows, Tree):
        return TreePlan(cache, rows, [0] * rows.count)
    if isinstance(rows, At):
        return AtPlan(cache, rows, 0, 0)
    return ChainPlan(cache, rows if isinstance(rows, Chain) else Chain(rows.start, rows.count), 0, 0)


def _merged(rows: Merged, plans: list[Plan]) -> MergedPlan:
    return MergedPlan(plans, [part.count for part in rows.parts])


def _uncached(rows: Rows) -> Plan:
    return CausalPlan(rows.count, rows.prefix, rows.pads) if isinstance(rows, Chain) else CausalPlan(rows.count)
