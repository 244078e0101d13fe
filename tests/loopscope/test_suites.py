"""Prompts from files in the forms of published benchmarks. The rows are made up here; only their fields are the benchmarks'."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.errors import ContextError, LoopscopeError, PromptError, SettingError
from loopscope.suites import FORMATS, LINE, SuitePrompt, fit, read_suite, recognise

ROWS = {
    "gsm8k": {"question": "Two apples and three more?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    "math500": {"problem": "Find $x$ if $x = 1$.", "solution": "It is $\\boxed{1}$.", "answer": "1", "subject": "Algebra", "level": 1,
                "unique_id": "test/algebra/1.json"},
    "humaneval": {"task_id": "Made/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "    return 1\n",
                  "test": "assert one() == 1"},
    "mbpp": {"task_id": 7, "text": "Write a function that adds.", "code": "def add(a, b):\n    return a + b",
             "test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "challenge_test_list": []},
    "spec-bench": {"question_id": 3, "category": "roleplay", "turns": ["Speak as a lamp.", "Now as a chair."], "reference": ["", ""]},
    "plain": {"text": "Once upon a time"},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
}
ASKED = {
    "gsm8k": "Question: Two apples and three more?\nAnswer:",
    "math500": "Problem:\nFind $x$ if $x = 1$.\n\nSolution:\n",
    "humaneval": "def one():\n",
    "mbpp": '"""\nWrite a function that adds.\nassert add(1, 2) == 3\n"""\n',
    "spec-bench": "Speak as a lamp.",
    "plain": "Once upon a time",
    "chat": "",
}


@pytest.fixture
def written(tmp_path):
    """`written(row, row, ...)`: a file with these rows (dicts, or lines as they are)."""

    def write(*rows):
        path = tmp_path / "suite.jsonl"
        path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
        return path

    return write


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_by_its_fields_and_read_as_its_question_alone(written, name):
    path = written(ROWS[name])
    assert recognise(path).name == name
    (prompt,) = read_suite(path)
    assert prompt.text == ASKED[name]
    assert read_suite(path, format=name) == [prompt]
    assert prompt.messages == tuple(ROWS[name].get("messages", ()))


def test_the_page_says_what_the_formats_are():
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line.count("|") == 7]
    assert [row[0] for row in rows[2:]] == list(FORMATS)
    for row in rows[2:]:
        known = FORMATS[row[0]]
        assert row[1].replace(", and ", ", ") == known.fields and (row[3] == "none") == (known.example is None)
        assert row[4].split(", ") == list(known.ids)
        limit = "" if known.prompt_tokens is None else f", prompts of at most {known.prompt_tokens}"
        published = f"{known.shots} shots, {known.new_tokens} new tokens{limit}"
        assert row[5] == ("nothing is published" if known.new_tokens is None else published)


def test_answers_and_tests_of_a_question_are_not_in_its_prompt(written):
    assert "5" not in read_suite(written(ROWS["gsm8k"]))[0].text
    assert "boxed" not in read_suite(written(ROWS["math500"]))[0].text
    assert "return" not in read_suite(written(ROWS["humaneval"]))[0].text + read_suite(written(ROWS["mbpp"]))[0].text
    assert "chair" not in read_suite(written(ROWS["spec-bench"]))[0].text


def test_ids_and_categories_come_from_the_file_and_lines_stand_in_for_them(written):
    ids = {name: read_suite(written(row))[0] for name, row in ROWS.items()}
    assert {name: p.id for name, p in ids.items()} == {
        "gsm8k": "line 1", "math500": "test/algebra/1.json", "humaneval": "Made/0", "mbpp": "7", "spec-bench": "3", "plain": "line 1",
        "chat": "line 1"}
    assert ids["spec-bench"].category == "roleplay" and ids["math500"].category == "Algebra"
    assert [p.line for p in read_suite(written({"text": "a"}, b"", {"text": "b"}))] == [1, 3]


def test_worked_examples_are_the_files_first_rows_and_are_not_asked(written):
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(4)]
    prompts = read_suite(written(*rows), shots=2)
    assert [p.text for p in prompts] == [f"Question: q0\nAnswer: a0\n\nQuestion: q1\nAnswer: a1\n\nQuestion: q{i}\nAnswer:" for i in (2, 3)]
    assert [p.id for p in prompts] == ["line 3", "line 4"]
    assert read_suite(written(*rows), shots=2, limit=1) == prompts[:1]
    assert "def add" in read_suite(written(ROWS["mbpp"], {**ROWS["mbpp"], "task_id": 8}), shots=1)[0].text
    one = read_suite(written(ROWS["humaneval"], {**ROWS["humaneval"], "task_id": "Made/1"}), shots=1)[0].text
    assert one == "def one():\n    return 1\n\ndef one():\n"
    assert "boxed{1}" in read_suite(written(ROWS["math500"], {**ROWS["math500"], "unique_id": "2"}), shots=1)[0].text


def test_what_cannot_give_worked_examples_is_refused(written):
    with pytest.raises(SettingError, match="plain has no answers"):
        read_suite(written(ROWS["plain"], {"text": "b"}), shots=1)
    with pytest.raises(PromptError, match="2 rows, all of which became worked examples"):
        read_suite(written(ROWS["gsm8k"], ROWS["gsm8k"]), shots=2)
    with pytest.raises(PromptError, match="line 1: a worked example needs canonical_solution"):
        read_suite(written({"task_id": "x", "prompt": "def f():"}, ROWS["humaneval"]), shots=1)


def test_a_limit_stops_the_reading(written):
    path = written({"text": "a"}, {"text": "b"}, b"not json")
    assert [p.text for p in read_suite(path, limit=2)] == ["a", "b"]
    with pytest.raises(PromptError, match="line 3"):
        read_suite(path, limit=3)


@pytest.mark.parametrize("line, words", [
    (b"{", ["line 2", "expected one JSON object on each line", "'{'"]),
    (b"[" * 100_000, ["line 2", "nested too deeply"]),
    (b"[1, 2]", ["line 2", "found a list", "one object on each line"]),
    (b'"text"', ["line 2", "found text"]),
    (b'{"text": "\xff"}', ["line 2", "byte 10 (0xff) is not UTF-8"]),
    (b'{"text": "\\ud800"}', ["line 2", "surrogate"]),
    (b'{"text": ""}', ["line 2", "text is empty"]),
    (b'{"text": "  "}', ["line 2", "text is empty"]),
    (b'{"text": 5}', ["line 2", "text should be text, found a number"]),
    (b'{"text": ["a"]}', ["line 2", "found a list"]),
    (b'{"Text": "a"}', ["line 2", "the format plain needs prompt or text", "found 'Text'"]),
    (b"{}", ["line 2", "found no field"]),
    (b'{"text": "b", "id": "a"}', ["line 2", "'a' is also that of line 1"]),
    (b'{"text": "b", "id": {}}', ["line 2", "id should be text or a whole number, found an object"]),
    (b'{"text": "b", "id": true}', ["line 2", "found a truth value"]),
])
def test_a_bad_line_is_named_with_what_was_found_and_what_is_expected(written, line, words):
    path = written({"text": "a", "id": "a"}, line)
    with pytest.raises(PromptError) as error:
        read_suite(path)
    assert str(path) in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("row, words", [
    ({"turns": [], "question_id": 1}, "turns should be a list of texts, found an empty one"),
    ({"turns": "one", "question_id": 1}, "turns should be a list of texts, found text"),
    ({"turns": [3], "question_id": 1}, r"turns\[0\] should be text, found a number"),
    ({"messages": "hi"}, "messages should be a list of objects with role and content"),
    ({"messages": [{"content": "hi"}]}, "messages should be a list"),
    ({"text": "do", "code": "x", "test_list": "assert"}, "test_list should be a list of texts, found text"),
    ({"query": "a"}, "no format has the fields 'query'.*gsm8k: question, answer"),
])
def test_a_field_of_another_kind_is_named(written, row, words):
    with pytest.raises(PromptError, match=words):
        read_suite(written(row))


def test_files_that_are_none(tmp_path, written):
    with pytest.raises(PromptError, match="does not exist"):
        read_suite(tmp_path / "nowhere.jsonl")
    with pytest.raises(PromptError, match="is not a file"):
        read_suite(tmp_path)
    for content in (b"", b"\n  \n"):
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        for read in (read_suite, recognise):
            with pytest.raises(PromptError, match="holds no prompt"):
                read(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "after a mark"}).encode())
    assert read_suite(path)[0].text == "after a mark"


def test_a_line_without_end_is_not_read_into_memory(tmp_path):
    path = tmp_path / "huge.jsonl"
    with open(path, "wb") as file:
        file.truncate(8 * LINE)  # sparse: it has a size and no content
    tracemalloc.start()
    try:
        with pytest.raises(PromptError, match="line 1 has more than 16,777,216 bytes"):
            read_suite(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * LINE
    finally:
        tracemalloc.stop()


def test_settings_that_make_no_sense(written):
    path = written(ROWS["plain"])
    with pytest.raises(SettingError, match="'gsm' is unknown.*did you mean 'gsm8k'"):
        read_suite(path, format="gsm")
    with pytest.raises(SettingError, match="limit must be a whole number of at least 1, got 0"):
        read_suite(path, limit=0)
    with pytest.raises(SettingError, match="shots must be a whole number of at least 0, got -1"):
        read_suite(path, shots=-1)
    with pytest.raises(PromptError, match="gsm8k needs question, answer; found 'text'"):
        read_suite(path, format="gsm8k")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(list(ROWS.values())),
                                             lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                                                 st.sampled_from(["text", "turns", "messages", "question_id", "question", "answer", "id"]),
                                                 inner, max_size=4), max_leaves=8).map(lambda v: json.dumps(v).encode()))
def test_any_bytes_give_prompts_or_a_clear_refusal(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    try:
        prompts = read_suite(path)
    except LoopscopeError as error:
        assert str(path) in str(error)
    else:
        assert prompts and all(p.text or p.messages for p in prompts)


# ---- from prompts to tokens -----------------------------------------------------------------------------------------


class Bytes:
    """One token per byte, and token 256 in front."""

    def __init__(self, context: int, bos: int | None = 256) -> None:
        self.config = type("Config", (), {"context": context, "bos": bos})()

    def prompt_tokens(self, text):
        import torch

        return torch.tensor(([] if self.config.bos is None else [self.config.bos]) + list(text.encode()))

    def apply_chat_template(self, messages):
        raise PromptError("this model came without a chat template")


def prompts(*texts):
    return [SuitePrompt(f"p{i}", text, line=i + 1) for i, text in enumerate(texts)]


def test_prompts_that_fit_are_left_alone_up_to_the_last_position():
    """The last new token needs no position: 4 + 7 - 1 = 10."""
    fitted = fit(Bytes(10), prompts("abc", "a"), 7)
    assert fitted.tokens == [[256, 97, 98, 99], [256, 97]] and fitted.cut == {}
    with pytest.raises(ContextError, match=r"1 of 2 prompts are longer than 3 tokens \(a context of 10 leaves no more beside 8 new ones\): "
                                           "p0; the longest has 4.*--truncate left"):
        fit(Bytes(10), prompts("abc", "a"), 8)


def test_cutting_on_the_left_keeps_the_end_and_the_first_special_token():
    fitted = fit(Bytes(10), prompts("abcdef", "a"), 8, truncate="left")
    assert fitted.tokens == [[256, 101, 102], [256, 97]] and fitted.cut == {"p0": 4}
    assert fit(Bytes(10, bos=None), prompts("abcdef"), 8, truncate="left").tokens == [[100, 101, 102]]
    assert fit(Bytes(10), prompts("abcdef"), 10, truncate="left").tokens == [[102]]  # room for one token: it is the text's
    assert fit(Bytes(100), prompts("abcdef"), 8, truncate="left", most=2).cut == {"p0": 5}


def test_what_can_never_fit_is_refused():
    with pytest.raises(ContextError, match="11 new tokens leave no room.*at most 10"):
        fit(Bytes(10), prompts("a"), 11, truncate="left")
    with pytest.raises(SettingError, match="'right'"):
        fit(Bytes(10), prompts("a"), 1, truncate="right")
    with pytest.raises(ContextError, match=r"longer than 2 tokens \(the most asked for\)"):
        fit(Bytes(10), prompts("abc"), 1, most=2)


def test_messages_need_a_chat_template_and_go_through_it():
    chat = [SuitePrompt("c", messages=({"role": "user", "content": "hi"},), line=9)]
    with pytest.raises(PromptError, match=r"prompt c \(line 9\): this model came without a chat template"):
        fit(Bytes(10), chat, 2)

    class Chat(Bytes):
        def apply_chat_template(self, messages):
            import torch

            return torch.tensor([len(messages), 5])

    assert fit(Chat(10), chat, 2).tokens == [[1, 5]]
