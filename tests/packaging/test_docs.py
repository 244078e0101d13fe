"""The pages for users: what they show runs, what they link is there, and nothing public is left out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import decoders
import loopscope
import loopscope.errors
import probes
from loopscope.hook_names import BLOCK_NAMES, SHORT_NAMES
from loopscope.random_models import make_random_core

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOWTO = sorted((DOCS / "howto").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
ERRORS = {name: cls for name, cls in vars(loopscope.errors).items()
          if inspect.isclass(cls) and cls.__module__ == "loopscope.errors" and issubclass(cls, (loopscope.LoopscopeError, Warning))}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [*HOWTO, DOCS / "hooks.md"], ids=named)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, in_tmp):
    code = blocks(page.read_text(), "python")
    assert code
    namespace: dict = {"__name__": "__main__"}
    for i, block in enumerate(code):
        exec(compile(block, f"{page.name}, block {i + 1}", "exec"), namespace)


def sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^## +(.*)$", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


SECTIONS = sections(DOCS / "errors.md")


def test_every_error_has_a_section():
    assert list(SECTIONS) == list(ERRORS)


@pytest.fixture(scope="module")
def common() -> dict:
    (code, *_) = blocks((DOCS / "errors.md").read_text(), "python")
    namespace: dict = {}
    exec(code, namespace)
    return namespace


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "LoopscopeError"])
def test_an_error_and_its_message_are_what_its_section_says(name, common, in_tmp):
    (code,), (message,) = blocks(SECTIONS[name], "python"), blocks(SECTIONS[name], "text")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if issubclass(ERRORS[name], Warning):
            exec(code, dict(common))
            found = [w.message for w in caught if w.category is ERRORS[name]]
        else:
            with pytest.raises(loopscope.LoopscopeError) as raised:
                exec(code, dict(common))
            found = [raised.value]
    assert [type(error) for error in found] == [ERRORS[name]]
    assert str(found[0]) == message.strip()
    assert "**Cause.**" in SECTIONS[name] and "**Cure.**" in SECTIONS[name]


def test_the_base_error_catches():
    (code,) = blocks(SECTIONS["LoopscopeError"], "python")
    exec(code, {"loopscope": loopscope})
    assert all(issubclass(cls, (loopscope.LoopscopeError, Warning)) for cls in ERRORS.values())


def rows_of(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_hook_table_is_the_list_of_hooks_with_their_shapes():
    core = make_random_core("raven", gain=0.5)  # fewer key-value heads than heads
    config = core.config
    assert config.n_kv_heads != config.n_heads
    model = loopscope.LoopedModel(core)
    sizes = {"batch": 1, "pos": 5, "query": 5, "key": 5, "heads": config.n_heads, "kv_heads": config.n_kv_heads, "d_head": config.d_head,
             "d_model": config.d_model}
    _, run = model.run_with_cache(torch.arange(5), depth=2)
    table = [row for row in rows_of(DOCS / "hooks.md") if len(row) == 4]
    assert tuple(row[0].strip("`") for row in table) == BLOCK_NAMES
    assert {row[1].strip("`"): row[0].strip("`") for row in table} == SHORT_NAMES
    for name, _, shape, _ in table:
        key = f"depth.2.blocks.0.{name.strip('`')}"
        assert list(run[key].shape) == [sizes[word] for word in shape.strip("[]").split(", ")], name
    for name in ("hook_embed", "depth.1.hook_state", "hook_final"):
        assert list(run[name].shape) == [1, 5, config.d_model]


def test_the_places_of_hooks_are_those_of_the_module():
    import loopscope.hook_names as source

    listed = [row[0].strip("`") for row in rows_of(DOCS / "hooks.md") if len(row) == 2]
    assert listed == re.findall(r"^ {4}(\S+) {2,}", source.__doc__, re.M)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            assert goal.exists(), target
            if anchor:
                headings = re.findall(r"^#+ +(.*)$", goal.read_text(), re.M)
                assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("line", sorted({line for page in [*HOWTO, DOCS / "errors.md"]
                                         for block in blocks(page.read_text(), "console") for line in block.splitlines()}))
def test_every_command_shown_exists(line):
    import typer

    from loopscope.cli.app import app

    words = line.split("#")[0].split()
    assert words[0] == "loopscope"
    command = typer.main.get_command(app).commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_public_decoder_and_probe_is_described():
    classes = [name for name in decoders.__all__ if inspect.isclass(getattr(decoders, name))]
    kinds = [name for name in classes if issubclass(getattr(decoders, name), decoders.Decoder) and name != "Decoder"]
    functions = [name for name in probes.__all__ if not inspect.isclass(getattr(probes, name))]
    pages = "\n".join(page.read_text() for page in [*HOWTO, DOCS / "tables.md"])
    assert len(kinds) > 4 and len(functions) > 2
    assert [name for name in (*kinds, *functions) if not re.search(rf"\b{name}\b", pages)] == []


def test_the_changelog_has_a_section_for_this_version():
    assert f"## {loopscope.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_is_of_this_version_and_names_both_papers():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what CFF 1.2.0 requires
    assert (cited["cff-version"], str(cited["version"]), cited["license"]) == ("1.2.0", loopscope.__version__, "Apache-2.0")
    assert all({"type", "title", "authors"} <= set(reference) for reference in cited["references"])
    assert {i["value"] for r in cited["references"] for i in r["identifiers"]} == {"arXiv:2609.23033", "arXiv:2609.34538"}


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md"], ids=named)
def test_files_that_are_named_with_their_folder_are_there(page):
    paths = {name for name in re.findall(r"`((?:loopscope|probes|interventions|decoders|figures|tests|docs)/[\w./-]*)`", page.read_text())}
    assert len(paths) > 20
    assert [name for name in sorted(paths) if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    run = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "DraftThenVerify" in (tmp_path / "site" / "reference" / "decoders.html").read_text()
