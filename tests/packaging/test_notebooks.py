"""The notebooks as they are read on the web: outputs are there, they are pictures, and nothing in them is one machine's."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
TOURS = sorted(path for path in FOLDER.glob("0*.ipynb"))


def outputs(notebook):
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def words_of(output):
    data = output.get("data", {})
    return "".join(map("".join, (output.get("text", ""), data.get("text/plain", ""), data.get("text/html", ""))))


@pytest.mark.parametrize("path", TOURS, ids=lambda path: path.stem)
def test_a_notebook_shows_pictures_and_names_no_machine(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 1_000_000
    pictures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    printed = "\n".join(words_of(o) for o in outputs(notebook) if o not in pictures)
    assert len(pictures) >= 3 and len(printed) < 4000
    assert not [o for o in outputs(notebook) if o["output_type"] == "error" or o.get("name") == "stderr"]
    rest = json.dumps([{k: v for k, v in cell.items() if k != "outputs"} for cell in notebook["cells"]]) + printed
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|var)/", rest), "a path of one machine"
    assert notebook["metadata"] == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                                    "language_info": {"name": "python"}}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])  # no times of execution


@pytest.mark.parametrize("path", TOURS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_one_thread_and_links_to_what_is_there(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert re.search(r"torch\.set_num_threads\(1\)  # .+", first)
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert [name for name in re.findall(r"\]\(([^)]+)\)", prose) if not (FOLDER / name).exists()] == []
