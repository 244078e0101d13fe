"""The gallery page: it lists every figure, shows those of the shipped run, and its commands work."""

import re
import shlex

import figures
from figures import command, gallery_page

DOCS = gallery_page.DOCS
PAGE = (DOCS / "gallery.md").read_text()
COMMANDS = [shlex.split(block) for block in re.findall(r"^```sh\n(.*?)\n```", PAGE, re.S | re.M)]


def test_the_page_lists_every_figure_once_and_is_what_make_gallery_writes():
    modules = sorted({f"figures.{module}" for module in figures._MODULES.values()})
    assert sorted(words[2] for words in COMMANDS) == modules, "run: python -m figures.gallery_page --page"
    assert PAGE == gallery_page.page(), "run: python -m figures.gallery_page --page"


def test_every_command_of_the_page_is_one_and_its_rows_are_in_the_run(monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    kinds = {f"figures.{figures._MODULES[kind]}": kind for kind in gallery_page.figures_of_page()}
    for words in COMMANDS:
        kind = kinds[words[2]]
        told = command.parser(kind).parse_args(words[3:])
        if kind != "concept" and (DOCS / "gallery" / f"{words[2].split('.')[1]}.png").exists():
            assert command.read(kind, told.run)
            assert told.model == gallery_page.MODEL


def test_most_figures_have_a_picture_and_all_of_it_is_small():
    shown = re.findall(r"!\[.*\]\(gallery/(\w+)\.png\)", PAGE)
    assert len(shown) >= 20 and len(shown) == len(set(shown))
    sizes = {path.name: path.stat().st_size for path in (DOCS / "gallery").rglob("*") if path.is_file()}
    assert all(f"{name}.png" in sizes for name in shown)
    assert max(sizes.values()) < 200_000 and sum(sizes.values()) < 2_500_000


def test_a_picture_is_drawn_from_the_shipped_run(tmp_path):
    import shutil

    (tmp_path / "gallery").mkdir()
    shutil.copytree(DOCS / "gallery" / "run", tmp_path / "gallery" / "run")
    file = gallery_page.picture("settle", tmp_path)
    assert file == tmp_path / "gallery" / "settle.png" and file.stat().st_size < 60_000


def test_a_picture_of_few_colours_keeps_those_that_mean_something(tmp_path):
    import shutil

    import numpy as np
    from matplotlib.image import imread

    from figures import style

    (tmp_path / "gallery").mkdir()
    shutil.copytree(DOCS / "gallery" / "run", tmp_path / "gallery" / "run")
    pixels = np.unique((255 * imread(gallery_page.picture("dashboard", tmp_path))[..., :3].reshape(-1, 3)).round(), axis=0)
    for look in style.CHANNELS.values():
        wanted = [int(look.colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(1).min() <= 15, look
