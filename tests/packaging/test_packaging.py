"""What is installed: five import packages that no folder of the user's hides, and a wheel that holds nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"loopscope", "probes", "interventions", "decoders", "figures"}
DATA = {".json", ".safetensors", ".md", ".txt", ".j2", ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build folder appears in the source tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*sorted(PACKAGES), "tests", "notebooks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source], check=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_exactly_the_five_packages_and_their_data(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert {n.split("/")[0] for n in names} == PACKAGES
    modules = {n for n in names if n.endswith(".py")}
    in_tree = {p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert modules == in_tree  # a subpackage missing from pyproject.toml would be missing here
    data = {Path(n) for n in names - modules}
    folders = {("loopscope", "tiny"), ("loopscope", "support.json"), ("figures", "templates"), ("figures", "published")}
    assert all(p.suffix in DATA and p.parts[:2] in folders for p in data), sorted(map(str, data))


def test_the_wheel_holds_the_shipped_models_their_tokenizers_and_the_report_template(wheel):
    sizes = {i.filename: i.file_size for i in zipfile.ZipFile(wheel).infolist()}
    for model in ("tiny-huginn", "tiny-ouro"):
        at = f"loopscope/tiny/weights/{model}"
        assert {f"{at}/{f}" for f in ("config.json", "model.safetensors", "tokenizer.json", "card.md")} <= set(sizes)
        assert sum(size for name, size in sizes.items() if name.startswith(at)) < 5_000_000
    assert "figures/templates/report.html.j2" in sizes and {"loopscope/tiny/code_prompts.json", "loopscope/support.json"} <= set(sizes)
    assert {f"figures/published/{paper}.json" for paper in ("das", "wfd", "loopspec")} <= set(sizes)
    (licence,) = [n for n in sizes if n.endswith("LICENSE")]
    assert "Apache License" in zipfile.ZipFile(wheel).read(licence).decode()
    (entry,) = [n for n in sizes if n.endswith("entry_points.txt")]
    assert "loopscope = loopscope.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


def import_from(folder: Path, path: Path | None) -> dict[str, str]:
    """Import the five packages with `folder` as the working directory; package -> file."""
    code = ("import importlib\nfrom figures import draw\n"
            f"for n in {sorted(PACKAGES)}: print(n, importlib.import_module(n).__file__)")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """Every run folder holds a folder called figures, without an __init__.py; some people also have one called probes."""
    for name in ("figures", "probes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "convergence.png").touch()
    return tmp_path


def test_from_a_run_folder_an_editable_install_imports_ours(run_folder):
    found = import_from(run_folder, None)
    assert {n: Path(f).parent for n, f in found.items()} == {n: ROOT / n for n in PACKAGES}


def test_from_a_run_folder_the_wheel_imports_ours(run_folder, wheel, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    found = import_from(run_folder, site)
    assert {n: Path(f).parent for n, f in found.items()} == {n: site / n for n in PACKAGES}


def test_the_pins_hold_every_requirement():
    """Each declared dependency is pinned once, and without a local build suffix, which no other machine has."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    assert len(pins) == len(lines) and not any("+" in version for version in pins.values())
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            assert requirement.extras <= set(project["optional-dependencies"]), text
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_arrows_point_down():
    """figures > decoders > interventions > probes > loopscope: no room imports one above it, except lazily from the command line."""
    import ast

    floors = ["loopscope", "probes", "interventions", "decoders", "figures"]
    upward = []
    for package in floors:
        for path in (ROOT / package).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{relative}: relative import"
                    names = [node.module]
                for name in names:
                    top = name.split(".")[0]
                    if top in floors and floors.index(top) > floors.index(package):
                        upward.append((relative, top))
    allowed = {"loopscope/cli/", "loopscope/gpu_check.py"}
    assert [pair for pair in upward if not any(pair[0].startswith(a) for a in allowed)] == []
