"""What the README shows runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_library_example_has_ten_lines_and_runs(tmp_path):
    example = BLOCKS[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    run = subprocess.run([sys.executable, "-c", "import torch; torch.set_num_threads(1)\n" + example], cwd=tmp_path, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    assert "depth" in run.stdout
    _, same, fewer = run.stdout.strip().splitlines()[-1].rsplit(" ", 2)
    assert same == "True" and float(fewer) > 2


def test_the_hook_example_runs_behind_it(tmp_path):
    before = [line for line in BLOCKS[0].splitlines() if line.startswith(("import loopscope", "model =", "prompts ="))]
    code = "import torch; torch.set_num_threads(1)\n" + "\n".join(before) + "\n" + BLOCKS[1] + "\nassert run.stack('v').ndim == 6"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_decoding_example_runs_and_does_what_it_says():
    block = next(b for b in BLOCKS if "Sampling" in b).replace('"Q: ..."', '"Q: ...", 12')
    code = ("import torch, loopscope; torch.set_num_threads(1)\nmodel = loopscope.load('tiny-huginn')\n" + block
            + "\nfrom decoders import Autoregressive\noptions = dict(sampling=Sampling(0.8, top_p=0.9), seed=7)"
            "\nsaid = [d.generate(model, 'Q: ...', 12, **options).tokens for d in (decoder, Autoregressive())]\nassert said[0] == said[1]")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_file_it_names_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("line", re.findall(r"^loopscope .*", README, re.M))
def test_every_command_it_shows_exists(line):
    import typer

    from loopscope.cli.app import app

    words = line.split("#")[0].split()
    command = typer.main.get_command(app).commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_make_target_it_names_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"report", "test", "quick"} <= targets and set(re.findall(r"`?make (\w+)", README)) <= targets


def test_the_plan_example_runs():
    block = next(b for b in BLOCKS if "Findings" in b)
    code = ("import torch, loopscope; torch.set_num_threads(1)\nmodel = loopscope.load('tiny-huginn')\n"
            "prompts = loopscope.prompts('maths', 4)\n" + block + "\nassert best.best.label in best.evidence")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
