"""gpu-check on the CPU: it passes where decoders are right, fails where one is wrong, and needs only what a device machine has."""

import json
import subprocess
import sys

import torch

import loopscope.gpu_check as gpu_check
from loopscope.full_size import SIZES
from loopscope.kernels import check
from loopscope.random_models import make_random_core


def one_model(monkeypatch, *dtypes, family="ouro"):
    def build(dtype, device):
        return make_random_core(family, gain=0.2, depth=4, n_core=1, dtype=torch.float64).to(device=device, dtype=dtype)

    monkeypatch.setattr(gpu_check, "_models", lambda toy, seed: [("made-up", build, dtypes)])
    monkeypatch.setattr("loopscope.full_size.SIZES", {"Huginn-3.5B": SIZES["Huginn-3.5B"]})


def test_right_decoders_pass_in_every_precision(monkeypatch, tmp_path, capsys):
    one_model(monkeypatch, torch.float64, torch.float32, torch.bfloat16)
    assert gpu_check.run("cpu", toy=True, out=str(tmp_path / "check.json")) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    assert {r["dtype"] for r in found["decodes"]} == {"float64", "float32", "bfloat16"}
    exact = [r for r in found["decodes"] if r["dtype"] == "float64"]
    assert len(exact) >= 20 and all(r["token_mismatches"] == 0 for r in exact)
    assert {"AR", "WFD d=1", "DAS-Wave J=4 k=1 deep_kv", "WFD d=1, static", "WFD d=1, L3"} <= {r["decoder"] for r in exact}
    assert "all hold" in capsys.readouterr().err
    assert {r["dtype"] for r in found["kernel"]["checks"]} == {"float32", "bfloat16", "float16"}
    speed = found["speed"]["records"]
    assert [r["alpha"] for r in speed] == [None, 0.8, 0.8, 0.8, 1.0, 1.0, 1.0]
    assert {r["model"] for r in speed} == {"Huginn-3.5B (random, toy)"}
    assert speed[0]["decoder"] == "AR" and speed[0]["speedup"] == speed[0]["speedup_predicted"] == 1 and speed[0]["calls_per_token"] == 32
    for r in speed:
        assert 0 < r["roofline"] < 1.5 and r["speedup_predicted"] > 0
        assert r["static"] == (not r["decoder"].startswith("DtV")) and (r["static"] or 0 < r["between"] < 1)
        assert r["alpha"] != 1 or r["accepted"] == r["proposed"] > 0
    assert not found["speed"]["skipped"]


def test_a_kernel_that_is_off_fails_the_check(monkeypatch, capsys):
    one_model(monkeypatch)
    monkeypatch.setattr(gpu_check, "_speed", lambda *args: {})
    right = check.mixed_depth_attention
    monkeypatch.setattr(check, "mixed_depth_attention", lambda q, *args: right(q, *args) * (1.01 if q.dtype == torch.float32 else 1))
    assert gpu_check.run("cpu", toy=True) == 1
    assert "FAILED: kernel float32 d_head 64 rows 3" in capsys.readouterr().err


def test_what_does_not_fit_is_said_and_the_rest_goes_on(monkeypatch):
    one_model(monkeypatch)
    room = iter([None, 10.0])  # bytes
    monkeypatch.setattr("loopscope.memory._SMALL", 0)
    monkeypatch.setattr("loopscope.memory.available", lambda device: next(room, 10.0))
    found = gpu_check._speed(torch.device("cpu"), 0, True, lambda line: None)
    assert found["records"] == [] and "what would fit" in found["skipped"][0]["why"]


def test_a_wrong_decoder_fails_the_check(monkeypatch, capsys):
    from decoders import Autoregressive

    class Shallow(Autoregressive):
        label = "shallow"

        def generate(self, model, prompt, **options):
            return super().generate(model, prompt, **(options | {"depth": 1}))

    one_model(monkeypatch, torch.float64, family="huginn")
    monkeypatch.setattr(gpu_check, "_speed", lambda *args: {})
    monkeypatch.setattr(gpu_check, "_decoders", lambda core: [Shallow()])
    assert gpu_check.run("cpu", toy=True) == 1
    captured = capsys.readouterr()
    assert "FAILED: made-up float64 shallow" in captured.err
    assert {r["decoder"] for r in json.loads(captured.out)["decodes"] if not r["ok"]} == {"shallow"}


def test_a_bfloat16_difference_must_be_a_near_tie(monkeypatch):
    from decoders import Autoregressive

    core = make_random_core("ouro", gain=0.2, depth=4, n_core=1, dtype=torch.float64).to(torch.bfloat16)
    g = Autoregressive().generate(core, [1, 2, 3], max_new_tokens=6)
    wrong = [*g.tokens[:3], (g.tokens[3] + 1) % 256, *g.tokens[4:]]
    for margin, explained in ((0.1, True), (0.3, False)):
        monkeypatch.setattr(gpu_check, "_margin", lambda core, tokens, m=margin: (m, 0.1))
        record = gpu_check._record(core, g, wrong, [1, 2, 3])
        assert record["ok"] is explained and record["first_difference"] == 3


def test_it_runs_from_a_bare_tree_without_typer_transformer_lens_or_pyarrow():
    code = """
import sys
for name in ("typer", "transformer_lens", "pyarrow", "seaborn", "jinja2", "jaxtyping", "hypothesis"):
    sys.modules[name] = None
import torch
import loopscope.gpu_check as check
from loopscope.random_models import make_random_core
check._models = lambda toy, seed: [("m", lambda t, d: make_random_core("huginn", depth=3, n_core=1, dtype=t).to(d), (torch.float32,))]
check._TOKENS = 4
check._speed = lambda *args: {}
sys.exit(check.main(["--device", "cpu"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert {t["part"] for t in json.loads(run.stdout)["timings"]} == {"recur", "prelude", "readout"}


def test_a_device_that_is_not_there_is_said():
    run = subprocess.run([sys.executable, "-m", "loopscope.gpu_check", "--device", "abacus"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("error: the device 'abacus'")
