"""Figures: each kind draws, from full tables and from the smallest ones, with labels and units, and leaves no trace behind."""

import subprocess
import sys

import matplotlib
import pytest

import figures
from loopscope.errors import RunFolderError, SettingError

TABLES = [
    "convergence", "depth_lens", "settle", "token_grid", "attribution", "trajectories", "head_stability", "depth_similarity",
    "block_lens", "layer_fixed_points", "head_attribution", "linear_probe", "patching", "prefix_channels", "prefix_effects",
    "depth_grid", "acceptance", "acceptance_by_depth", "bench", "plan", "timing", "trace", "second_candidate", "agreement_runs", "hops",
]  # fmt: skip
UNITS = {  # words that the axis labels of a figure must carry
    "convergence": ["recurrence depth", "cosine similarity"], "depth_lens": ["(nats)", "(logits)", "top-1 agreement", "recurrence depth"],
    "settle": ["share of positions", "settle depth"], "attribution": ["contribution (logits)", "recurrence depth", "= logit"],
    "trajectories": ["recurrence depth", "(degrees)", "main direction 1", "share of positions"],
    "head_stability": ["recurrence depth", "JS divergence to depth T (nats)"],
    "depth_similarity": ["recurrence depth r", "recurrence depth s", "linear CKA"],
    "block_lens": ["rank of the final token", "probability of the final token", "recurrences applied"],
    "layer_fixed_points": ["recurrence depth r", "(share)", "share of positions"],
    "head_attribution": ["contribution (logits)", "recurrence depth r", "layer 0 head 1"],
    "linear_probe": ["held-out accuracy", "recurrence depth", "better than the control"],
    "patching": ["restored (1: the clean answer)", "recurrence depth r", "layer 0 head 1"],
    "second_candidate": ["recurrence depth", "share of positions", "runner-up right"],
    "agreement_runs": ["positions n in a row", "share of windows"], "hops": ["(hops)", "share of anchors"],
    "token_grid": ["recurrence depth r", "probability of the top token", "input token"],
    "prefix_channels": ["draft depth", "change in top-1 agreement", "(nats)"],
    "prefix_effects": ["change in top-1 agreement", "(nats)"], "depth_grid": ["keys read at depth", "values read at depth"],
    "acceptance": ["accepted / reached", "place of the draft"],
    "acceptance_by_depth": ["accepted / compared", "recurrences after which", "drafts compared"],
    "bench": ["decode seconds", "recurrence calls"],
    "plan": ["predicted", "measured", "wall clock"], "timing": ["milliseconds", "rows in the call"], "trace": ["tick", "position"],
}  # fmt: skip


def one_prompt(kind, frame):
    frame = frame[frame["task"] == frame["task"].iloc[0]] if "task" in frame else frame
    return frame[frame["prompt"] == frame["prompt"].iloc[0]] if "prompt" in frame else frame


def one_depth(frame):
    for column in ("depth", "settle_depth", "k_depth", "v_depth", "position", "rows"):
        if column in frame:
            frame = frame[frame[column] == frame[column].min()]
    return frame


def text_of(figure):
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def png(figure, tmp_path, name, frame):
    return figures.save(figure, frame, tmp_path, name)[0].read_bytes()


@pytest.mark.parametrize("kind", TABLES)
def test_every_table_draws_with_title_units_and_alternative_text(kind, synthetic):
    figure = figures.draw(kind, synthetic.tables()[kind])
    words = text_of(figure)
    for unit in UNITS[kind]:
        assert unit in words
    assert synthetic.MODEL in figure.note.title and figure.note.title in words
    assert synthetic.MODEL in figure.note.alt or kind == "trace"
    assert any(c.isdigit() for c in figure.note.alt)
    assert figure.note.caption.split(" ")[0] in words


@pytest.mark.parametrize("kind", TABLES)
def test_the_smallest_tables_draw_without_a_warning(kind, synthetic, tmp_path, recwarn):
    small = one_prompt(kind, synthetic.tables()[kind])
    figures.save(figures.draw(kind, small), small, tmp_path, "one_prompt")
    if kind != "trace":
        smallest = one_depth(small)
        figures.save(figures.draw(kind, smallest), smallest, tmp_path, "one_depth")
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize("kind", ["convergence", "depth_lens", "prefix_channels", "acceptance", "bench"])
def test_captions_state_prompts_interval_and_start(kind, synthetic):
    frame = synthetic.tables()[kind]
    caption = figures.draw(kind, frame).note.caption
    n = len(frame.groupby(["task", "prompt"]))
    assert f"{n} prompts" in caption and "95 % bootstrap interval over prompts" in caption
    if kind in ("convergence", "prefix_channels"):
        assert "start state: keyed random" in caption
    assert "no interval" in figures.draw(kind, one_prompt(kind, frame)).note.caption


@pytest.mark.parametrize("kind", ["convergence", "bench", "trace", "prefix_channels"])
def test_the_same_table_gives_the_same_bytes(kind, synthetic, tmp_path):
    frame = synthetic.tables()[kind]
    first, second = (figures.save(figures.draw(kind, frame), frame, tmp_path / n, kind) for n in "ab")
    for a, b in zip(first[:3], second[:3]):
        assert a.read_bytes() == b.read_bytes(), a.suffix


def test_another_table_gives_another_picture(synthetic, tmp_path):
    frame = synthetic.settle()
    other = frame.assign(settle_depth=frame["settle_depth"] + 1)
    assert png(figures.draw("settle", frame), tmp_path, "a", frame) != png(figures.draw("settle", other), tmp_path, "b", other)


def test_rows_in_another_order_give_the_same_picture(synthetic, tmp_path):
    frame = synthetic.bench()
    shuffled = frame.sample(frac=1, random_state=0)
    assert png(figures.draw("bench", frame), tmp_path, "a", frame) == png(figures.draw("bench", shuffled), tmp_path, "b", shuffled)


def test_save_writes_three_formats_and_the_table(synthetic, tmp_path):
    from loopscope.records import read_table

    frame = synthetic.settle()
    files = figures.save(figures.draw("settle", frame), frame, tmp_path / "new" / "folder", "settle")
    assert [f.name for f in files] == ["settle.png", "settle.svg", "settle.pdf", "settle.parquet"]
    assert [f.read_bytes()[:4] for f in files[:3]] == [b"\x89PNG", b"<?xm", b"%PDF"]
    assert read_table(files[3])[0].equals(frame)
    assert sorted(p.name for p in files[0].parent.iterdir()) == sorted(f.name for f in files)


def test_a_failed_save_leaves_nothing(synthetic, tmp_path, monkeypatch):
    frame = synthetic.settle()
    figure = figures.draw("settle", frame)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(RunFolderError, match="No space left"):
        figures.save(figure, frame, tmp_path, "settle")
    assert list(tmp_path.iterdir()) == []


def test_saving_into_a_file_is_one_clear_error(synthetic, tmp_path):
    (tmp_path / "taken").write_text("")
    frame = synthetic.settle()
    with pytest.raises(RunFolderError, match="cannot hold figures"):
        figures.save(figures.draw("settle", frame), frame, tmp_path / "taken", "settle")


def test_drawing_changes_no_global_setting(synthetic, tmp_path):
    before = dict(matplotlib.rcParams)
    for kind in ("depth_grid", "bench", "trace"):  # seaborn's, bars, and hand-placed text
        figures.draw(kind, synthetic.tables()[kind])
    frame = synthetic.settle()
    figures.save(figures.draw("settle", frame), frame, tmp_path, "settle")
    with pytest.raises(SettingError):
        figures.draw("settle", frame[:0])
    assert dict(matplotlib.rcParams) == before


def test_importing_figures_imports_no_plotting_library():
    code = "import sys, figures; assert not {'matplotlib', 'seaborn', 'pandas', 'scipy'} & set(sys.modules), 'heavy import'"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


def test_an_unknown_kind_names_the_known_ones(synthetic):
    with pytest.raises(SettingError, match=r"'convergense'.*did you mean 'convergence'.*known: .*depth_lens"):
        figures.draw("convergense", synthetic.settle())


@pytest.mark.parametrize("kind", TABLES)
def test_empty_and_foreign_tables_are_refused_by_name(kind, synthetic):
    frame = synthetic.tables()[kind]
    with pytest.raises(SettingError, match="no rows"):
        figures.draw(kind, frame[:0])
    with pytest.raises(SettingError, match="needs the columns .*model"):
        figures.draw(kind, frame.drop(columns="model"))
    with pytest.raises(SettingError, match="model='gpt'.*tiny-huginn"):
        figures.draw(kind, frame, model="gpt")


def test_two_models_in_one_table_must_be_chosen_between(synthetic):
    import pandas as pd

    both = pd.concat([synthetic.settle(), synthetic.settle("tiny-ouro")])
    with pytest.raises(SettingError, match="2 values of model"):
        figures.draw("settle", both)
    assert "tiny-ouro" in figures.draw("settle", both, model="tiny-ouro").note.title


def test_nulls_and_controls_are_in_the_legend(synthetic):
    words = text_of(figures.draw("convergence", synthetic.convergence()))
    assert all(w in words for w in ("random weights", "token mean removed", "random map"))
    words = text_of(figures.draw("prefix_channels", synthetic.prefix_channels()))
    assert all(w in words for w in ("shuffled", "another prompt's V", "noise"))


def test_a_table_without_nulls_controls_or_lags_still_draws(synthetic):
    figures.draw("convergence", synthetic.convergence(nulls=("none",)), metric="rel_l2")
    frame = synthetic.prefix_channels(lags=(1,))
    figures.draw("prefix_channels", frame[frame["control"] == "none"])


def test_unmeasured_and_unpredicted_decoders_still_draw(synthetic):
    plan = synthetic.plan()
    figures.draw("plan", plan[plan["basis"] == "predicted"])
    figures.draw("plan", plan[plan["basis"] == "measured"])


def test_speedups_without_autoregressive_rows_are_refused(synthetic):
    bench = synthetic.bench()
    with pytest.raises(SettingError, match="no AR rows; it holds DtV"):
        figures.draw("bench", bench[bench["decoder"] != "AR"])


def test_tokens_that_look_like_mathematics_or_html_are_drawn_as_text(synthetic, tmp_path, recwarn):
    frame = synthetic.trace()
    frame["token"] = ["$\\frac{", "\n\t", "\u6f22\u5b57", "<script>", "$$"] * (len(frame) // 5) + ["x"] * (len(frame) % 5)
    figures.save(figures.draw("trace", frame), frame, tmp_path, "trace")
    assert [str(w.message) for w in recwarn] == []


def test_the_schedule_marks_what_the_trace_holds(synthetic):
    frame = synthetic.trace()
    alt = figures.draw("trace", frame).note.alt
    counts = frame["event"].value_counts()
    assert f"{counts['accept']} accepted" in alt and f"{counts['reject']} rejected" in alt and f"{counts['commit']} tokens" in alt
    window = figures.draw("trace", frame, ticks=5, first_tick=3)
    assert window.axes[0].get_xlim() == pytest.approx((2.3, 7.7))
    with pytest.raises(SettingError, match="no ticks from 500"):
        figures.draw("trace", frame, first_tick=500)


def test_dashboard_joins_tables_and_says_what_is_missing(synthetic):
    tables = synthetic.tables()
    full = text_of(figures.draw("dashboard", tables))
    assert "Mature-V: helps on maths" in full and "no plan table" not in full
    assert "Use DAS-Wave J=12 k=1 deep_kv on maths: " in full and "the plan's pick" in full
    partial = text_of(figures.draw("dashboard", {"depth_lens": tables["depth_lens"]}))
    assert "no bench table in this run" in partial and "Mature-V was not measured" in partial
    with pytest.raises(SettingError, match="at least one table"):
        figures.draw("dashboard", {})


def test_dashboard_headline_follows_the_findings(synthetic):
    tables = synthetic.tables()
    channels = tables["prefix_channels"]
    worse = channels.assign(agreement=channels["agreement"] - 0.3 * (channels["policy"] == "deep_v"))
    assert "Mature-V: hurts on maths" in text_of(figures.draw("dashboard", {**tables, "prefix_channels": worse}))
    bench = tables["bench"]
    slowed = bench.assign(decode_seconds=bench["decode_seconds"] * (1 + 5 * (bench["decoder"].str.startswith("DAS"))))
    assert "Use WFD d=1 on maths: " in text_of(figures.draw("dashboard", {**tables, "bench": slowed}))


def test_the_concept_picture_needs_no_data():
    assert "Mature-V" in text_of(figures.draw("concept", None))


def test_acceptance_by_depth_pools_places_and_says_the_shallowest(synthetic):
    frame = synthetic.acceptance_by_depth(tasks=["maths"])
    pooled = frame.groupby(["decoder", "depth"])[["accepted", "compared"]].sum()
    rate = pooled.accepted / pooled.compared
    alt = figures.draw("acceptance_by_depth", frame).note.alt
    assert f"maths WFD d=1 re=2 {rate['WFD d=1 re=2', 1]:.2f}" in alt and f"maths PLD K=8 n=3 {rate['PLD K=8 n=3', 0]:.2f}" in alt


def test_places_of_long_runs_are_taken_together_and_nothing_is_lost(synthetic):
    from figures import acceptance

    frame = synthetic.acceptance(tasks=["maths"])  # 8 places, and 13 of DAS-Wave's
    pooled = acceptance.together(frame)
    assert dict(zip(pooled["position"], pooled["words"])) == {1: "1", 2: "2", 3: "3-4", 4: "5-8", 5: "9-16"}
    for column in ("reached", "accepted"):
        assert pooled[column].sum() == frame[column].sum()
    nine = frame[frame["position"] == 9].groupby("decoder")["reached"].sum()
    assert pooled[pooled["position"] == 5].groupby("decoder")["runs"].sum().to_dict() == nine.to_dict()
    words = text_of(figures.draw("acceptance", frame))
    assert "9-16" in words and "3-4" in words
    short = frame[frame["position"] <= 8]
    assert acceptance.together(short) is short and "3-4" not in text_of(figures.draw("acceptance", short))


def test_the_grid_names_its_rings_and_its_ratios_are_logarithmic():
    import pandas as pd

    rows = [("m", "maths", d, x, y, d == "WFD d=1") for d, x, y in (("AR", 1.0, 1.0), ("WFD d=1", 2.0, 1.8), ("DtV d=1 K=8", 1.5, 2.0))]
    frame = pd.DataFrame(rows, columns=["model", "task", "decoder", "speedup_predicted", "speedup_measured", "planned"])
    figure = figures.draw("grid", frame)
    words = text_of(figure)
    assert "the plan's pick" in words and "the fastest measured" in words and "regret 10.0%" in words
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log" and "best DtV d=1 K=8 2.00x" in figure.note.alt


def test_a_grid_of_depths_shows_noise_as_noise(synthetic):
    frame = synthetic.depth_grid(tasks=("maths",))
    flat = frame.assign(agreement=0.9 + 0.001 * (frame["v_depth"] == 16) * (frame["prompt"] % 2))
    figure = figures.draw("depth_grid", flat)
    low, high = figure.axes[0].collections[0].get_clim()
    assert high - low > 0.0999 and not any(t.get_fontweight() == "bold" for t in figure.axes[0].texts if t.get_text() == "0.900")
    clear = frame.assign(agreement=0.8 + 0.1 * (frame["v_depth"] == 16) + 0.002 * frame["prompt"])
    bold = {t.get_text() for t in figures.draw("depth_grid", clear).axes[0].texts if t.get_fontweight() == "bold"}
    assert bold == {"0.911"}  # the column of full-depth values, and nothing else
    few = figures.draw("depth_grid", clear[clear["prompt"] < 4])
    assert not any(t.get_fontweight() == "bold" for t in few.axes[0].texts) and "too few to say" in few.note.caption


def test_late_settling_is_one_bar_and_adds_up(synthetic):
    import pandas as pd

    rows = [(synthetic.MODEL, "maths", 0, "keyed", depth, n) for depth, n in ((1, 900), (2, 97), (9, 1), (14, 2))]
    table = pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "settle_depth", "positions"])
    ax = figures.draw("settle", table).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "later"]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0.9, 0.097, 0.003]) and "0.3%" in text_of(ax.figure)
    alone = figures.draw("settle", table[table["settle_depth"] <= 2]).axes[0]
    assert [label.get_text() for label in alone.get_xticklabels()] == ["1", "2"]
