import pandas as pd
import pytest

from decoders import DASWave, Wavefront
from decoders.bench import bench
from decoders.plan import Plan, rank
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
    assert "aligned" in early.evidence and "95%" in early.evidence
    assert "deep kv" in carried.evidence and "95%" in carried.evidence


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
