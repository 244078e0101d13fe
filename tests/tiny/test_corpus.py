"""Python code: split by module, robust to a missing file, prompts stored and held out."""

import json
import random

import pytest

from loopscope.errors import SettingError
from loopscope.tiny import corpus
from loopscope.tiny.prompts import CODE_PROMPTS, prompts


def test_splits_share_no_module_and_cover_the_list():
    train, held_out = corpus.documents(held_out=False), corpus.documents(held_out=True)
    assert not set(train) & set(held_out)
    assert len(train) > 5 * len(held_out) > 50
    listed = {corpus.module_name(line) for line in corpus.LISTED.read_text().split()}
    assert set(train) | set(held_out) <= listed
    assert max(map(len, train.values())) <= corpus.LONGEST


def test_the_list_is_sorted_and_without_doubles():
    lines = corpus.LISTED.read_text().split()
    assert lines == sorted(set(lines))


def test_missing_files_are_skipped_and_an_absent_library_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="standard-library source"):
        corpus.documents(held_out=False)
    (tmp_path / "abc.py").write_text("x = 1\n")
    assert corpus.documents(held_out=corpus.is_held_out("abc")) == {"abc": "x = 1\n"}


def test_windows_are_whole_lines():
    text = "".join(f"line {i}\n" for i in range(500))
    rng = random.Random(0)
    for _ in range(100):
        window = corpus.window(text, rng)
        assert window in text and window.startswith("line ") and window.endswith("\n")
        assert 250 < len(window) < 1300


def test_stored_code_prompts_come_from_held_out_modules():
    stored = json.loads(CODE_PROMPTS.read_text())["prompts"]
    assert len(stored) == 40 == len({p["text"] for p in stored})
    assert all(corpus.is_held_out(p["module"]) for p in stored)
    assert prompts("code", 40) == [p["text"] for p in stored]
    assert sorted(prompts("code", 40, seed=1)) == sorted(prompts("code", 40))


@pytest.mark.parametrize(("task", "n"), [("code", 41), ("code", 0), ("maths", 0), ("poems", 1)])
def test_prompts_that_do_not_exist_are_refused(task, n):
    with pytest.raises(SettingError):
        prompts(task, n)
