import numpy as np
import pandas as pd
import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, Sampling, Wavefront
from decoders.bench import (
    HEADLINE,
    SPEEDUPS,
    BenchResult,
    bench,
    mismatches,
    reference_of,
    repetition_rate,
    with_references,
)
from decoders.metronome import Metronome
from decoders.repeats import at_one_pace, has_beat
from loopscope.errors import PromptError, SettingError

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [5, 5, 5]]
DECODERS = [Wavefront(1), DraftThenVerify(1, 4), DASWave(3, 1)]


@pytest.fixture(scope="module")
def result(random_core):
    return bench(random_core("huginn", gain=0.2, depth=6), PROMPTS, DECODERS, task="made-up", max_new_tokens=14, repeats=2)


def test_every_decoder_runs_every_prompt_and_equals_ar(result):
    frame = result.frame
    assert len(frame) == len(PROMPTS) * 2 * 4
    assert (frame.token_mismatches == 0).all() and (frame.tokens == 14).all() and frame.lossless.all()
    assert (frame[frame.decoder == "AR"].recur_calls == 13 * 6).all()
    assert (frame.prefill_seconds > 0).all() and (frame.decode_seconds > 0).all()
    assert frame.model.unique().tolist() == ["random-huginn"] and frame.task.unique().tolist() == ["made-up"]


def test_the_order_turns_so_that_every_decoder_goes_first_as_often(result):
    for _, group in result.frame.groupby(["prompt", "repeat"]):
        assert sorted(group.order) == [0, 1, 2, 3]
    first = result.frame[result.frame.order == 0].decoder.value_counts()
    assert first.max() - first.min() <= 1 and len(first) == 4


def test_acceptance_counts_the_same_drafts_as_the_bench(result):
    once = result.frame[result.frame.repeat == 0].groupby("decoder").accepted.sum()
    by_place = result.acceptance.frame.groupby("decoder").accepted.sum()
    for label in ("WFD d=1", "DtV d=1 K=4"):
        assert by_place[label] == once[label]


def test_a_wrong_decoder_is_caught_by_its_mismatches(random_core):
    class Shallow(Autoregressive):
        label = "shallow"

        def generate(self, model, prompt, **options):
            return super().generate(model, prompt, **(options | {"depth": 1}))

    frame = bench(random_core("huginn", gain=1.0, depth=6), PROMPTS, [Shallow()], max_new_tokens=8).frame
    assert frame[frame.decoder == "shallow"].token_mismatches.sum() > 0


def made_up(rows) -> BenchResult:
    """rows: (prompt, decoder, tokens, prefill, decode)."""
    frame = pd.DataFrame([("m", "t", p, 0, 0, d, True, n, prefill, decode, n - 1, n, n, n - 1, 0, 0, 0, 0.0, 0)
                          for p, d, n, prefill, decode in rows], columns=[*BenchResult.columns, "runs"])
    return BenchResult(frame)


def test_the_four_definitions_of_speedup_by_hand():
    """Prompt 0: 10 tokens in 10 s against 6 s. Prompt 1: 40 tokens in 20 s against 4 s. Prefill 1 s within each."""
    rows = made_up([(0, "AR", 10, 1, 9), (1, "AR", 40, 1, 19), (0, "fast", 10, 1, 5), (1, "fast", 40, 1, 3)]).summary()
    fast = rows.set_index("decoder").loc["fast"]
    assert fast.ratio_of_mean_throughputs == pytest.approx(((10 / 6 + 40 / 4) / 2) / ((10 / 10 + 40 / 20) / 2))
    assert fast.total_tokens_over_total_time == pytest.approx((50 / 10) / (50 / 30))
    assert fast.mean_of_prompt_ratios == pytest.approx((10 / 6 + 5) / 2)
    assert fast.decode_only == pytest.approx((48 / 8) / (48 / 28))
    assert fast[HEADLINE] == pytest.approx((9 / 5 / (9 / 9) + 39 / 3 / (39 / 19)) / 2)
    assert len({round(fast[name], 6) for name in (*SPEEDUPS, HEADLINE)}) == 5
    ar = rows.set_index("decoder").loc["AR"]
    assert all(ar[name] == 1 for name in (*SPEEDUPS, HEADLINE))


def test_of_repeats_that_do_the_same_work_the_fastest_counts():
    """Two of three repeats were disturbed, AR's and the decoder's in different ones."""
    times = {"AR": (9, 20, 30), "fast": (50, 40, 3)}
    frames = [made_up([(0, d, 10, 1, seconds[i]) for d, seconds in times.items()]).frame.assign(repeat=i) for i in range(3)]
    fast = BenchResult(pd.concat(frames)).summary().set_index("decoder").loc["fast"]
    assert fast.decode_only == fast[HEADLINE] == pytest.approx(3) and fast.seconds_per_token == pytest.approx(3 / 9)
    assert fast.total_tokens_over_total_time == pytest.approx(10 / 4)


def test_beside_a_metronome_seconds_are_told_at_one_pace():
    """Each decode took what it takes at a pace of 1 times its beat; the median of the repeats counts, not the fastest."""
    rows = [(d, repeat, work * beat, beat) for d, work in (("AR", 9.0), ("fast", 3.0))
            for repeat, beat in enumerate((1.0, 2.0, 4.0) if d == "AR" else (2.0, 0.5, 2.0))]
    frames = [made_up([(0, d, 10, beat, seconds)]).frame.assign(repeat=repeat, beat=beat) for d, repeat, seconds, beat in rows]
    table = pd.concat(frames)
    fast = BenchResult(table).summary().set_index("decoder").loc["fast"]
    assert fast.decode_only == fast[HEADLINE] == pytest.approx(3)
    assert fast.seconds_per_token == pytest.approx(2 * 3 / 9), "the median beat is 2"
    assert fast.total_tokens_over_total_time == pytest.approx((2 * 9 + 2) / (2 * 3 + 2))
    uneven = pd.concat([table[table.decoder == "AR"], *(frame.assign(decode_seconds=frame.decode_seconds * more)
                                                        for frame, more in zip(frames[3:], (1.0, 5.0, 1.5)))])
    assert BenchResult(uneven).summary().set_index("decoder").loc["fast"].decode_only == pytest.approx(3 / 1.5)
    partly = table.assign(beat=table.beat.where(table.repeat > 0))
    assert not has_beat(partly) and at_one_pace(partly) is partly, "a table of which some rows have no beat is read as it is"


def test_a_bench_notes_the_beat_around_every_decode(random_core):
    beats = iter(float(i) for i in range(1000))
    core = random_core("ouro", gain=0.2, depth=3)
    frame = bench(core, PROMPTS[:2], [Wavefront(1)], max_new_tokens=4, metronome=lambda: next(beats)).frame
    assert sorted(frame.beat) == [0.5, 2.5, 4.5, 6.5] and frame.sort_values(["prompt", "order"]).beat.is_monotonic_increasing
    assert bench(core, PROMPTS[:1], [Wavefront(1)], max_new_tokens=4).frame.beat.isna().all()


def test_a_metronome_runs_the_same_calls_at_every_beat(random_core, monkeypatch):
    core = random_core("huginn", depth=5, context=32)
    recur, calls = type(core).recur, []
    monkeypatch.setattr(type(core), "recur", lambda self, *args, **named: (calls.append(args[2]), recur(self, *args, **named))[1])
    short, long = Metronome(core, 1e-9), Metronome(core, 0.2)
    assert short.tokens == 1 < long.tokens
    for metronome in (short, long):
        calls.clear()
        assert metronome() > 0
        assert [rows.depth for rows in calls] == [1, 2, 3, 4, 5] * metronome.tokens and {rows.start for rows in calls} == {31}


def test_beats_tell_the_pace_and_not_how_many_calls_they_are_of(random_core, monkeypatch):
    """A clock that the calls themselves move on: 1 s each. Two metronomes of one model, as before and after an interruption, agree."""
    core, clock = random_core("ouro", depth=3, n_core=1, context=1), [0.0]
    recur = type(core).recur
    monkeypatch.setattr(type(core), "recur", lambda self, *args, **named: (clock.append(clock[-1] + 1), recur(self, *args, **named))[1])
    monkeypatch.setattr("decoders.metronome.time.perf_counter", lambda: clock[-1])
    short, long = Metronome(core, 3), Metronome(core, 12)
    assert (short.tokens, long.tokens) == (1, 4) and short() == long() == 3


def test_the_pace_is_that_of_each_model():
    """Two models in one table, one of them ten times as slow: neither is told at the other's beat."""
    fast, slow = (made_up([(0, "AR", 10, 1, 9 * k)]).frame.assign(beat=float(k), model=f"m{k}") for k in (1, 10))
    told = at_one_pace(pd.concat([fast, slow]))
    assert told.decode_seconds.tolist() == [9, 90]


def test_intervals_pair_prompts_and_vanish_where_all_agree():
    twice = [(p, d, 10, 1, 9 if d == "AR" else 4) for p in range(6) for d in ("AR", "fast")]
    fast = made_up(twice).summary().set_index("decoder").loc["fast"]
    assert fast.mean_of_prompt_ratios_low == fast.mean_of_prompt_ratios_high == 2
    hard = [(p, d, 10, 0.5, (1 + p) * (9 if d == "AR" else 4.5)) for p in range(6) for d in ("AR", "fast")]
    paired = made_up(hard).summary().set_index("decoder").loc["fast"]  # prompts differ a lot, their ratios do not
    assert paired.decode_only_low == pytest.approx(2) and paired.decode_only_high == pytest.approx(2)
    single = made_up([(0, "AR", 10, 1, 9), (0, "fast", 10, 1, 4)]).summary().set_index("decoder").loc["fast"]
    assert np.isnan(single.decode_only_low) and single.decode_only == pytest.approx(2.25)


def test_repetition_rate_by_hand():
    assert repetition_rate([1, 2, 3, 4, 5, 6, 7]) == 0
    assert repetition_rate([1, 2, 1, 2, 1, 2, 1]) == pytest.approx(0.5)  # 4 four-grams, 2 of them new
    assert repetition_rate([1, 2, 3]) == 0


def test_mismatches_count_length_too():
    assert mismatches([1, 2, 3], [1, 2, 3]) == 0
    assert mismatches([1, 9, 3], [1, 2, 3]) == 1
    assert mismatches([1, 2], [1, 2, 3, 4]) == 2


def test_saved_and_loaded(result, tmp_path):
    result.save(tmp_path)
    assert (tmp_path / "acceptance.parquet").is_file()
    pd.testing.assert_frame_equal(BenchResult.load(tmp_path).frame, result.frame)


def test_impossible_benchmarks_are_refused(random_core):
    core = random_core("huginn")
    with pytest.raises(SettingError, match="at least one prompt"):
        bench(core, [], DECODERS)
    with pytest.raises(SettingError, match="one label: WFD d=1"):
        bench(core, PROMPTS, [Wavefront(1), Wavefront(1)])
    with pytest.raises(PromptError, match="empty"):
        bench(core, [[]], DECODERS)


@pytest.fixture(scope="module")
def shared(random_core):
    """A lossless wave and two that share K/V slots, on a model where sharing changes tokens."""
    core = random_core("huginn", gain=1.2, depth=6, n_core=2)
    return bench(core, PROMPTS, [Wavefront(2), Wavefront(2, slots=2), Autoregressive(slots=2)], max_new_tokens=16)


def test_fidelity_travels_with_every_row_and_into_the_summary(shared):
    said = {"AR": "lossless", "WFD d=2": "lossless", "WFD d=2 s=2 (approximate)": "approximate", "AR s=2 (approximate)": "approximate"}
    assert shared.frame.groupby("decoder").fidelity.unique().map(list).to_dict() == {d: [f] for d, f in said.items()}
    assert (shared.frame.lossless == (shared.frame.fidelity == "lossless")).all()
    assert shared.summary().set_index("decoder").fidelity.to_dict() == said


def test_an_approximate_decoder_is_compared_with_ar_and_with_ar_under_the_same_sharing(shared, random_core):
    summary = shared.summary().set_index("decoder")
    assert summary.reference.to_dict() == {"AR": "AR", "WFD d=2": "AR", "WFD d=2 s=2 (approximate)": "AR s=2 (approximate)",
                                           "AR s=2 (approximate)": "AR s=2 (approximate)"}
    twin, wave = summary.loc["AR s=2 (approximate)"], summary.loc["WFD d=2 s=2 (approximate)"]
    assert twin.reference_match == 1 and twin.token_match < 1
    core = random_core("huginn", gain=1.2, depth=6, n_core=2)
    tokens = {name: [d.generate(core, p, max_new_tokens=16).tokens for p in PROMPTS]
              for name, d in (("AR", Autoregressive()), ("twin", Autoregressive(slots=2)), ("wave", Wavefront(2, slots=2)))}
    same = {other: np.mean([a == b for x, y in zip(tokens["wave"], tokens[other]) for a, b in zip(x, y)]) for other in ("AR", "twin")}
    assert wave.token_match == pytest.approx(same["AR"]) and wave.reference_match == pytest.approx(same["twin"])
    assert same["AR"] != same["twin"]


def test_the_reference_is_added_once_and_for_its_number_of_slots():
    labels = [d.label for d in with_references([Wavefront(1, slots=3), Wavefront(2, slots=3), Wavefront(1, slots=1), DASWave(2, 1)])]
    assert labels == ["AR", "AR s=3 (approximate)", "AR s=1 (approximate)", "WFD d=1 s=3 (approximate)", "WFD d=2 s=3 (approximate)",
                      "WFD d=1 s=1 (approximate)", "DAS-Wave J=2 k=1 deep_kv"]
    assert [d.label for d in with_references([Wavefront(1), Autoregressive()])] == ["WFD d=1", "AR"]
    assert reference_of(DraftThenVerify(1, 4)).label == "AR"


def test_sampling_by_shared_noise_is_benched_and_rejection_refused(random_core):
    core = random_core("huginn", gain=0.3, depth=4, n_core=1)
    greedy, sampled = (bench(core, PROMPTS[:2], [Wavefront(1)], max_new_tokens=10, sampling=s)
                       for s in (None, Sampling(temperature=1.3, top_p=0.9)))
    assert sampled.frame.sampling.unique().tolist() == ["T=1.3 top_p=0.9"] and greedy.frame.sampling.unique().tolist() == ["greedy"]
    assert (sampled.frame.token_mismatches == 0).all()
    assert sampled.meta["sampling"] == "T=1.3 top_p=0.9"
    with pytest.raises(SettingError, match="use method='shared_noise'"):
        bench(core, PROMPTS, [Wavefront(1)], sampling=Sampling(method="rejection"))


def test_a_speedup_over_another_decoder_than_ar():
    result = made_up([(p, d, 10, 1, s) for p in range(5) for d, s in (("AR", 9.0 + p), ("plain loop", 18.0 + 2 * p))])
    assert result.speedup("AR", "plain loop") == pytest.approx((2, 2, 2))
    assert result.speedup("plain loop") == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(SettingError, match="did not run WFD d=1; it ran AR, plain loop"):
        result.speedup("WFD d=1")


def test_a_table_without_the_later_columns_is_summarised_as_before():
    summary = made_up([(0, "AR", 10, 1, 9), (0, "fast", 10, 1, 4)]).summary().set_index("decoder")
    assert summary.fidelity.tolist() == ["lossless"] * 2 and summary.reference.tolist() == ["AR"] * 2
    old = made_up([(0, "AR", 10, 1, 9), (0, "fast", 10, 1, 4)]).frame.assign(lossless=[True, False])
    assert BenchResult(old).summary().set_index("decoder").loc["fast", "fidelity"] == "approximate"


def test_garbage_that_was_there_before_is_not_frozen_for_good(random_core):
    import gc

    bench(random_core("huginn", depth=2, n_core=1), PROMPTS[:1], [], max_new_tokens=3)
    assert gc.get_freeze_count() == 0 and gc.isenabled()
