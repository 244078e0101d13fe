"""Replay: one teacher-forced pass says what every aligned decoder will count, and the decoders count just that."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import lru_cache

import pytest
import torch

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.carried import Refinements
from decoders.counting import draft_then_verify_counts, wavefront_counts
from decoders.loopspec import LoopSpec
from decoders.replay import predict_from_replay, replay, replayed, replayed_accepts
from decoders.replay_counts import Text, block_counts, most_lanes, rereading, twice, wave
from decoders.replay_tree import capped_tree
from loopscope.errors import SettingError
from loopscope.models.loading import SHIPPED, load_core
from loopscope.random_models import make_random_core
from loopscope.tiny.prompts import prompts
from probes import ReplayResult

PLAIN, ATTENDING = ("ouro", "nanbeige", "hrm_text"), ("huginn", "raven", "parcae", "dory")
ALPHAS: dict[str, list[float]] = {}


@lru_cache(maxsize=4)
def model(family: str, gain: float, seed: int):
    return make_random_core(family, gain=gain, seed=seed, n_core=1, vocab_size=32)


def with_eos(core, eos):
    """The same weights under a config with other end-of-sequence ids."""
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(eos))
    return other


def schedules(core, depth):
    """Decoders with every kind of setting: d dividing T and not, blocks cut by the limit, re-reading, second proposals, d = T."""
    yield from (Autoregressive(), Wavefront(depth), Wavefront(1), Wavefront(2), DraftThenVerify(1, 3), DraftThenVerify(2, 6),
                Wavefront(1, redraft=1), Wavefront(2, redraft=2))
    if not getattr(core.config, "window", 0):  # where branches can run
        yield from (LoopSpec(1, 2), LoopSpec(1, 3, gate=0.2))


def check(core, prompt, limit, depth, seed=0):
    """Replay and decode; every outcome that is called exact must be what the decoder counts."""
    text = replay(core, [prompt], limit, depth=depth, seed=seed, progress=False).passes[0]
    for decoder in schedules(core, depth):
        said, got = replayed(text, decoder), decoder.generate(core, prompt, limit, depth, seed)
        where = f"{core.family} {decoder.label} T={depth} limit={limit} eos={core.config.eos}: {said}, counted {got.calls} {got.rows}"
        assert said.exact or isinstance(decoder, DraftThenVerify) and core.config.eos, where
        if said.exact:
            judged = {e.position - len(prompt): e.event == "accept" for e in got.trace if e.event in ("accept", "reject")}
            assert (said.recur, said.proposed, said.accepted) == (got.calls.recur, got.proposed, got.accepted), where
            assert said.runs == got.accept_lengths and said.accepts == judged, where
        if said.rows_exact:
            widths = Counter(Counter(e.tick for e in got.trace if e.event == "run").values())
            assert (said.prelude, said.readout, said.rows) == (got.calls.prelude, got.calls.readout, got.rows), where
            assert said.widths == dict(sorted(widths.items())), where
        elif not core.config.eos:
            assert len(replay_depths(decoder, depth)) > 1, f"lanes that are read once say nothing that matters: {where}"
        if got.proposed:
            ALPHAS.setdefault(core.family, []).append(got.alpha)


def replay_depths(decoder, depth):
    if isinstance(decoder, LoopSpec):
        return [decoder.draft_depth, decoder.second_depth]
    return range(decoder.draft_depth, depth, getattr(decoder, "redraft", None) or depth)


@pytest.mark.parametrize("family", [*PLAIN, *ATTENDING])
def test_predicted_is_counted_for_every_aligned_decoder(family):
    """Where the coda attends this stands on emulating what rows in flight left in its K/V, layer by layer."""
    for k, (gain, depth, limit) in enumerate([(0.1, 5, 14), (0.4, 4, 16), (2.0, 6, 9)]):
        check(model(family, gain, k), [3, 9 + k, 4], limit, depth, seed=k)


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_an_end_of_text_is_where_the_decoders_stop_drafting(family):
    core, prompt = model(family, 0.2, 1), [5, 6]
    tokens = Autoregressive().generate(core, prompt, 12, 5).tokens
    for place in (0, 3, 8):
        check(with_eos(core, [tokens[place]]), prompt, 12, 5)


def test_the_draws_above_accepted_and_rejected():
    if len(ALPHAS) < 7:
        pytest.skip("needs the generations of the tests above, in the same process")
    for family, rates in ALPHAS.items():
        assert min(rates) < 0.5 and max(rates) > 0.6, f"{family}: {sorted(rates)}"


SHIPPED_DECODERS = [Autoregressive(), Wavefront(1), Wavefront(2), Wavefront(1, redraft=2), LoopSpec(1, 2), DraftThenVerify(1, 8),
                    DraftThenVerify(2, 4), DraftThenVerify(1, 4, "deep_kv"), DraftThenVerify(1, 4, "deep_v"), DASWave(4, 1), DASWave(8, 1)]


@pytest.mark.parametrize("name, task, tokens", [("tiny-huginn", "code", 14), ("tiny-ouro", "maths", 20)])
def test_on_the_shipped_models_predicted_calls_are_the_counted_ones(name, task, tokens):
    """Exactly where the theory says so, within 5 % elsewhere; in float64, where no near tie can tell two orders of summation apart."""
    core, prompt = load_core(SHIPPED / name, dtype=torch.float64), prompts(task, 2)[1]
    table = replay(core, [prompt], tokens, progress=False)
    said = predict_from_replay(table, SHIPPED_DECODERS, Refinements(core, [prompt], table)).frame.set_index("decoder")
    alphas = []
    for decoder in SHIPPED_DECODERS:
        row, got = said.loc[decoder.label], decoder.generate(core, prompt, tokens)
        if row.exact:
            assert (row.recur_calls, row.proposed, row.accepted) == (got.calls.recur, got.proposed, got.accepted), decoder.label
        assert row.calls_per_token == pytest.approx(got.calls.recur / (len(got.tokens) - 1), rel=0.05), decoder.label
        assert row.exact or isinstance(decoder, DraftThenVerify), f"{decoder.label}: {row.note}"
        alphas.append(got.alpha if got.proposed else 1.0)
    assert min(alphas) < 1, "nothing was rejected, so nothing was tested"


def test_drafts_behind_verified_predecessors_alone_miscount_where_the_coda_attends(tmp_path):
    """What the emulation is for; a table from disk cannot emulate and says so."""
    missed = 0
    for seed in range(4):
        core = model("huginn", 0.3, seed)
        table = replay(core, [[3, 4]], 20, depth=6, progress=False)
        table.save(tmp_path)
        said = replayed(ReplayResult.load(tmp_path).prompts()[0], Wavefront(1))
        assert not said.exact and not said.rows_exact and "behind verified predecessors" in said.note
        missed += said.recur != replayed(table.passes[0], Wavefront(1)).recur
    assert missed


def test_a_table_from_disk_is_as_good_where_the_readout_does_not_attend(tmp_path):
    table = replay(model("ouro", 0.3, 0), [[3, 4], [7]], 12, progress=False)
    table.save(tmp_path)
    decoders = [Wavefront(1), DraftThenVerify(1, 4), LoopSpec(1, 2), Wavefront(1, redraft=1)]
    assert predict_from_replay(ReplayResult.load(tmp_path), decoders).frame.equals(predict_from_replay(table, decoders).frame)


def test_the_prediction_has_a_row_per_prompt_and_decoder():
    core, prompts = model("ouro", 0.3, 0), [[3, 4], [7]]
    decoders = [Autoregressive(), Wavefront(2), DASWave(4, 1), DraftThenVerify(1, 4, "deep_kv"), Wavefront(1, slots=2)]
    frame = predict_from_replay(replay(core, prompts, 12, task="maths", progress=False), decoders).frame
    assert frame.decoder.tolist() == [d.label for d in decoders] * 2 and (frame.task == "maths").all()
    got = Wavefront(2).generate(core, prompts[1], 12)
    row = frame[(frame.prompt == 1) & (frame.decoder == "WFD d=2")].iloc[0]
    assert row.calls_per_token == got.calls.recur / 11 and row.alpha == got.alpha and row.mean_width == got.rows / got.calls.recur
    assert frame[frame.decoder == "AR"].calls_per_token.tolist() == [4.0, 4.0]
    other = frame[~frame.decoder.isin(["AR", "WFD d=2"])]
    assert other.calls_per_token.isna().all() and not other.exact.any() and other.note.str.contains("no replay").all()


def test_accepts_for_a_checker_of_generations():
    core = model("ouro", 0.3, 0)
    got = Wavefront(1).generate(core, [3, 4], 12, 5)
    said = replayed_accepts(core, [3, 4], got.tokens, Wavefront(1), depth=5)
    assert said.accepts == {e.position - 2: e.event == "accept" for e in got.trace if e.event in ("accept", "reject")}
    assert replayed_accepts(core, [3, 4], got.tokens, DASWave(2, 1), depth=5) is None
    with pytest.raises(SettingError, match="draft_depth 6 is deeper"):
        replayed_accepts(core, [3, 4], got.tokens, Wavefront(6), depth=5)


# ---- the counts, without a model ---------------------------------------------------------------------------------

RIGHT, WRONG = 1, 0


def told(histories, limit=None, eos=()):
    """The text in which every token is 1, and these drafts of its lanes."""
    return histories, Text([RIGHT] * len(histories), limit or len(histories) + 1, frozenset(eos))


def test_counts_of_plain_waves_and_blocks_are_those_of_the_count_oracles():
    rng = random.Random(0)
    for _ in range(60):
        n, full = rng.randint(2, 30), rng.randint(2, 9)
        d, size = rng.randint(1, full - 1), rng.randint(1, 9)
        accepts = [rng.random() < 0.7 for _ in range(n - 1)]
        histories, text = told([[int(a)] for a in accepts])
        said = wave(histories, text, full, [d], rereading([d], full))
        assert (said.recur, said.prelude, said.readout, said.rows) == wavefront_counts(accepts, n, full, d)
        assert said.rows_exact and sum(w * c for w, c in said.widths.items()) == said.rows and sum(said.widths.values()) == said.recur
        said = block_counts([int(a) for a in accepts], text, full, d, size)
        assert (said.recur, said.prelude, said.readout, said.rows) == draft_then_verify_counts(accepts, n, full, d, size)
        assert sum(w * c for w, c in said.widths.items()) == said.rows and sum(said.widths.values()) == said.recur


def test_a_re_read_lane_is_followed_from_the_read_that_settled_it():
    """T = 4, read at 1, 2, 3: settling at 2 costs 2 ticks, a right draft that is lost again counts from its return, never is T."""
    reads, children = [1, 2, 3], rereading([1, 2, 3], 4)
    settles = {(1, 1, 1): 1, (0, 1, 1): 2, (1, 0, 1): 3, (1, 1, 0): 4, (0, 5, 6): 4}
    for history, ticks in settles.items():
        said = wave(*told([history, history, [1, 1, 1]]), 4, reads, children)
        assert said.recur == 2 * ticks + 4 and said.accepts == {1: ticks < 4, 2: ticks < 4}
    # Lane 0 says 0, then 1: lane 1 starts at tick 1 on a wrong token, is dropped at 2 and starts again.
    said = wave(*told([[0, 1, 1], [1, 1, 1]], limit=3), 4, reads, children)
    assert (said.recur, said.prelude, said.rows, said.rows_exact) == (6, 3, 4 + 4 + 1, True)


def test_a_second_proposal_saves_what_lies_between_its_depth_and_t():
    """d1 + r1 (d2 - d1) + r2 (T - d2): the first right, the second right, neither."""
    for history, ticks, right in (([1, 1], 2, True), ([1, 0], 2, True), ([0, 1], 3, True), ([0, 0], 6, False), ([0, 5], 6, False)):
        said = wave(*told([history] * 4), 6, [2, 3], twice([2, 3], 6))
        assert said.exact and said.recur == 3 * ticks + 6 and said.accepts == {1: right, 2: right, 3: right}
    # One lane with two proposals: the wrong branch runs from 2 to 6, the right one from 3 to 9.
    said = wave(*told([[0, 1], [1, 1]], limit=3), 6, [2, 3], twice([2, 3], 6))
    assert (said.rows, said.widths) == (6 + 6 + 4, {1: 2 + 3, 2: 1, 3: 3})


def test_a_cap_that_may_bind_is_not_called_exact():
    core = model("ouro", 0.4, 1)
    text = replay(core, [[3, 4]], 14, depth=6, progress=False).passes[0]
    free, capped = (replayed(text, LoopSpec(1, 2, lanes=most)) for most in (999, 4))
    assert free.exact and not capped.exact and not capped.rows_exact and "more than 4 lanes" in capped.note
    assert max(free.widths) > 4 == max(capped.widths)


def test_a_tree_under_a_cap_that_never_binds_is_the_tree():
    rng = random.Random(1)
    for _ in range(40):
        n, full = rng.randint(1, 14), rng.randint(3, 7)
        depths = sorted(rng.sample(range(1, full), 2))
        histories, text = told([[rng.randint(0, 1) for _ in depths] for _ in range(n)], limit=n + rng.choice([1, 3]))
        free = wave(histories, text, full, depths, twice(depths, full))
        assert capped_tree(histories, text, full, depths, 10**6) == dataclasses.replace(free, exact=False, rows_exact=False, note="")


def test_a_full_tree_refuses_the_farthest_proposals():
    """Two lanes at most, T = 4: of lane 0's two drafts only the first is run, so the second, the right one, saves nothing."""
    histories, text = told([[0, 1], [1, 1]], limit=3)
    assert wave(histories, text, 4, [1, 2], twice([1, 2], 4)).recur == 2 + 4
    said = capped_tree(histories, text, 4, [1, 2], 2)
    assert (said.recur, said.accepts, said.widths) == (8, {1: False}, {1: 1 + 4, 2: 3})


def test_lanes_behind_a_wrong_draft_are_exact_only_while_nothing_they_say_matters():
    histories, text = told([[0, 0]] * 5)
    said = wave(histories, text, 5, [1, 3], rereading([1, 3], 5))
    assert said.exact and not said.rows_exact and "read again" in said.note
    once = wave(*told([[0]] * 5), 5, [1], rereading([1], 5))
    assert once.rows_exact and not once.note
    ends = wave(*told([[0]] * 5, eos=[9]), 5, [1], rereading([1], 5))
    assert ends.exact and not ends.rows_exact and "end of text" in ends.note
    nothing = wave(*told([[9], [1]], limit=3, eos=[9]), 4, [1], rereading([1], 4))
    assert nothing.rows_exact and nothing.widths == {1: 8}, "behind a drafted end of text there is no lane"
    block = block_counts([1, 0, 1, 1], told([[1]] * 5, eos=[9])[1], 5, 1, 4)
    assert not block.exact and block.accepts == {1: True, 2: False, 3: True, 4: True}


def test_an_end_of_text_cuts_the_block_it_is_drafted_in_only_behind_right_drafts():
    ended = block_counts([1, 1, 9], Text([1, 1, 9], 10, frozenset([9])), 5, 1, 4)
    assert (ended.recur, ended.rows, ended.runs, ended.accepts) == (3 + 4, 3 + 3 * 4, [3], {1: True, 2: True, 3: True}) and ended.exact
    stopped = block_counts([1, 1], Text([1, 1], 10, frozenset()), 5, 1, 4)  # a stop string: what was drafted beyond it is not judged
    assert (stopped.recur, stopped.accepts, stopped.runs) == (5 + 4, {1: True, 2: True}, [2])
    behind = block_counts([0, 9, 1, 1, 1], told([[1]] * 5, eos=[9])[1], 5, 1, 4)  # blocks of 5, 1 and 3 rows
    assert (behind.recur, behind.widths[5], behind.runs, behind.exact) == (9 + 5 + 7, 4, [0, 0, 2], False)


def test_runs_lie_between_rejected_drafts():
    assert wave(*told([[1], [0], [0], [1]]), 4, [1], rereading([1], 4)).runs == [1, 0]
    assert wave(*told([[0], [1], [1], [1]]), 4, [1], rereading([1], 4)).runs == [0, 2]


def test_the_most_lanes_are_those_of_wrong_ones_that_all_propose_twice():
    histories, text = told([[0, 0]] * 9)
    branching = twice([1, 2], 6)
    assert max(wave(histories, text, 6, [1, 2], branching).widths) == 6
    # Lanes born by tick t behind the first: 1 at 1, and from then on b_t = b_(t-1) + b_(t-2): 1 + 1 + 1 + 2 + 3 + 5 in flight at 6.
    assert most_lanes(histories, text, 6, [1, 2], branching) == 1 + 1 + 1 + 2 + 3 + 5
