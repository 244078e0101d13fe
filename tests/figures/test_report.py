"""The report is one page without a network, says what the tables say, and a run folder redraws without a model."""

import base64
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from figures.gallery import slugs
from figures.redraw import read_tables, redraw
from figures.report import write_report
from loopscope.errors import RunFolderError
from loopscope.records import write_table

EVIL = "<script>alert(1)</script>"
FINDINGS = [
    {"model": "tiny-huginn", "task": "maths", "verdict": "helps", "sentence": "tiny-huginn, maths: Mature-V holds: +1.4 points."},
    {"model": "tiny-huginn", "topic": "decoder", "sentence": f"DAS-Wave follows, said the prompt {EVIL}"},
    {"model": "tiny-huginn", "topic": "approximate", "sentence": "The sky is rounded to blue."},
]
MANIFEST = {"command": "loopscope report tiny-huginn --out RUN", "git": "abc1234", "versions": {"torch": "2"}, "hardware": {"cpu": EVIL}}


class Page(HTMLParser):
    """Tags with their attributes, and the text outside style."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data

    def all(self, tag):
        return [a for t, a in self.tags if t == tag]


def small(synthetic):
    """Few rows: these tests are about the page, not about drawing."""
    few = {"prompts": 3, "tasks": ("maths",)}
    return {
        "depth_lens": synthetic.depth_lens(depths=4, starts=("keyed",), **few),
        "prefix_channels": synthetic.prefix_channels(depths=(1, 2), lags=(1,), **few),
        "prefix_effects": synthetic.prefix_effects(tasks=("maths",), depths=(1,), lags=(1,)),
        "bench": synthetic.bench(repeats=1, **few),
        "plan": synthetic.plan(tasks=("maths",)),
        "trace": synthetic.trace(),
    }


@pytest.fixture(scope="module")
def run(synthetic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path = write_report(folder, small(synthetic), MANIFEST, FINDINGS)
    return folder, path, Page(path.read_text(encoding="utf-8"))


def test_the_page_reaches_for_nothing_outside_the_run_folder(run):
    folder, path, page = run
    assert path == folder / "report.html" and page.open == []
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe") and (tag != "script" or not attributes)  # a script of the page's own, fetched from nowhere
        for name in ("src", "href"):
            target = attributes.get(name) or ""
            assert re.match(r"data:image/(svg\+xml|png);base64,|#|figures/|tables/|$", target), target[:80]
    assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_every_image_has_words_and_every_figure_link_has_a_file(run):
    folder, _, page = run
    images = page.all("img")
    assert len(images) >= 7
    for image in images:
        assert len(image["alt"]) > 60
        assert base64.b64decode(image["src"].split(",", 1)[1])[:4] in (b"<?xm", b"\x89PNG")
    for link in page.all("a"):
        if link["href"].startswith("figures/"):
            assert (folder / link["href"]).is_file()
        if link["href"].startswith("#"):
            assert any(a.get("id") == link["href"][1:] for _, a in page.tags), link["href"]


def test_text_from_prompts_and_files_is_escaped(run):
    _, path, page = run
    assert EVIL not in path.read_text()
    assert page.text.count(EVIL) >= 2  # the finding and the manifest, both as plain text


def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(run):
    scrolling = [a for _, a in run[2].tags if "scroll" in (a.get("class") or "").split()]
    assert scrolling and all(a["tabindex"] == "0" and a["aria-label"] for a in scrolling)
    assert run[2].all("html")[0]["lang"] == "en"
    assert "width=device-width" in str(run[2].all("meta"))


def test_the_reader_finds_the_terms_the_verdict_and_the_numbers(run):
    text = " ".join(run[2].text.split())
    for needed in (
        "Looped model", "Mature-V (deep V)", "values at full depth", "Mature-V holds: +1.4 points.", "DtV (draft-then-verify)",
        "WFD (wavefront)", "Predicted beside measured", "The sky is rounded to blue.",
        "WFD d=1: token for token equal to AR: yes (3 generations, 192 tokens).",
        "loopscope intervene tiny-huginn", "loopscope report tiny-huginn --out RUN", "abc1234", "lossless",
    ):  # fmt: skip
        assert needed in text, needed


def test_mismatches_and_approximate_decoders_are_said_aloud(synthetic, tmp_path):
    bench = synthetic.bench(prompts=2, repeats=1, tasks=("maths",), mismatches=2)
    bench["lossless"] = bench["decoder"] != "WFD d=1"
    text = " ".join(Page(write_report(tmp_path, {"bench": bench}, {}).read_text()).text.split())
    assert "WFD d=1: token for token equal to AR: no (2 generations, 128 tokens, 4 tokens differ). This decoder is approximate" in text
    assert "Decoders that are not lossless: WFD d=1 (approximate)." in text
    assert "Whether Mature-V holds on tiny-huginn was not judged in this run." in text


def test_an_interrupted_report_leaves_no_page(synthetic, tmp_path, monkeypatch):
    import figures.report

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(figures.report, "_section", stop)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path, {"plan": synthetic.plan()}, {})
    assert not (tmp_path / "report.html").exists()


def test_a_run_folder_redraws_from_its_tables_alone(synthetic, tmp_path, monkeypatch):
    import sys

    tables = {k: t for k, t in small(synthetic).items() if k in ("plan", "trace")}
    for kind, table in tables.items():
        write_table(table, tmp_path / "tables" / f"{kind}.parquet")
    for module in ("torch", "transformers", "transformer_lens"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it would raise
    files = redraw(tmp_path)
    names = {f.name for f in files}
    assert {"tiny-huginn_dashboard.png", "tiny-huginn_plan.svg", "tiny-huginn_schedule_wfd-d-1.pdf", "tiny-huginn_plan.parquet"} <= names
    assert all(f.is_file() and f.parent == tmp_path / "figures" for f in files)
    before = {f.name: f.read_bytes() for f in files if f.suffix in (".png", ".svg", ".pdf")}
    again = redraw(tmp_path, tmp_path / "elsewhere")
    assert {f.name: f.read_bytes() for f in again if f.suffix in (".png", ".svg", ".pdf")} == before


def test_no_two_names_make_one_file():
    names = ["A b", "a-b", "a b", "модель", "модель2", "...", "---", "x" * 300, "x" * 301, "\ud800", "org/Model 1"]
    files = slugs(names)
    assert list(files) == names and len(set(files.values())) == len(names)
    assert files["a-b"] == "a-b" and files["org/Model 1"] == "org-model-1"
    assert all(re.fullmatch("[a-z0-9][a-z0-9.-]{0,99}", file) for file in files.values()), files


def test_models_that_differ_in_case_only_keep_their_figures_apart(synthetic, tmp_path):
    tables = {"timing": pd.concat([synthetic.timing().assign(model=m) for m in ("A b", "a-b")], ignore_index=True)}
    page = Page(write_report(tmp_path, tables, {}).read_text())
    assert len(list((tmp_path / "figures").glob("a-b*_timing.png"))) == 2
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_missing_and_broken_tables_are_named(synthetic, tmp_path):
    with pytest.raises(RunFolderError, match="is not a folder"):
        redraw(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="has no tables"):
        redraw(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "plan.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(RunFolderError, match=r"plan\.parquet cannot be read"):
        redraw(tmp_path)
    write_table(synthetic.plan().drop(columns="time_speedup"), tmp_path / "tables" / "plan.parquet")
    assert set(read_tables(tmp_path)) == {"plan"}
    with pytest.raises(RunFolderError, match="cannot be drawn: the plan figure needs the columns time_speedup"):
        redraw(tmp_path)
    assert not (tmp_path / "figures").exists()


def test_text_for_a_number_is_named(synthetic, tmp_path):
    write_table(synthetic.plan().assign(time_speedup="fast"), tmp_path / "tables" / "plan.parquet")
    with pytest.raises(RunFolderError, match=r"plan\.parquet should have numbers in the column time_speedup, found 'fast'"):
        redraw(tmp_path)
