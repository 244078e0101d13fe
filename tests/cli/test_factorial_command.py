import pandas as pd
import pytest


def test_the_factorial_runs_on_a_shipped_model_with_two_prompts(loopscope, tmp_path):
    """The eight switches of DAS-Wave on tiny-huginn, from the command line, saved and drawn."""
    result = loopscope("factorial", "tiny-huginn", "--task", "maths", "--rounds", 3, "--updates", 1, "--prompts", 2,
                       "--max-new-tokens", 12, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "carry x deep_k x deep_v" in result.stdout and "tokens equal to AR's in every cell: yes" in result.stdout
    rows = pd.read_parquet(tmp_path / "run" / "tables" / "factorial.parquet")
    assert len(rows.groupby(["carry", "deep_k", "deep_v"])) == 8 and len(rows) == 16
    assert (tmp_path / "run" / "figures" / "factorial.png").is_file()


def test_a_model_without_injection_says_why_it_runs_four_cells(loopscope, folder):
    result = loopscope("factorial", folder("ouro"), "--prompt", "one", "--prompt", "two", "--rounds", 2, "--max-new-tokens", 6)
    assert result.exit_code == 0, result.stderr
    assert "ouro does not inject its embedding" in result.stdout
    assert "deep_k x deep_v" in result.stdout and "carry x" not in result.stdout


@pytest.mark.parametrize("name", ["--plain-loop", "--decoder=plain"])
def test_bench_says_how_fast_ar_is_beside_a_plain_loop(loopscope, folder, name):
    result = loopscope("bench", folder(), "--prompt", "one", "--prompt", "two", "--max-new-tokens", 6, "--repeats", 1,
                       *(["--decoder", "wfd", name] if name == "--plain-loop" else [name]))
    assert result.exit_code == 0, result.stderr
    assert "plain loop" in result.stdout and "times as fast as the plain loop over the same modules" in result.stdout
    assert ("WFD d=1" in result.stdout) == (name == "--plain-loop")
