"""`python -m figures.NAME RUN_DIR --out FILE`: every figure, from saved tables, in every size and type of file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import figures
from figures import command, presets, style
from loopscope.errors import RunFolderError, SettingError
from loopscope.records import write_table

SCRIPTS = {path.stem: found[1] for path in sorted(Path(figures.__file__).parent.glob("*.py"))
           if (found := re.search(r'raise SystemExit\(main\("(\w+)"\)\)', path.read_text()))}
NO_TABLE = ("concept", "factorial", "grid")  # the first needs none; the others' are made up nowhere
MADE_UP = re.findall(r"^def (\w+)\(model", "".join(p.read_text() for p in Path(__file__).parent.glob("synthetic*.py")), re.M)
DRAWN = [m for m, kind in SCRIPTS.items() if command.TABLES.get(kind, kind) in (*MADE_UP, *command._MANY) and m not in NO_TABLE]
SMALL = {"prompts": 3}


@pytest.fixture(scope="module")
def run(synthetic, tmp_path_factory):
    """A run of two models in a folder with a space and a letter beyond ASCII."""
    import pandas as pd

    folder = tmp_path_factory.mktemp("run") / "mein Läuf 1"
    names = [kind for kind in synthetic.tables() if kind not in ("plan", "timing", "trace", "prefix_effects")]
    for kind in [*names, "plan", "timing", "trace", "prefix_effects"]:
        make, few = getattr(synthetic, kind), {} if kind in ("plan", "timing", "trace", "prefix_effects") else SMALL
        both = [make("tiny-huginn", **few), make("tiny-ouro", **few)]
        write_table(pd.concat(both, ignore_index=True), folder / "tables" / f"{kind}.parquet")
    return folder


def done(kind, run, *words):
    return command.main(kind, [str(run), "--model", "tiny-huginn", *map(str, words)])


def test_every_figure_has_a_script():
    without = {figures._MODULES[kind] for kind in figures.kinds()} - set(SCRIPTS)
    assert not without, f"these files do not end in figures.command's main, as the others do: {without}"
    assert all(figures._MODULES[kind] == module for module, kind in SCRIPTS.items())


@pytest.mark.parametrize("module", DRAWN)
def test_a_script_draws_its_figure_for_a_page_and_a_column(module, run, tmp_path, capsys):
    out = tmp_path / "neuer Ordner" / f"{module}.png"
    preset = "double" if module in ("dashboard", "claims") else "single"
    assert done(SCRIPTS[module], run, "--out", out, "--preset", preset, *["--task", "maths"] * (module != "claims")) == 0
    assert out.read_bytes()[:4] == b"\x89PNG" and [p.name for p in out.parent.iterdir()] == [out.name]
    said = capsys.readouterr().out
    assert str(out) in said and "caption: " in said and f"{presets.PRESETS[preset].width:.2f} x" in said


def test_the_picture_of_the_idea_needs_no_run(tmp_path):
    assert command.main("concept", ["--out", str(tmp_path / "idea.svg")]) == 0


@pytest.mark.parametrize("suffix, magic", [("pdf", b"%PDF"), ("svg", b"<?xm"), ("PNG", b"\x89PNG")])
def test_the_suffix_says_what_is_written_and_an_old_file_is_replaced(suffix, magic, run, tmp_path):
    out = tmp_path / f"a.{suffix}"
    out.write_text("old")
    assert done("settle", run, "--out", out) == 0
    first = out.read_bytes()
    assert first[:4] == magic and list(tmp_path.iterdir()) == [out]
    assert done("settle", run, "--out", out) == 0 and out.read_bytes() == first


def test_vector_files_carry_their_fonts(run, tmp_path):
    for name in ("a.pdf", "a.svg"):
        assert done("settle", run, "--out", tmp_path / name) == 0
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Subtype /Type3" not in pdf
    svg = (tmp_path / "a.svg").read_text()
    assert "<text" not in svg and "font-family" not in svg


@pytest.mark.parametrize("name, found", [("a.jpeg", "found .jpeg"), ("a", "found no suffix"), ("a.", "found")])
def test_an_unknown_suffix_is_refused_before_anything_is_drawn(name, found, tmp_path, capsys):
    assert command.main("settle", [str(tmp_path / "nothing here"), "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert f"{name} should end in .pdf, .svg or .png" in said and found in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind, words", [("convergence", "loopscope probe MODEL --out"), ("depth_grid", "--grid"),
                                         ("speedup", "no table bench; .*loopscope bench"), ("token_grid", r"probes\.token_grid"),
                                         ("schedule", "no table trace; .*loopscope report"), ("dashboard", "loopscope report --out")])
def test_a_missing_table_is_named_with_what_makes_it(kind, words, tmp_path):
    (tmp_path / "tables").mkdir()
    with pytest.raises(RunFolderError, match=words):
        command.figure_of(kind, tmp_path)


def test_a_folder_that_is_not_there_a_broken_table_and_a_folder_in_the_way(run, tmp_path, capsys):
    assert command.main("settle", [str(tmp_path / "gone"), "--out", str(tmp_path / "a.png")]) == 2
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "settle.parquet").write_text("no parquet")
    assert command.main("settle", [str(tmp_path), "--out", str(tmp_path / "a.png")]) == 2
    (tmp_path / "b.png").mkdir()
    assert done("settle", run, "--out", tmp_path / "b.png") == 2
    said = capsys.readouterr().err.splitlines()
    wanted = ("gone is not a folder", "cannot be read as a parquet table", "could not be written")
    assert len(said) == 3 and all(words in line for words, line in zip(wanted, said))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.png", "tables"]


def test_rows_are_chosen_by_model_and_task(run):
    with pytest.raises(SettingError, match="2 models .tiny-huginn, tiny-ouro.: choose one with --model"):
        command.figure_of("settle", run)
    ours = command.figure_of("settle", run, model="tiny-ouro", task="code")
    assert "tiny-ouro" in ours.note.title and "code: mean" in ours.note.alt and "maths" not in ours.note.alt
    with pytest.raises(SettingError, match="--task poetry is not in the table settle; it holds code, maths"):
        command.figure_of("settle", run, model="tiny-ouro", task="poetry")
    with pytest.raises(SettingError, match="--model gpt is not in the table"):
        command.figure_of("settle", run, model="gpt")


def test_a_figure_of_several_tables_does_without_those_that_have_no_such_rows(run, synthetic, tmp_path):
    import shutil

    shutil.copytree(run, tmp_path / "run")
    write_table(synthetic.attribution("tiny-huginn", tasks=("maths",), prompts=2), tmp_path / "run" / "tables" / "attribution.parquet")
    assert "code prompts" in command.figure_of("dashboard", tmp_path / "run", model="tiny-huginn", task="code").note.caption
    with pytest.raises(SettingError, match="--task poetry is not in"):
        command.figure_of("dashboard", tmp_path / "run", model="tiny-huginn", task="poetry")


def test_options_of_a_figure_are_options_of_its_script(run, tmp_path, capsys):
    assert done("trace", run, "--out", tmp_path / "a.png", "--ticks", 5, "--first-tick", 3) == 0
    with pytest.raises(SystemExit):
        done("settle", run, "--out", tmp_path / "a.png", "--ticks", 5)
    figure = command.figure_of("convergence", run, model="tiny-huginn", metric="rel_l2")
    assert "relative L2" in figure.axes[0].get_ylabel()


def test_a_column_shrinks_type_and_breaks_rows_but_keeps_what_is_drawn(run):
    page = command.figure_of("depth_lens", run, model="tiny-huginn")
    column = command.figure_of("depth_lens", run, "single", model="tiny-huginn")
    assert [len(f.axes) for f in (page, column)] == [6, 5]  # the sixth is an empty place
    assert all(list(a.get_ydata()) == list(b.get_ydata()) for x, y in zip(page.axes, column.axes) for a, b in zip(x.lines, y.lines))
    assert column.get_figwidth() == presets.PRESETS["single"].width and column.get_figheight() > page.get_figheight()
    assert column.axes[0].xaxis.label.get_fontsize() == pytest.approx(0.78 * page.axes[0].xaxis.label.get_fontsize())
    assert column.note == page.note and not column.texts and page.texts
    assert len({round(ax.get_position().x1, 3) for ax in column.axes}) == 1 < len({round(ax.get_position().x1, 3) for ax in page.axes})
    for ax in column.axes:
        box = ax.get_tightbbox()
        assert box.x0 >= -1 and box.x1 <= column.bbox.x1 + 1 and ax.get_xlabel() and ax.get_ylabel()


def test_panels_are_counted_in_reading_order(run):
    figure = command.figure_of("depth_lens", run, "single", panels=[2], model="tiny-huginn")
    assert [ax.get_title("left") for ax in figure.axes] == ["Distance to full depth"]
    with pytest.raises(SettingError, match="panels 9 were asked for; this figure has 5"):
        command.figure_of("depth_lens", run, "single", panels=[9], model="tiny-huginn")
    with pytest.raises(SettingError, match="with a preset only: single, double, notebook"):
        command.figure_of("depth_lens", run, panels=[1], model="tiny-huginn")
    with pytest.raises(SettingError, match="did you mean"):
        command.figure_of("depth_lens", run, "singel", model="tiny-huginn")


def test_an_even_split_and_what_is_too_wide():
    panels = [presets._Panel(None, 0, 3.5, 3.0) for _ in range(4)]
    assert [len(row) for row in presets._rows(panels, presets.PRESETS["double"])] == [2, 2]
    with pytest.raises(SettingError, match="too wide for the preset single.*use page or double or notebook"):
        presets._check_width(presets._Panel(None, 0, 9.0, 3.0), presets.PRESETS["single"])


def test_the_room_of_one_drawing_is_gone_after_it(run):
    command.figure_of("settle", run, "single", model="tiny-huginn")
    assert style.fitting(40, 1.5, 0.19) == 40


def test_a_script_is_a_module_that_needs_no_torch(run, tmp_path):
    code = ("import runpy, sys; sys.argv = ['x', sys.argv[1], '--model', 'tiny-huginn', '--out', sys.argv[2]]\n"
            "try: runpy.run_module('figures.settle', run_name='__main__')\n"
            "except SystemExit as end: assert end.code == 0, end.code\n"
            "assert not {'torch', 'transformers', 'transformer_lens'} & set(sys.modules), 'a model library'")
    made = subprocess.run([sys.executable, "-c", code, run, tmp_path / "ä b.pdf"], capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "ä b.pdf").read_bytes()[:4] == b"%PDF"


def test_the_package_itself_lists_them(capsys):
    from figures.__main__ import main

    main()
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == list(figures.modules()) and all((Path(figures.__file__).parent / f"{name}.py").is_file() for name in listed)
