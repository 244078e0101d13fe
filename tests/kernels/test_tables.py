"""Row tables say what today's plans do: every attention call of real decodes, and every kind of rows, twice over."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, Wavefront
from decoders.graphs import Captured, Tape
from decoders.ladder import model, runs_on
from decoders.verify import verify_generation
from loopscope.errors import SettingError
from loopscope.kernels import RowTables, group_rows, mixed_depth_attention_twin, tables_of, write_rows
from loopscope.kernels.plan import TabledPlan, chosen_kernel, use_kernel
from loopscope.kernels.static_tables import static_tables
from loopscope.merged import CacheGroup
from loopscope.planning import core_plan, outer_plan
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.rows import ALIGNED, POLICIES, At, Chain, Draft, Forest, Merged, ReadPolicy, Tree, Wave
from loopscope.static_rows import Static

# Each with a gain of the random model: branches appear where drafts of two depths differ.
DECODERS = ((Wavefront(1), 0.5), (DASWave(4, 1), 0.5), (DASWave(2, 1, read="deep_v"), 0.3), (LoopSpec(1, 3), 1.0),
            (DraftThenVerify(1, 3, "deep_kv"), 0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_is_lossless_on_the_reference_and_each_of_its_calls_is_todays(family, monkeypatch):
    """Tokens, K/V and calls are held to autoregressive decoding on the same path; each attention call to the plan it stands for."""
    real, kinds = TabledPlan.attend, Counter()

    def attend(self, cached, q, k, v, pattern=None):
        before = [t.clone() for t in cached]
        z = real(self, cached, q, k, v, pattern)
        expected = self.plain.attend(type(cached)(before), q, k, v)
        assert torch.allclose(z, expected, rtol=0, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(cached, before))  # written alike, and nothing but that
        kinds[type(self.rows).__name__ + (" foreign" if self.policy is not ALIGNED and not self.policy.aligned else "")] += 1
        return z

    monkeypatch.setattr(TabledPlan, "attend", attend)
    for decoder, gain in DECODERS:
        if runs_on(decoder, family):
            core = model(family, gain, 1)
            with use_kernel("twin"):
                verdict = verify_generation(decoder, core, [3, 1, 2], 7, depth=4, seed=1)
            assert verdict.ok and verdict.tokens_equal, str(verdict)
            plain = decoder.generate(core, [3, 1, 2], 7, depth=4, seed=1)
            assert plain.tokens == verdict.generation.tokens
    wanted = {"Chain", "Wave", "Draft foreign", "Chain foreign"} | ({"Tree"} if family != "dory" else set())
    assert wanted <= set(kinds), kinds


# ---- all kinds of rows at any settings ----------------------------------------------------------------------------------

policies = st.one_of(st.sampled_from(POLICIES).map(lambda name: ReadPolicy.named(name, 4)),
                     st.builds(ReadPolicy, st.one_of(st.none(), st.integers(1, 4)), st.one_of(st.none(), st.integers(1, 4))))
depths = st.integers(1, 4)


@st.composite
def calls(draw):
    """(rows, policy, pads of the cache's sequences, window)."""
    kind = draw(st.sampled_from(["chain", "wave", "at", "draft", "forest", "tree", "prefix", "padded"]))
    start, n, window = draw(st.integers(0, 5)), draw(st.integers(1, 5)), draw(st.one_of(st.none(), st.integers(1, 6)))
    depth, policy = draw(depths), draw(policies)
    if kind == "wave":
        return Wave(start, tuple(draw(st.lists(depths, min_size=n, max_size=n)))), ALIGNED, (), window
    if kind == "at":
        return At(tuple(sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=5)))), depth), policy, (), window
    if kind == "draft":
        return Draft(start, start + draw(st.integers(0, 2)), depth, n), policy, (), window
    if kind == "forest":
        at = torch.tensor(draw(st.lists(st.integers(0, 11), min_size=n, max_size=n)))
        ends = torch.tensor([draw(st.integers(0, int(p))) for p in at])
        seen = torch.eye(n, dtype=torch.bool) | (torch.tensor(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).view(n, n))
        return Forest(at, ends, seen, draw(st.one_of(depths, st.tuples(*[depths] * n)))), policy, (), window
    if kind == "tree":
        cells = draw(st.permutations(range(start, 15)))[:n]
        own = tuple(tuple(cells[j] for j in range(i) if draw(st.booleans())) + (cells[i],) for i in range(n))
        rows = Tree(tuple(start + i // 2 for i in range(n)), tuple(cells), own, tuple(draw(depths) for _ in range(n)), start)
        return rows, ALIGNED, (), None
    if kind == "prefix":
        return Chain(0, n + 2, depth, draw(st.integers(1, n + 2))), policy, (), window
    pads = tuple(draw(st.lists(st.integers(0, start + n - 1), min_size=1, max_size=3))) if kind == "padded" else ()
    return Chain(start, n, depth, pads=pads), policy, pads if any(pads) else (), window


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(drawn=calls(), outer=st.booleans(), slots=st.sampled_from([None, None, 2]), seed=st.integers(0, 2**31))
def test_tables_read_and_write_what_the_plan_of_the_same_rows_does(drawn, outer, slots, seed):
    rows, policy, pads, window = drawn
    if isinstance(rows, Chain) and not pads:
        rows = Chain(rows.start, rows.count, rows.depth, rows.prefix)
    if not policy.aligned and slots:
        slots = None
    core = model("raven", 0.5, 0)
    cache = core.make_cache(12, depth=4, batch=len(pads) or 1, slots=slots, spare=4)
    cache.pads = pads
    generator = torch.Generator().manual_seed(seed)
    cached = (cache.prelude if outer else cache.core)[0]
    for buffer in cached:
        buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype))
    twin = [t.clone() for t in cached]
    heads, kv_heads, d = core.config.n_heads, core.config.n_kv_heads, core.config.d_head
    q, k, v = (torch.randn(cache.batch, rows.count, h, d, generator=generator, dtype=cache.dtype) for h in (heads, kv_heads, kv_heads))
    plan = outer_plan(rows, cache) if outer else core_plan(rows, cache, policy)
    expected = plan.windowed(window).attend(cached, q, k, v)
    tables = tables_of(rows, cache, policy, outer=outer, window=window)
    write_rows(*twin, tables, k.flatten(0, 1), v.flatten(0, 1))
    z = mixed_depth_attention_twin(q.flatten(0, 1), *twin, tables, k.flatten(0, 1), v.flatten(0, 1))
    assert torch.allclose(z, expected.flatten(0, 1), rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(twin, cached))


# ---- static rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, decoder", [("huginn", Autoregressive()), ("huginn", DASWave(3, 1)), ("ouro", Wavefront(1)),
                                             ("dory", Wavefront(2))])
def test_a_static_decode_on_the_reference_commits_the_same_tokens(family, decoder, monkeypatch):
    real, kinds = TabledPlan.attend, Counter()

    def attend(self, *args):
        kinds[type(self.rows).__name__] += 1
        return real(self, *args)

    class Blind(Captured):
        """Rows as in a captured graph, but every phase runs anew: the reference looks at numbers, which no graph can."""

        def run(self, key, phase):
            phase()

    monkeypatch.setattr(TabledPlan, "attend", attend)
    monkeypatch.setattr("decoders.static.runner_for", lambda device: Blind(8))
    core = model(family, 0.4, 0)
    plain = decoder.generate(core, [1, 2, 3], 9, depth=4, seed=1).tokens
    with use_kernel("twin"):
        assert decoder.generate(core, [1, 2, 3], 9, depth=4, seed=1, static=True).tokens == plain
    assert kinds["Static"] > 10


@pytest.mark.parametrize("depths, policy", [((4, 3, 2, 1), ALIGNED), ((2, 2, 2, 2), ALIGNED), ((2, 2, 2, 2), ReadPolicy(4, None))])
@pytest.mark.parametrize("window, outer", [(None, False), (3, False), (None, True)])
def test_tables_of_static_rows_are_those_of_the_rows_they_stand_for_wherever_these_stand(depths, policy, window, outer):
    """And nothing in them comes from the host: recorded once, they follow what the positions are rewritten to."""
    cache = make_random_core("raven", n_core=1).make_cache(20, depth=4, spare=1)
    at = torch.arange(2, 6)
    cell = at.clone()
    made = []
    with Tape() as tape:
        made.append(static_tables(Static(at, cell, 20, depths), cache, policy, outer=outer, window=window))
    for start in (2, 9):
        at.copy_(torch.arange(start, start + 4))
        cell.copy_(at)
        tape.replay()
        rows = Wave(start, depths) if len(set(depths)) > 1 else Chain(start, 4, depths[0])
        expected = tables_of(rows, cache, policy, outer=outer, window=window)
        for name, value in vars(expected).items():
            mine = getattr(made[0], name)
            assert (mine is None) == (value is None) and (value is None or torch.equal(mine, value) or name == "groups"), name
        assert sorted(r for r in made[0].groups.flatten().tolist() if r >= 0) == [0, 1, 2, 3]
        assert made[0].groups.shape == ((4, 1) if len(set(depths)) > 1 and not outer else (1, 4))


# ---- groups, and tables as data -----------------------------------------------------------------------------------------

@given(keys=st.lists(st.tuples(*[st.integers(0, 2)] * 5), min_size=1, max_size=40), rows=st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_groups_hold_every_row_once_beside_rows_that_share_its_keys_and_values(keys, rows):
    groups = group_rows(*torch.tensor(keys, dtype=torch.int32).T, rows=rows)
    assert groups.shape == (len(keys), rows) and groups.dtype == torch.int32
    lines = [[r for r in line if r >= 0] for line in groups.tolist()]
    assert sorted(r for line in lines for r in line) == list(range(len(keys)))
    assert all(len({keys[r] for r in line}) <= 1 for line in lines)
    assert all(line[: len(own)] == own for line, own in zip(groups.tolist(), lines))  # filled from the front
    used = [line for line in lines if line]
    assert lines[: len(used)] == used
    assert Counter(keys[line[0]] for line in used) == {key: -(-n // rows) for key, n in Counter(keys).items()}  # no more lines than needed


def test_the_rows_of_a_chain_share_what_they_read_and_those_of_a_wave_do_not():
    cache = make_random_core("huginn").make_cache(40, depth=4)
    assert tables_of(Chain(0, 20, 2), cache).groups.tolist() == [[*range(16)], [*range(16, 20)] + [-1] * 12]
    assert tables_of(Wave(3, (4, 3, 1)), cache).groups.tolist() == [[0], [1], [2]]
    assert tables_of(Wave(3, (4, 3, 3)), cache).groups.tolist() == [[0, -1], [1, 2]]


def test_tables_are_rewritten_in_place():
    cache = make_random_core("huginn").make_cache(20, depth=4)
    tables, later = (tables_of(Wave(at, (4, 3, 1)), cache) for at in (3, 8))
    held = tables.prefix_end
    assert tables.copy_(later) is tables
    assert held is tables.prefix_end and held.tolist() == [9, 10, 11]
    assert all(t is None or t.dtype in (torch.int32, torch.bool) for t in vars(tables).values())


@pytest.mark.parametrize("change, says", [
    (dict(prefix_end=[1]), "2 positions were given and 1 entries of prefix_end"),
    (dict(ancestors=torch.ones(3, 1)), r"\[2, any\]"),
    (dict(ancestors=torch.ones(2, 3), cells=[1]), r"\[2, 1\]"),
])
def test_tables_of_unequal_columns_are_refused(change, says):
    with pytest.raises(SettingError, match=says):
        RowTables.make(**dict(position=[1, 2], prefix_end=[2, 3], k_slot=[0, 0]) | change)


def test_rows_of_several_caches_have_tables_part_by_part_only():
    cache = make_random_core("huginn").make_cache(20, depth=4)
    with pytest.raises(SettingError, match="part by part"):
        tables_of(Merged((Chain(0, 1),), (0,)), cache)
    with use_kernel("twin"):
        plan = core_plan(Merged((Chain(0, 1), Wave(0, (3, 2))), (0, 1)), CacheGroup([cache, cache]), (ALIGNED, ALIGNED))
    assert [type(part) for part in plan.plans] == [TabledPlan, TabledPlan]


def test_a_kernel_is_asked_for_by_name():
    before = chosen_kernel()
    with use_kernel("twin"):
        assert chosen_kernel() == "twin"
    assert chosen_kernel() == before
    with pytest.raises(SettingError, match="LOOPSCOPE_KERNEL=tritn is no way to attend; use one of torch, triton"):
        with use_kernel("tritn"):
            pass
    assert chosen_kernel() == before
    cache = make_random_core("huginn").make_cache(20, depth=4)
    with use_kernel("triton"):  # on CPU: as ever
        assert type(core_plan(Wave(0, (3, 2)), cache)) is not TabledPlan
