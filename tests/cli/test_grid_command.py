"""`loopscope grid`: predictions on disk before anything is measured, all cells counted, and an interrupted run goes on with them."""

import json
import shutil

import pandas as pd
import pytest

from decoders import DASWave, Wavefront
from decoders.autoregressive import Autoregressive
from decoders.foretold import altered

OPTIONS = ["--task", "maths", "--prompts", 2, "--max-new-tokens", 8, "--repeats", 1, "--calibrate-seconds", 0.1]


@pytest.fixture
def few(monkeypatch):
    """A grid of three schedules."""
    monkeypatch.setattr("decoders.grid.schedules_of", lambda depth: [Autoregressive(), Wavefront(1), DASWave(2, 1)])


def test_a_grid_is_predicted_measured_and_saved(loopscope, folder, tmp_path, few):
    result = loopscope("grid", folder(), *OPTIONS, "--out", tmp_path / "a grid")
    assert result.exit_code == 0, result.stderr
    run = tmp_path / "a grid"
    cells = pd.read_parquet(run / "tables" / "grid.parquet")
    assert cells.decoder.tolist() == ["AR", "WFD d=1", "DAS-Wave J=2 k=1 deep_kv"] and cells.exact.all() and cells.calls_equal.all()
    lost = pd.read_parquet(run / "tables" / "regret.parquet").iloc[0]
    picked = cells[cells.planned].iloc[0]
    assert (lost.picked, lost.best_speedup) == (picked.decoder, cells.speedup_measured.max()) and lost.wrong == 0
    assert f"{len(cells)} cells; calls said to be exact: 3, counted exactly so: 3" in result.stdout
    (record,) = json.loads((run / "manifest.json").read_text())["predictions"].values()
    assert not altered(record, run / "predictions") and len(record["files"]) == 2
    assert (run / "figures" / "grid.svg").is_file() and not (tmp_path / "a grid.partial").exists()


def test_an_interrupted_grid_keeps_its_predictions(loopscope, folder, tmp_path, few, monkeypatch):
    from decoders.decoder import Decoder

    generate, left = Decoder.generate, 14  # calibrating and foreseeing take some; the second prompt is being measured then

    def stopped(self, *args, **options):
        nonlocal left
        if any((tmp_path / "out.partial").glob("*_maths/groups.jsonl")):
            left = min(left, 5) - 1
            if not left:
                raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(Decoder, "generate", stopped)
    result = loopscope("grid", folder(), *OPTIONS, "--out", tmp_path / "out")
    assert result.exit_code == 130 and "the same command goes on from there" in result.stderr
    predictions = tmp_path / "out.partial" / "predictions"
    before = {p.name: p.read_bytes() for p in predictions.rglob("*") if p.is_file()}
    assert len(before) == 4 and not (tmp_path / "out").exists()
    monkeypatch.setattr(Decoder, "generate", generate)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "other.partial")
    other = loopscope("grid", folder(), *OPTIONS, "--seed", 1, "--out", tmp_path / "other")
    assert other.exit_code == 2 and "seed 0 instead of 1" in other.stderr
    assert loopscope("grid", folder(), *OPTIONS, "--out", tmp_path / "out").exit_code == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "out" / "predictions").rglob("*") if p.is_file()} == before
    plan = next((tmp_path / "other.partial" / "predictions").glob("*_plan.parquet"))
    plan.write_bytes(plan.read_bytes() + b" ")
    changed = loopscope("grid", folder(), *OPTIONS, "--out", tmp_path / "other")
    assert changed.exit_code == 2 and "changed after it was predicted" in changed.stderr
    assert loopscope("grid", folder(), *OPTIONS, "--out", tmp_path / "other", "--fresh").exit_code == 0


def test_a_grid_without_a_folder_is_refused(loopscope, folder):
    result = loopscope("grid", folder(), *OPTIONS)
    assert result.exit_code == 2 and "give --out FOLDER" in result.stderr
