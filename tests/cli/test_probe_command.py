"""`loopscope probe --only`: the named probes run, print and are saved with their figures."""

from __future__ import annotations

import pandas as pd
import pytest

from loopscope.cli import probing
from loopscope.errors import SettingError


def test_the_named_probes_are_saved_with_their_figures(loopscope, folder, tmp_path):
    result = loopscope("probe", folder(), "--prompts", 2, "--only", "block_lens, head-attribution", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    for place, kind in (("tables", "parquet"), ("figures", "png")):
        assert {p.stem for p in (tmp_path / "run" / place).glob(f"*.{kind}")} == {"block_lens", "head_attribution"}
    ranks = pd.read_parquet(tmp_path / "run" / "tables" / "block_lens.parquet")
    shown = float(next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("1 ")))
    assert shown == pytest.approx(ranks[(ranks.lens == "coda") & (ranks.depth == 1)]["rank"].mean(), abs=1e-3)
    assert "heads that add or take most" in result.stdout and "agreement" not in result.stdout


def test_probes_of_depth_share_one_table_and_those_of_places_name_the_largest(loopscope, folder):
    names = "layer_fixed_points,trajectories,head_stability,depth_similarity,token_grid,attribution"
    result = loopscope("probe", folder(), "--prompts", 2, "--only", names)
    assert result.exit_code == 0, result.stderr
    assert {"step", "fixed_point", "apart", "js_nats", "cka_to_T"} <= set(result.stdout.split())
    assert "components that add or take most" in result.stdout and "embedding" in result.stdout


def test_the_probes_on_sums_make_their_own_texts(loopscope):
    result = loopscope("probe", "tiny-ouro", "--prompts", 1, "--only", "linear_probe,patching")
    assert result.exit_code == 0, result.stderr
    assert {"true", "control", "baseline"} <= set(result.stdout.split()) and "bring back most of the answer" in result.stdout
    assert "resid_post" in result.stdout


def test_names_are_taken_in_one_order_and_an_unknown_one_is_said(loopscope, folder):
    assert probing.chosen(None) == ("convergence", "depth_lens")
    assert probing.chosen("patching,depth_lens") == ("depth_lens", "patching") and probing.chosen("all") == probing.NAMES
    with pytest.raises(SettingError, match="did you mean 'trajectories'"):
        probing.chosen("trajectory")
    result = loopscope("probe", folder(), "--only", "magic")
    assert result.exit_code == 2 and "no probe is called 'magic'" in result.stderr and "block_lens" in result.stderr
