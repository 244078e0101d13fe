"""What a result cannot be written to or read from is said in one error."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loopscope.errors import RunFolderError
from loopscope.records import Result, read_table, write_table, write_text

FRAME = pd.DataFrame({"model": ["m"], "value": [1.0]})


@pytest.mark.parametrize("facts", [b"", b"{", b"[1]", b"7", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_facts_that_are_no_json_object_are_named(tmp_path, facts):
    path = tmp_path / "result.parquet"
    pq.write_table(pa.Table.from_pandas(FRAME).replace_schema_metadata({b"loopscope": facts}), path)
    with pytest.raises(RunFolderError, match=r"result\.parquet .*metadata"):
        read_table(path)


def test_below_a_file_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for write in (lambda: write_table(FRAME, tmp_path / "file" / "t.parquet"), lambda: write_text("x", tmp_path / "file" / "t.txt"),
                  lambda: Result(FRAME).save(tmp_path / "file" / "deeper")):
        with pytest.raises(RunFolderError, match="could not be written"):
            write()
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_result_shows_its_columns():
    html = Result(FRAME.head(0))._repr_html_()
    assert "no rows" in html and "<th>value</th>" in html


def test_a_result_without_a_figure_shows_its_table():
    html = Result(FRAME)._repr_html_()
    assert f"result: {len(FRAME)} rows" in html and "<th>value</th>" in html and "<img" not in html


def test_a_command_can_be_pasted_again(tmp_path):
    import subprocess
    import sys

    (tmp_path / "told.py").write_text("from loopscope.records import manifest\nprint(manifest()['command'])\n")
    for start, said in (([str(tmp_path / "told.py")], "told.py"), (["-m", "told"], "python -m told")):
        run = subprocess.run([sys.executable, *start, "a b", "c"], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert run.stdout.strip() == f"{said} 'a b' c"
