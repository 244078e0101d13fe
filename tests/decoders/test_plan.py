import pandas as pd
import pytest

from decoders import DASWave, DraftThenVerify, LoopSpec, Plan, Wavefront, plan
from decoders.bench import bench
from decoders.calibrate import Calibration, calibrate
from decoders.plan import rank
from decoders.replay_counts import Outcome
from loopscope.errors import SettingError


def channels(agreement: dict[tuple[str, int], float], lags=(1, 2, 4, 8), prompts=4, task="maths") -> pd.DataFrame:
    """A prefix_channels table with the given agreement at (policy, depth), the same at every lag and prompt."""
    rows = [("m", task, p, "keyed", depth, lag, policy, "none", value, 0.0, 100)
            for (policy, depth), value in agreement.items() for lag in lags for p in range(prompts)]
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "depth", "lag", "policy", "control", "agreement", "kl_nats",
                                       "n_positions"])


EARLY = {("aligned", 1): 0.95, ("aligned", 2): 0.97, ("deep_kv", 1): 0.55, ("deep_kv", 2): 0.6}
CARRIED = {("aligned", 1): 0.55, ("aligned", 2): 0.6, ("deep_kv", 1): 0.95, ("deep_kv", 2): 0.97}


def test_swapping_two_agreements_changes_the_winner(timing):
    """EARLY and CARRIED hold the same numbers; only which policy has which is swapped."""
    early, carried = (rank({"prefix_channels": channels(t)}, timing(), depth=16) for t in (EARLY, CARRIED))
    assert isinstance(early.best, Wavefront) and early.best.draft_depth == 1
    assert isinstance(carried.best, DASWave)
    assert "aligned" in early.evidence and "95% of 400 positions" in early.evidence
    assert "deep kv" in carried.evidence and "95% of 400 positions" in carried.evidence


def test_costs_change_the_winner_too(timing):
    cheap, dear = (rank({"prefix_channels": channels(EARLY)}, timing(per_row=x), depth=16) for x in (0.0, 1.0))
    assert cheap.best.label != "AR"
    assert dear.best.label == "AR"  # where every further row costs a whole call, nothing is gained by running rows together
    assert "AR" in dear.evidence


def test_the_plan_ranks_by_predicted_speed_and_names_a_rival_of_every_other_kind(timing, tmp_path):
    plan = rank({"prefix_channels": channels(EARLY)}, timing(), depth=16, task="maths")
    assert plan.frame.seconds_per_token.is_monotonic_increasing
    assert plan.best.label == plan.frame.decoder.iloc[0]
    assert sorted(type(d).__name__ for d in [plan.best, *plan.rivals]) == ["Autoregressive", "DASWave", "DraftThenVerify", "Wavefront"]
    assert plan.rivals[-1].label == "AR"
    assert plan.frame.set_index("decoder").time_speedup["AR"] == 1.0
    plan.save(tmp_path)
    again = Plan.load(tmp_path)
    assert again.best.label == plan.best.label and again.evidence == plan.evidence


def test_agreement_falls_with_lag_as_measured(timing):
    near, far = channels(EARLY, lags=(1,)), channels({k: v / 2 for k, v in EARLY.items()}, lags=(8,))
    flat = rank({"prefix_channels": near}, timing(), depth=16).frame.set_index("decoder")
    falling = rank({"prefix_channels": pd.concat([near, far])}, timing(), depth=16).frame.set_index("decoder")
    assert falling.calls_per_token["DtV d=1 K=8"] > flat.calls_per_token["DtV d=1 K=8"]
    # at lag 2 a seventh of the way from lag 1 to lag 8
    a1, a2 = 0.95, 0.95 - 0.475 / 7
    assert falling.accepted_per_run["DtV d=1 K=2"] == pytest.approx(a1 + a1 * a2)


def test_depth_lens_stands_in_where_channels_were_not_probed(timing):
    lens = pd.DataFrame([("m", "t", p, "embedding", d, a, 0.0, 0.0, 0.0, 0.0, 50) for p in range(3) for d, a in ((1, 0.9), (2, 0.95))],
                        columns=["model", "task", "prompt", "start", "depth", "agreement", "kl_nats", "entropy_nats", "margin_logits",
                                 "loss_nats", "n_positions"])
    plan = rank({"depth_lens": lens}, timing(), depth=4)
    labels = set(plan.frame.decoder)
    assert "WFD d=1" in labels and "DtV d=2 K=8" in labels
    assert not any("deep_kv" in label for label in labels)  # nothing is known about deep reads, so nothing is claimed


def test_controls_are_not_findings(timing):
    frame = channels(EARLY)
    fake = frame.assign(control="noise_v", agreement=0.0)
    plain, mixed = (rank({"prefix_channels": f}, timing(), depth=16).frame for f in (frame, pd.concat([frame, fake])))
    pd.testing.assert_frame_equal(plain, mixed)


def test_intervals_come_from_prompts(timing):
    same = rank({"prefix_channels": channels(EARLY)}, timing(), depth=16).frame.iloc[0]
    assert same.low == pytest.approx(same.time_speedup) and same.high == pytest.approx(same.time_speedup)
    frame = channels(EARLY)
    frame.loc[frame.prompt == 0, "agreement"] -= 0.3
    varied = rank({"prefix_channels": frame}, timing(), depth=16).frame.iloc[0]
    assert varied.low < varied.time_speedup < varied.high


def test_no_rows_of_the_task_is_said(timing):
    with pytest.raises(SettingError, match="task 'code'"):
        rank({"prefix_channels": channels(EARLY, task="maths")}, timing(), task="code")


def test_measurements_stand_beside_predictions(timing, random_core):
    core = random_core("huginn", gain=0.1, depth=16)
    plan = rank({"prefix_channels": channels(EARLY)}, timing(depth=16))
    result = bench(core, [[1, 2, 3], [4, 5, 6, 7]], [plan.best], max_new_tokens=12)
    both = plan.beside(result).frame
    assert set(both[both.decoder == plan.best.label].basis) == {"predicted", "measured"}
    measured = both[both.basis == "measured"].set_index("decoder")
    assert measured.calls_per_token["AR"] == 16
    rows = result.frame[result.frame.decoder == plan.best.label]
    assert measured.calls_per_token[plan.best.label] == pytest.approx(rows.recur_calls.sum() / (rows.tokens - 1).sum())


def test_with_a_replay_the_plan_says_the_calls_that_the_decoders_then_make(random_core, timing):
    from decoders import Autoregressive, DraftThenVerify
    from decoders.replay import replay

    core = random_core("huginn", gain=0.3, depth=6)
    prompts, tried = [[1, 2, 3], [4, 5, 6, 7]], [Autoregressive(), Wavefront(1), Wavefront(1, redraft=1), DraftThenVerify(2, 4)]
    table = replay(core, prompts, 24, progress=False)
    plan = rank({"prefix_channels": channels(EARLY)}, timing(per_row=0.05), replay=table, depth=6, decoders=tried)
    said = plan.frame.set_index("decoder")
    for decoder in tried:
        made = [decoder.generate(core, prompt, 24) for prompt in prompts]
        counted = sum(g.calls.recur for g in made) / sum(len(g.tokens) - 1 for g in made)
        assert said.calls_per_token[decoder.label] == pytest.approx(counted, abs=1e-12) and said.exact_calls[decoder.label]
    assert said.loc["AR", ["time_speedup", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    for label in ("WFD d=1", "WFD d=1 re=1"):
        assert said.low[label] <= said.time_speedup[label] <= said.high[label]


def settling(v: float, k: float, depth: int = 1) -> pd.DataFrame:
    rows = [("m", "maths", p, "keyed", "none", channel, 0, depth, "cosine", value, 9) for p in range(4) for channel, value in
            (("v", v), ("k", k), ("q", 0.9))]
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "null", "channel", "layer", "depth", "metric", "value",
                                       "n_positions"])


def test_the_evidence_of_a_deep_read_names_its_channels(timing):
    read = {("aligned", 1): 0.47, ("deep_v", 1): 0.67, ("deep_k", 1): 0.52, ("deep_kv", 1): 0.5}
    tables = {"prefix_channels": channels(read), "convergence": settling(0.57, 0.84)}
    deep = plan(tables, timing(), decoders=[DraftThenVerify(1, 4, "deep_v"), DraftThenVerify(1, 4)])
    assert deep.best.read == "deep_v"
    said = "V at depth 1 has cosine .57 to mature, K .84: deep V lifts agreement from .47 to .67, deep K to .52 and deep K/V to .50"
    assert said in deep.evidence
    aligned = plan(tables, timing(), decoders=[DraftThenVerify(1, 4)])
    assert "cosine" not in aligned.evidence, "channels say nothing about a draft that reads at its own depth"


def test_the_plan_can_be_called_before_and_after_its_module_is_imported(timing):
    import decoders

    tables = {"prefix_channels": channels(EARLY)}
    assert decoders.plan(tables, timing(), decoders=[Wavefront(1)]).best.label == plan(tables, timing(), decoders=[Wavefront(1)]).best.label


def test_what_cannot_be_predicted_has_no_row_but_a_reason(timing):
    tried = [Wavefront(1), LoopSpec(1, 2), DASWave(4, 1, read="aligned"), DASWave(4, 1), Wavefront(1, redraft=1)]
    made = rank({"prefix_channels": channels({("aligned", 1): 0.9})}, timing(), depth=8, decoders=tried)
    assert set(made.frame.decoder) == {"AR", "WFD d=1"}
    assert set(made.left_out) == {d.label for d in tried[1:]}
    assert "price" in made.left_out["LoopSpec d1=1 d2=2"] and "not measured" in made.left_out["DAS-Wave J=4 k=1 deep_kv"]
    assert "do not settle" in made.left_out["DAS-Wave J=4 k=1 aligned"]


def test_loopspec_is_planned_where_its_calls_have_a_price(random_core, timing):
    from decoders.replay import replay

    core = random_core("ouro", gain=0.3, depth=5, n_core=1, vocab_size=48)
    table = replay(core, [[1, 2, 3], [4, 5]], 16, progress=False)
    flat = timing(depth=5).frame
    trees = flat[(flat.part == "recur") & (flat["shape"] == "chain")].assign(shape="tree", seconds=3.0)
    price = Calibration(pd.concat([flat, trees], ignore_index=True), {"depth": 5, "injects": False})
    tried = [LoopSpec(1, 2), Wavefront(1)]
    made = rank({"prefix_channels": channels(EARLY)}, price, replay=table, decoders=tried).frame.set_index("decoder")
    got = [LoopSpec(1, 2).generate(core, prompt, 16) for prompt in ([1, 2, 3], [4, 5])]
    assert made.calls_per_token["LoopSpec d1=1 d2=2"] == sum(g.calls.recur for g in got) / 30
    assert 1 < made.seconds_per_call["LoopSpec d1=1 d2=2"] < 3 and made.seconds_per_call["WFD d=1"] == pytest.approx(1)


def test_a_tree_whose_cap_may_bind_is_decoded_where_it_is_near_the_best(random_core, timing):
    from decoders.carried import Refinements
    from decoders.replay import replay

    core = random_core("huginn", gain=0.3, depth=6, n_core=1, vocab_size=48)
    prompts, capped = [[1, 2, 3], [9, 8, 7, 6, 5]], LoopSpec(1, 2, lanes=6)
    table = replay(core, prompts, 24, progress=False)
    flat = timing(depth=6).frame
    counted = sum(capped.generate(core, prompt, 24).calls.recur for prompt in prompts) / 46

    def planned(price: float, **how):
        trees = flat[(flat.part == "recur") & (flat["shape"] == "chain")].assign(shape="tree", seconds=price)
        prices = Calibration(pd.concat([flat, trees], ignore_index=True), {"depth": 6})
        made = rank({"prefix_channels": channels(EARLY)}, prices, replay=table, decoders=[capped, Wavefront(1)], **how)
        return made.frame.set_index("decoder")

    alone, cheap, dear = planned(1.0), planned(1.0, refinements=Refinements(core, prompts, table), screen=True), planned(
        9.0, refinements=Refinements(core, prompts, table), screen=True)
    assert not alone.exact_calls[capped.label] and alone.calls_per_token[capped.label] != counted
    assert cheap.exact_calls[capped.label] and cheap.calls_per_token[capped.label] == counted
    assert not dear.exact_calls[capped.label], "far behind the best: not worth a decode"


class Told:
    """Drafts along texts that were never drafted: every check accepts the same."""

    def __init__(self, accepted: int) -> None:
        self.accepted, self.asked = accepted, []

    def outcome(self, index, decoder):
        if not isinstance(decoder, DASWave):
            return None
        self.asked.append(decoder.label)
        return Outcome(100, 5, 5, 100, 9, 5 * self.accepted, [self.accepted] * 5, {}, {1: 100})


def test_screening_drafts_the_near_ones_only_and_always_what_is_picked(random_core, timing):
    from decoders.replay import replay

    core = random_core("huginn", gain=0.3, depth=16, n_core=1, vocab_size=48)
    table = replay(core, [[1, 2, 3], [4, 5]], 12, progress=False)
    tables, tried = {"prefix_channels": channels(CARRIED)}, [DASWave(j, 1) for j in (1, 2, 4, 8, 12)]
    everything, near = Told(3), Told(3)
    rank(tables, timing(), replay=table, refinements=everything, decoders=tried)
    screened = rank(tables, timing(), replay=table, refinements=near, decoders=tried, screen=True)
    assert set(everything.asked) == {d.label for d in tried} > set(near.asked) >= {screened.best.label} - {"AR"}
    first = rank(tables, timing(), decoders=tried)
    assert near.asked[0] == first.best.label, "the estimate's best is drafted first"
    far = next(d for d in tried if d.label not in near.asked)
    asked = Told(3)
    sure = rank(tables, timing(), replay=table, refinements=asked, decoders=tried, screen=True, certain=[far])
    assert set(asked.asked) == {*near.asked, far.label} and sure.frame.set_index("decoder").exact_calls[far.label]


def test_calls_accepts_and_call_times_have_intervals(timing):
    frame = channels(EARLY)
    frame.loc[frame.prompt == 0, "agreement"] -= 0.3
    steady = timing().frame
    shaky = Calibration(pd.concat([steady.assign(seconds=steady.seconds * f, repeat=i) for i, f in enumerate((0.8, 1.0, 1.2))]),
                        {"depth": 32, "injects": True})
    for price, wide in ((timing(), False), (shaky, True)):
        row = rank({"prefix_channels": frame}, price, depth=16).frame.set_index("decoder").loc["WFD d=1"]
        assert row.calls_low < row.calls_per_token < row.calls_high
        assert row.accepted_low < row.accepted_per_run < row.accepted_high
        assert (row.per_call_high - row.per_call_low > 1e-9) == wide, "at one made-up price per call only the sweep's rounds can differ"
        assert row.low < row.time_speedup < row.high
    alone = rank({"prefix_channels": frame[frame.prompt == 1]}, timing(), depth=16).frame
    assert alone[["low", "high", "calls_low", "accepted_high", "per_call_low"]].isna().all(axis=None)


def noisy(timing, share: float) -> Calibration:
    """Rounds whose interquartile range is `share` of their median, every cell alike."""
    frame = timing().frame
    factors = (1 - share, 1 - share / 2, 1.0, 1 + share / 2, 1 + share)
    return Calibration(pd.concat([frame.assign(seconds=frame.seconds * f, repeat=i) for i, f in enumerate(factors)]),
                       {"depth": 32, "injects": True})


def test_findings_and_calibration_of_different_models_are_refused(random_core):
    from decoders import Findings

    huginn = random_core("huginn", gain=0.2, depth=5, n_core=1, vocab_size=48)
    found = Findings.collect(huginn, [[1, 2, 3], [4, 5, 6]], new_tokens=4, max_positions=2, nulls=("none",), rounds=2, model_name="h",
                             progress=False)
    deeper = calibrate(random_core("ouro", depth=3), prefix_length=8, rows=(1, 2), repeats=1, host=False, model_name="o")
    with pytest.raises(SettingError, match="h with T = 5, the calibration is of o with T = 3: calibrate the model that"):
        plan(found, deeper)
    for alone in ({"replay": found.tables["replay"], "depth_lens": found.tables["depth_lens"].frame},
                  {"depth_lens": found.tables["depth_lens"]}):
        with pytest.raises(SettingError, match="T = 5, .*T = 3"):
            plan(alone, deeper)
    bare = calibrate(random_core("ouro", depth=5), prefix_length=8, rows=(1, 2), repeats=1, host=False, model_name="o")
    with pytest.raises(SettingError, match="h with an injected embedding, the calibration is of o with no injected embedding"):
        plan(found, bare)
    own = calibrate(huginn, prefix_length=8, rows=(1, 2), repeats=1, host=False)
    assert plan(found, own, decoders=[Wavefront(1)]).best.label in {"AR", "WFD d=1"}


def test_what_is_no_findings_or_no_calibration_is_said(random_core, timing):
    core = random_core("huginn")
    with pytest.raises(SettingError, match="first Findings.collect"):
        plan(core, timing())
    with pytest.raises(SettingError, match="needs a calibration.*calibrate\\(model\\)"):
        plan({"prefix_channels": channels(EARLY)}, core)


def test_a_plan_prints_its_evidence_and_its_first_rows(random_core, timing, tmp_path):
    from decoders.replay import replay

    core = random_core("huginn", gain=0.3, depth=6, vocab_size=48)
    table = replay(core, [[1, 2, 3], [4, 5, 6, 7]], 24, progress=False)
    made = plan({"prefix_channels": channels({k: v for k, v in EARLY.items() if k[0] == "aligned"}), "replay": table},
                timing(per_row=0.05, depth=6))
    estimated = plan({"prefix_channels": channels(EARLY)}, timing(per_row=0.05, depth=6))
    made.save(tmp_path)
    for own, basis in ((made, "exact"), (Plan.load(tmp_path), "exact"), (estimated, "estimated")):
        lines = str(own).splitlines()
        assert lines[0] == own.evidence and "calls per token" in lines[2]
        first, cells = own.frame.iloc[0], lines[3].split()
        assert lines[3].startswith(first.decoder) and cells[-1] == basis and f"{first.calls_per_token:.2f}" in cells
        assert f"{first.time_speedup:.2f}x [{first.low:.2f}, {first.high:.2f}]" in lines[3]
        assert len(lines) == 3 + 8 + 1 and f"and {len(own.frame) - 8} more" in lines[-1]
        assert repr(own).count("\n") == 0 and own.best.label in repr(own)


def test_a_plan_without_intervals_prints_none(timing):
    alone = plan({"prefix_channels": channels(EARLY, prompts=1)}, timing(), decoders=[Wavefront(1)])
    assert "nan" not in str(alone) and "interval" not in alone.evidence and "more: " not in str(alone)
    assert "95% of 100 positions" in alone.evidence


def test_the_evidence_gives_the_interval_of_its_speedup(timing):
    frame = channels(EARLY)
    frame.loc[frame.prompt == 0, "agreement"] -= 0.3
    made = plan({"prefix_channels": frame}, timing(), decoders=[Wavefront(1)])
    first = made.frame.iloc[0]
    assert first.low < first.high
    assert made.evidence.endswith(f"{first.time_speedup:.2f}x the speed of AR (95 % interval {first.low:.2f} to {first.high:.2f}).")


def test_the_evidence_says_when_call_times_scattered(timing):
    tables = {"prefix_channels": channels(EARLY)}
    quiet, rough = (plan(tables, noisy(timing, share), decoders=[Wavefront(1)]).evidence for share in (0.2, 0.4))
    assert "rough" not in quiet and rough.endswith("; call times scattered by 40 % while they were measured, so seconds are rough.")
    dear = noisy(timing, 0.4)
    dear = Calibration(dear.frame.assign(seconds=dear.frame.seconds * dear.frame["rows"] ** 2), dear.meta)
    alone = plan(tables, dear, decoders=[Wavefront(1)])
    assert alone.best.label == "AR" and alone.evidence.endswith("so seconds are rough.")


@pytest.mark.parametrize("v, k, kv, said", [
    (0.99, 0.99, 0.99, ": agreement is .99 whichever is read)"),
    (0.99, 0.95, 0.99, ": deep V leaves agreement at .99, deep K takes it to .95 and deep K/V takes it to .99)"),
    (0.97, 0.95, 0.96, ": deep V does not lift agreement, which falls from .99 to .97, deep K to .95 and deep K/V to .96)")])
def test_channels_that_lift_nothing_are_not_said_to(timing, v, k, kv, said):
    read = {("aligned", 1): 0.99, ("deep_v", 1): v, ("deep_k", 1): k, ("deep_kv", 1): kv}
    tables = {"prefix_channels": channels(read), "convergence": settling(0.57, 0.84)}
    assert said in plan(tables, timing(), decoders=[DraftThenVerify(1, 4, "deep_v")]).evidence


def test_positions_are_those_of_the_cell_that_is_read():
    from decoders.agreements import Agreements

    few = channels({("aligned", 1): 0.5}, lags=(1,)).assign(n_positions=7)
    many = channels({("aligned", 1): 0.5}, lags=(8,)).assign(n_positions=9)
    found = Agreements({"prefix_channels": pd.concat([few, many])})
    assert [found.positions("aligned", 1, lag) for lag in (1, 4, 8, 20)] == [28, 28, 36, 36]
    assert found.positions("deep_v", 1, 1) == 0


def test_a_calibration_that_does_not_say_its_depth_is_refused(timing):
    """As a run's table of all its models is."""
    with pytest.raises(SettingError, match="the calibration does not say of which T it is"):
        rank({"prefix_channels": channels(EARLY)}, Calibration(timing().frame))
