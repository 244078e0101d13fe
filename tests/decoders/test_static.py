"""Static decoding: whole turns on the device give the generator's tokens, K/V, calls and trace, eagerly and from a tape.

A tape replays operators with the tensors and numbers they were first given, as a CUDA graph does (decoders/graphs.py). So what
a turn bakes in, a replay at another position, length, limit or text gets wrong: here, on a CPU.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, Sampling, Wavefront
from decoders import static as static_module
from decoders.calls import advance
from decoders.graphs import Eager, Tape, Tapes
from decoders.ladder import Case, model, opened
from decoders.static import release, run_static
from decoders.static_blocks import StaticBlocks
from decoders.static_wave import Filled, StaticWave, padded_autoregressive
from decoders.verify import _verdict, _watch_commits
from loopscope.errors import HookError, NumericsError, SettingError
from loopscope.random_models import FAMILIES, make_random_core
from loopscope.rows import At, Chain, ReadPolicy, Wave
from loopscope.static_rows import Static

WAVES = [Autoregressive(), Wavefront(1), Wavefront(2)]
BLOCKS = [DASWave(4, 1, carry=False), DASWave(3, 2, 4, carry=False, bonus=False)]
RUNNERS = {"eager": (Eager, 0), "tape": (lambda: Tapes(16), 0), "tape, host behind": (lambda: Tapes(64), 1)}


def case(decoder, family="huginn", gain=0.2, limit=14, eos=(), stop=None, prompt=(3, 1, 4, 1, 5), seed=7, start=None) -> Case:
    return Case(-1, family, gain, 1, decoder, 4, (tuple(prompt),), (limit,), (seed,), None, start, 0, eos, stop)


@torch.inference_mode()
def held(drawn: Case, runner: str):
    """Decode a case statically -> (session, verdict against autoregressive decoding, session of the generator)."""
    core, (reference,), stop = opened(drawn)
    decoder, make = drawn.decoder, RUNNERS[runner][0]
    plain, session = (decoder._open(core, list(drawn.prompts[0]), drawn.limits[0], drawn.depth, drawn.seeds[0], stop, drawn.start)
                      for _ in range(2))
    decoder._run(plain)
    plain.result(decoder)  # closes its last run
    gaps: list[list[float]] = []

    def prefilled():
        gaps.append(_watch_commits(session, reference))
        deque(advance(session, session.prefill()), maxlen=0)

    try:
        run_static(decoder, session, prefilled, make(), RUNNERS[runner][1])
        return session, _verdict(decoder, session, reference, gaps[0]), plain
    finally:
        session.cache.__dict__.pop("commit", None)  # a kept cache is lent to the next decode


def same_books(session, plain) -> bool:
    return (session.counts, session.trace, session.runs, session.rounds, session.cache.length) == \
        (plain.counts, plain.trace, plain.runs, plain.rounds, plain.cache.length)


@pytest.mark.parametrize("runner", ["eager", "tape, host behind"])
@pytest.mark.parametrize("family", FAMILIES)
def test_static_decodes_commit_the_autoregressive_tokens_and_cache_in_the_generators_calls(family, runner):
    for decoder in (*WAVES, *BLOCKS) if family == "huginn" else (WAVES[1], BLOCKS[0]):
        session, verdict, plain = held(case(decoder, family), runner)
        assert verdict.ok and verdict.tokens_equal, (decoder, str(verdict))
        assert same_books(session, plain), decoder


ENDS = st.one_of(st.just({}), st.builds(lambda i: {"eos": (i,)}, st.integers(0, 12)),
                 st.builds(lambda at, n: {"stop": (at, n)}, st.integers(0, 30), st.integers(1, 4)))


@settings(max_examples=14, deadline=None, derandomize=True, database=None)
@given(family=st.sampled_from(("huginn", "ouro")), gain=st.sampled_from((0.0, 0.1, 0.3, 0.6)), limit=st.integers(1, 17), ends=ENDS,
       decoder=st.sampled_from((*WAVES, *BLOCKS, DASWave(4, 1, 32, 1, carry=False, growth=2))), runner=st.sampled_from(list(RUNNERS)),
       prompt=st.lists(st.integers(0, 63), min_size=1, max_size=9), start=st.sampled_from((None, "zero")))
def test_a_static_decode_ends_where_the_generator_does(family, gain, limit, ends, decoder, runner, prompt, start):
    start = start if family == "huginn" else None
    session, verdict, plain = held(case(decoder, family, gain, limit, prompt=prompt, start=start, **ends), runner)
    assert verdict.ok and verdict.tokens_equal, str(verdict)
    assert same_books(session, plain)
    assert session.ahead <= decoder_turn(decoder) and (session.ahead == 0 or runner == "tape, host behind")


def decoder_turn(decoder) -> int:
    """Block calls of the one turn that may have run beyond the end."""
    return getattr(decoder, "draft_depth", 4)


# ---- what is captured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", [*WAVES, DASWave(4, 1)], ids=lambda d: d.label)
@torch.inference_mode()
def test_what_was_captured_at_one_length_serves_every_other(random_core, decoder):
    core = random_core("huginn", gain=0.2, depth=4, n_core=1, n_prelude=1, n_coda=1, context=128)
    tapes = Tapes(128)
    first = [5, 9, 2]
    decoder._run(decoder._open(core, first, 20), static=True, runner=tapes, lag=0)
    made, replays = len(tapes.made), tapes.replays
    assert made <= 3 and replays >= 3  # one for each bucket of rows; a block of any length, and a last token alone
    for prompt, limit, seed in ((list(range(60)), 30, 3), ([7], 9, 4)):
        session, plain = (decoder._open(core, prompt, limit, seed=seed) for _ in range(2))
        decoder._run(session, static=True, runner=Tapes(128), lag=0)  # the kept turn brings its own tapes
        decoder._run(plain)
        assert session.tokens == plain.tokens and same_books(session, plain)
    assert tapes.replays > replays and len(tapes.made) <= 3


places = st.lists(st.integers(0, 40), min_size=3, max_size=3)
rows_drawn = st.integers(1, 33).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), places))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(drawn=rows_drawn, kind=st.sampled_from(("chain", "wave", "deep")), family=st.sampled_from(("huginn", "raven", "dory")))
def test_buckets_of_1_to_33_rows_replay_at_any_place(drawn, kind, family):
    """Of n rows the last `count` are used. Captured at one place, replayed at two others, held to ordinary rows on another cache."""
    n, count, places = drawn
    core = model(family, 0.3, 1)
    depths = tuple(range(n, 0, -1)) if kind == "wave" else (3,) * n
    policy = ReadPolicy(33, 33) if kind == "deep" else ReadPolicy()
    draw = torch.Generator().manual_seed(n)
    with torch.inference_mode():
        caches = [core.make_cache(100, 33, spare=1) for _ in range(2)]
        for a, b in zip(*([t for part in (c.prelude, c.core, c.coda) for pair in part for t in pair] for c in caches)):
            a.copy_(torch.randn(a.shape, generator=draw, dtype=torch.float64))
            b.copy_(a)
        at, live = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.bool)
        state, x = (torch.zeros(1, n, width, dtype=torch.float64) for width in _widths(core))
        out = torch.zeros_like(state)
        tapes = Tapes()

        def phase():
            rows = Static.of(at, live, caches[0].cells - 1, 80, depths)
            out.copy_(core.recur(state, x, rows, caches[0], policy))
            core.read(out, rows, caches[0])

        for place in places:
            at.copy_(place + torch.arange(n))
            live.copy_(torch.arange(n) >= n - count)
            state.copy_(torch.randn(state.shape, generator=draw, dtype=torch.float64))
            x.copy_(torch.randn(x.shape, generator=draw, dtype=torch.float64))
            tapes.run("only", phase)
            own, begin = depths[n - count :], place + n - count
            plain = Wave(begin, own) if kind == "wave" else Chain(begin, count, 3)
            want = core.recur(state[:, n - count :], x[:, n - count :], plain, caches[1], policy)
            core.read(want, At(tuple(range(begin, begin + count))), caches[1])
            assert torch.allclose(out[:, n - count :], want, rtol=0, atol=1e-12) and out.isfinite().all()
            for mine, theirs in zip(*([t for part in (c.core, c.coda) for pair in part for t in pair] for c in caches)):
                assert torch.allclose(mine[..., :-1, :], theirs[..., :-1, :], rtol=0, atol=1e-12)  # the scratch cell is nobody's
        assert tapes.replays == 2


def _widths(core):
    x = core.embed(torch.zeros(1, 1, dtype=torch.long))
    return core.start(x).shape[-1], x.shape[-1]


def test_a_tape_refuses_what_a_graph_cannot_capture():
    x = torch.ones(3)
    for waits in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: torch.tensor([1.0, 2.0])):
        with pytest.raises(SettingError, match="waits for the host or takes data from it"), Tape():
            waits()


# ---- rules broken on purpose: what is above must notice ------------------------------------------------------------------


def forgets_the_scratch_cell(mp):
    """A spare row writes its K/V where it reads, in the prompt."""
    original = Static.of.__func__
    def of(cls, at, valid, scratch, reach, depths):
        rows = original(cls, at, valid, scratch, reach, depths)
        return cls(rows.at, rows.at, reach, depths)
    mp.setattr(Static, "of", classmethod(of))


def forgets_to_roll_back_a_lane(mp):
    original = StaticWave._accept
    def accept(self, reads):
        before = self.live.clone()
        original(self, reads)
        self.live[:-1] = before[1:]
    mp.setattr(StaticWave, "_accept", accept)


def restarts_one_position_off(mp):
    original = StaticWave._accept
    def accept(self, reads):
        before = self.live.sum()
        original(self, reads)
        self.at.add_((self.live.sum() < before).long())
    mp.setattr(StaticWave, "_accept", accept)


def bakes_a_length(mp):
    """Rows stand where they stood when the turn was captured."""
    def of(cls, at, valid, scratch, reach, depths):
        at = sum(p * (torch.arange(len(depths)) == i) for i, p in enumerate(at.numpy().copy()))  # numbers, not the tensor
        return cls(at.masked_fill(~valid, 0), at.masked_fill(~valid, scratch), reach, depths)
    mp.setattr(Static, "of", classmethod(of))


def accepts_one_guess_too_many(mp):
    original = StaticBlocks._accept
    def accept(self, guesses, targets, valid):
        before = self.at.clone()
        original(self, guesses, targets, valid)
        self.at.copy_(torch.minimum(self.at + 1, before + valid.sum()))
    mp.setattr(StaticBlocks, "_accept", accept)


MUTANTS = [(forgets_the_scratch_cell, Wavefront(1)), (forgets_the_scratch_cell, BLOCKS[0]), (forgets_to_roll_back_a_lane, Wavefront(1)),
           (restarts_one_position_off, Wavefront(2)), (bakes_a_length, Autoregressive()), (bakes_a_length, BLOCKS[0]),
           (accepts_one_guess_too_many, BLOCKS[0])]


@pytest.mark.parametrize("mutant, decoder", MUTANTS, ids=lambda v: getattr(v, "__name__", None) or v.label)
def test_a_broken_rule_is_noticed(monkeypatch, mutant, decoder):
    drawn = [case(decoder, family, gain) for family, gain in (("huginn", 0.2), ("ouro", 0.4))]

    def noticed() -> bool:
        static_module._kept.clear()
        for each in drawn:
            try:
                session, verdict, plain = held(each, "tape")
            except (SettingError, IndexError, RuntimeError):
                return True
            if not (verdict.ok and verdict.tokens_equal and same_books(session, plain)):
                return True
        return False

    assert not noticed()
    mutant(monkeypatch)
    assert noticed()
    static_module._kept.clear()  # turns that the mutant made


# ---- what it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", [*WAVES, DASWave(4, 1)], ids=lambda d: d.label)
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_host_reads_once_per_turn(random_core, host_reads, decoder, runner):
    core = random_core("huginn", gain=0.2, depth=4, n_core=1, n_prelude=1, n_coda=1)
    session = decoder._open(core, [3, 1, 4, 1, 5], 16)
    make, lag = RUNNERS[runner]
    with torch.no_grad():
        run_static(decoder, session, lambda: deque(advance(session, session.prefill()), maxlen=0), make(), lag)  # warm: made and kept
        again = decoder._open(core, [3, 1, 4, 1, 5], 16)
        with host_reads:
            run_static(decoder, again, lambda: deque(advance(again, again.prefill()), maxlen=0), make(), lag)
    assert again.tokens == session.tokens
    turns = again.counts["readout"] - 4 * len(again.rounds)  # a block's four rounds are read with its targets
    assert len(host_reads.found) == 1 + turns, host_reads.found  # the prefill's, then one each


# ---- what it refuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder, options, reason", [
    (Wavefront(3), {}, "draft_depth 3 does not divide 4"), (Wavefront(1, redraft=1), {}, "uneven depths"),
    (Autoregressive(exit="state-change:0.1"), {}, "exit rule"), (DraftThenVerify(1, 2), {}, "depend on what the host reads"),
    (LoopSpec(1, 2), {}, "depend on what the host reads"), (DASWave(2, 1, read="aligned"), {}, "depths of their own"),
    (DASWave(2, 1, stable=1), {}, "stops early"), (Wavefront(1), {"sampling": Sampling(0.7)}, "sampling")],
    ids=lambda v: v.label if hasattr(v, "label") else None)
def test_what_cannot_be_static_is_refused(random_core, decoder, options, reason):
    core = random_core("huginn", depth=4, n_core=1)
    with pytest.raises(SettingError, match=f"cannot decode this statically: .*{reason}.*leave static out"):
        decoder.generate(core, [1, 2], 4, static=True, **options)


def test_hooks_are_refused_and_their_names_still_checked(huginn):
    from loopscope.models.hooked import LoopedModel

    hooked = LoopedModel(huginn)
    with pytest.raises(SettingError, match="hooks look at every call"):
        Wavefront(1).generate(hooked, [1, 2], 4, static=True, fwd_hooks=[("depth.1.hook_state", lambda t, hook: t)])
    with pytest.raises(HookError):
        Wavefront(1).generate(hooked, [1, 2], 4, static=True, fwd_hooks=[("depth.1.hook_stat", lambda t, hook: t)])


@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1), DASWave(4, 1)], ids=lambda d: d.label)
def test_nan_is_said_of_the_position_it_was_met_at(random_core, decoder):
    core = random_core("huginn", gain=0.2, depth=4, n_core=1, n_prelude=0, n_coda=0, context=64)
    text = Autoregressive().generate(core, [1, 2, 3], 12)
    core.wte.weight[text.tokens[0]] = float("nan")  # the first new token, an input at position 3
    with pytest.raises(NumericsError, match="the logits at position .* are NaN"):
        decoder.generate(core, [1, 2, 3], 12, static=True)


# ---- on CUDA: not run where there is none ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["huginn", "ouro"])
@pytest.mark.parametrize("decoder", [*WAVES, BLOCKS[0]], ids=lambda d: d.label)
def test_cuda_graphs_give_the_eager_tokens(random_core, family, decoder):
    core = random_core(family, gain=0.2, depth=4, context=128).to(device="cuda")
    for prompt in ([5, 9, 2], list(range(60))):  # captured for the first, replayed for the second
        eager, graphs = (decoder.generate(core, prompt, 24, static=static) for static in (False, True))
        assert graphs.tokens == eager.tokens and graphs.calls == eager.calls and graphs.rows == eager.rows


@pytest.mark.parametrize("edit", ["a block", "a weight", "assigned weights"])
def test_what_was_captured_is_not_replayed_on_other_weights(edit):
    """The kept turn reads addresses: whatever has others must be captured anew."""
    core, other = (make_random_core("huginn", gain=0.3, depth=4, seed=seed) for seed in (0, 1))

    def decoded(static):
        session = Wavefront(1)._open(core, [1, 2, 3], 12)
        Wavefront(1)._run(session, **({"static": True, "runner": Tapes(64)} if static else {}))
        return session.result(Wavefront(1)).tokens

    assert decoded(True) == decoded(False)
    before = decoded(False)
    if edit == "a block":
        core.blocks[1] = other.blocks[1]
    elif edit == "a weight":
        core.norm.weight = torch.nn.Parameter(other.norm.weight.detach() * torch.linspace(-2, 2, 48), requires_grad=False)
    else:
        core.load_state_dict({k: v for k, v in other.state_dict().items() if not k.startswith("wte")}, strict=False, assign=True)
    assert decoded(True) == decoded(False) != before
    release(core)


def test_torch_hooks_on_modules_are_refused():
    core = make_random_core("huginn", gain=0.3, depth=4)
    with core.blocks[0].mlp.register_forward_hook(lambda module, args, out: -out), pytest.raises(SettingError, match="torch hooks"):
        Wavefront(1).generate(core, [1, 2, 3], 4, static=True)
    assert Wavefront(1).generate(core, [1, 2, 3], 4, static=True).tokens == Wavefront(1).generate(core, [1, 2, 3], 4).tokens


def test_in_bfloat16_a_wave_gives_the_tokens_of_ar_in_calls_of_its_shape():
    """Rung L3 (docs/algorithms.md, 2.7). Rounding depends on the number of rows, so plain decoding need not agree, and does not always."""
    plain_differs = accepted = 0
    for family in ("huginn", "ouro", "raven", "parcae"):
        core = make_random_core(family, gain=0.2, depth=4, context=160).to(torch.bfloat16)
        for d in (1, 2):
            session = Wavefront(d)._open(core, list(range(7)), 24)
            Wavefront(d)._run(session, static=True, runner=Filled(30))
            padded = padded_autoregressive(Autoregressive()._open(core, list(range(7)), 24), d)
            assert session.new_tokens == padded, family
            plain_differs += padded != Autoregressive().generate(core, list(range(7)), 24).tokens
            accepted += session.accepted
    assert plain_differs and accepted > 50
