"""The grid that comes with the project (benchmarks/grid): its predictions are those that were written down, its cells follow from its raw
rows, and README says of it what it says."""

import json
from pathlib import Path

import pandas as pd
import pytest

from decoders.bench import BenchResult
from decoders.foretold import altered
from decoders.grid import Expected, grid_cells, regret
from decoders.repeats import has_beat

ROOT = Path(__file__).resolve().parents[2]
GRID = ROOT / "benchmarks" / "grid"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return pd.read_parquet(GRID / "bench.parquet")


@pytest.fixture(scope="module")
def cells(rows) -> pd.DataFrame:
    parts = [grid_cells(Expected.read(GRID / "predictions", f"{model}_{task}"), BenchResult(part.reset_index(drop=True), {})).frame
             for (model, task), part in rows.groupby(["model", "task"], sort=False)]
    return pd.concat(parts, ignore_index=True)


def test_predictions_are_those_that_were_written_down():
    records = json.loads((GRID / "manifest.json").read_text())["predictions"]
    assert len(records) == 4 and not any(altered(record, GRID / "predictions") for record in records.values())


def test_cells_follow_from_raw_rows_and_predictions(rows, cells):
    assert has_beat(rows) and (rows.token_mismatches == 0).all()
    pd.testing.assert_frame_equal(cells, pd.read_parquet(GRID / "grid.parquet"), check_dtype=False)
    pd.testing.assert_frame_equal(regret(cells), pd.read_parquet(GRID / "regret.parquet"), check_dtype=False)


def test_readme_says_what_the_grid_says(cells):
    lost, readme = regret(cells), (ROOT / "README.md").read_text()
    exact, timed = cells[cells.exact], cells[cells.decoder != "AR"]
    assert f"all {len(exact)} schedules that a replay promised exactly" in readme and exact.calls_equal.all()
    near = ((timed.ratio - 1).abs() <= 0.15).mean()
    assert f"for {near:.0%} of {len(timed)} schedules".replace("%", " %") in readme
    *first, last = (f"{100 * r:.0f}" for r in lost.regret)
    assert f"{', '.join(first)} and {last} % to the fastest of its grid" in readme
    for (model, task), part in cells.groupby(["model", "task"], sort=False):
        fastest = [part[part.decoder.str.startswith(kind)].sort_values("speedup_measured").iloc[-1] for kind in ("WFD", "DtV", "DAS")]
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{model}`, {task} |"))
        assert row.endswith(" | ".join(f"{f.speedup_measured:.1f}x ({f.calls_counted:.1f})" for f in fastest) + " |")
