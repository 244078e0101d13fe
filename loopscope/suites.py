"""Task suites: prompts from a file of JSON lines, in the forms that benchmarks are published in (docs/suites.md).

Nothing in a file is executed or fetched. What a benchmark asks is written as a plain text to continue; which form a file has is
seen from the fields of its first line, and every line is held to it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.errors import ContextError, PromptError, SettingError, closest

LINE = 2**24  # bytes of one line; a longer one is no prompt


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt: a text to continue, or messages for the model's chat template. line: where it stands in its file, from 1."""

    id: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    category: str = ""
    line: int = 0


@dataclass(frozen=True)
class SuiteFormat:
    """How the rows of one benchmark read. needs: fields that it is recognised by; a tuple among them means any one of its fields.

    question, example: a row as the text to continue, and as a worked example in front of it (None: it has no examples).
    shots, new_tokens, prompt_tokens: what is published or customary (docs/suites.md), None where nothing is.
    ids: fields that may hold a row's id.
    """

    name: str
    needs: tuple[str | tuple[str, ...], ...]
    question: Callable[[Mapping[str, Any]], Any]
    example: Callable[[Mapping[str, Any]], str] | None = None
    shots: int = 0
    new_tokens: int | None = None
    prompt_tokens: int | None = None
    ids: tuple[str, ...] = ("id",)

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(any(f in row for f in ((need,) if isinstance(need, str) else need)) for need in self.needs)

    @property
    def fields(self) -> str:
        """'question, answer': the fields it needs, in words."""
        return ", ".join(need if isinstance(need, str) else " or ".join(need) for need in self.needs)


class _Bad(Exception):
    """A field that is not what it should be: its message is completed with file and line."""


def _text(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is there, which must be text."""
    name = next(n for n in names if n in row)
    if not isinstance(row[name], str):
        raise _Bad(f"{name} should be text, found {_kind(row[name])}")
    if not row[name].strip():
        raise _Bad(f"{name} is empty; expected text")
    return row[name]


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


def _turn(row: Mapping[str, Any]) -> str:
    """The first turn: later ones answer what a model said."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise _Bad(f"turns should be a list of texts, found {_kind(turns) if turns != [] else 'an empty one'}")
    return _text({"turns[0]": turns[0]}, "turns[0]")


def _chat(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise _Bad(f"messages should be a list of objects with role and content, found {repr(messages)[:60]}")
    return tuple(messages)


def _described(row: Mapping[str, Any]) -> str:
    """MBPP as a completion: what the program should do and the tests it should pass, as the docstring above it."""
    tests = row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
        raise _Bad(f"test_list should be a list of texts, found {_kind(tests)}")
    return '"""\n' + "\n".join([_text(row, "text", "prompt").strip(), *(t.strip() for t in tests)]) + '\n"""\n'


def _problem(row: Mapping[str, Any]) -> str:
    return f"Problem:\n{_text(row, 'problem').strip()}\n\nSolution:\n"


def _asked(row: Mapping[str, Any]) -> str:
    return f"Question: {_text(row, 'question').strip()}\nAnswer:"


def _finished(row: Mapping[str, Any]) -> str:
    if "canonical_solution" not in row:
        raise _Bad("a worked example needs canonical_solution, which this row does not have; use fewer --shots")
    return _text(row, "prompt") + _text(row, "canonical_solution").rstrip()


# In the order in which they are looked for: of two whose fields a row has, the first is meant.
FORMATS: dict[str, SuiteFormat] = {f.name: f for f in (
    SuiteFormat("chat", ("messages",), _chat),
    SuiteFormat("spec-bench", ("turns", ("question_id", "category")), _turn, None, 0, 512, 1024, ids=("question_id", "id")),
    SuiteFormat("mbpp", (("text", "prompt"), "code", "test_list"), _described,
                lambda row: _described(row) + _text(row, "code").strip(), 3, 512, ids=("task_id", "id")),
    SuiteFormat("humaneval", ("task_id", "prompt"), lambda row: _text(row, "prompt"), _finished, 0, 512, ids=("task_id", "id")),
    SuiteFormat("gsm8k", ("question", "answer"), _asked, lambda row: f"{_asked(row)} {_text(row, 'answer').strip()}", 8, 512),
    SuiteFormat("math500", ("problem", "solution"), _problem, lambda row: _problem(row) + _text(row, "solution").strip(), 4, 1024,
                ids=("unique_id", "id")),
    SuiteFormat("plain", (("prompt", "text"),), lambda row: _text(row, "prompt", "text")),
)}


def suite_format(name: str) -> SuiteFormat:
    """Raises SettingError for an unknown name."""
    if name not in FORMATS:
        near = closest(name, FORMATS)
        hint = f" (did you mean {near}?)" if near else ""
        raise SettingError(f"suite format {name!r} is unknown; use one of {', '.join(FORMATS)}{hint}")
    return FORMATS[name]


def recognise(path: str | os.PathLike) -> SuiteFormat:
    """The format of a file, from the fields of its first row. Raises PromptError, also where no format has them."""
    for line, row in _rows(Path(path)):
        return _recognised(Path(path), line, row)
    raise _empty(Path(path))


def read_suite(path: str | os.PathLike, format: str | None = None, limit: int | None = None, shots: int | None = None) -> list[SuitePrompt]:
    """The prompts of a file, in its order.

    format: one of FORMATS; None recognises it. limit: at most so many prompts; what lies behind them is not read. shots: so many
    worked examples stand in front of every question, made from the file's own first rows, which are then not asked; None: 0.
    Raises SettingError for a bad setting, and PromptError (file, line, what was found, what is expected) for a file that is missing,
    empty, not UTF-8 or not JSON lines, for a row that has other fields, a line beyond 16 MiB, and an id that occurs twice.
    """
    path, known = Path(path), None if format is None else suite_format(format)
    shots = 0 if shots is None else shots
    for name, value, low in (("limit", limit, 1), ("shots", shots, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise SettingError(f"{name} must be a whole number of at least {low}, got {value!r}")
    examples: list[str] = []
    found: list[SuitePrompt] = []
    lines: dict[str, int] = {}
    for line, row in _rows(path):
        known = known or _recognised(path, line, row)
        if shots and known.example is None:
            raise SettingError(f"the format {known.name} has no answers to make worked examples of; leave out --shots")
        if not known.fits(row):
            raise PromptError(f"{path}, line {line}: a row of the format {known.name} needs {known.fields}; found {_fields(row)}")
        name = _id(path, line, row, known)
        if name in lines:
            raise PromptError(f"{path}, line {line}: the id {name!r} is also that of line {lines[name]}; expected every id once")
        lines[name] = line
        try:
            if len(examples) < shots:
                examples.append(known.example(row))  # type: ignore[misc]
                continue
            asked = known.question(row)
        except _Bad as error:
            raise PromptError(f"{path}, line {line}: {error}") from None
        category = row.get("category", row.get("subject", ""))
        text = "\n\n".join([*examples, asked]) if isinstance(asked, str) else ""
        found.append(SuitePrompt(name, _valid(path, line, text), () if isinstance(asked, str) else asked,
                                 category if isinstance(category, str) else "", line))
        if len(found) == limit:
            break
    if not found:
        if lines:
            raise PromptError(f"{path} has {len(lines)} rows, all of which became worked examples; expected more than --shots {shots}")
        raise _empty(path)
    return found


def digest(path: str | os.PathLike) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- from a file to rows -----------------------------------------------------------------------------------------


def _rows(path: Path):
    """(line number, object) of every line that is not blank."""
    try:
        if not path.is_file():
            raise PromptError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; expected a file of JSON lines")
        with open(path, "rb") as file:
            number = 0
            while raw := file.readline(LINE + 1):
                number += 1
                if len(raw) > LINE:
                    raise PromptError(f"{path}, line {number} has more than {LINE:,} bytes; expected one prompt, as one JSON object")
                raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if raw.strip():
                    yield number, _object(path, number, raw)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from error


def _object(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}, line {line}: byte {error.start} ({raw[error.start]:#04x}) is not UTF-8; expected JSON lines in "
                          "UTF-8") from None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path}, line {line}: expected one JSON object on each line, found {text.strip()[:60]!r} "
                          f"({'nested too deeply' if isinstance(error, RecursionError) else error})") from None
    if not isinstance(row, dict):
        hint = "; a file that is one JSON list must be rewritten, one object on each line" if isinstance(row, list) else ""
        raise PromptError(f"{path}, line {line}: expected a JSON object, found {_kind(row)}{hint}")
    return row


def _recognised(path: Path, line: int, row: Mapping[str, Any]) -> SuiteFormat:
    for known in FORMATS.values():
        if known.fits(row):
            return known
    forms = "; ".join(f"{f.name}: {f.fields}" for f in FORMATS.values())
    raise PromptError(f"{path}, line {line}: no format has the fields {_fields(row)}. Known are {forms}")


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(key)[:40] for key in list(row)[:12]) or "no field"


def _id(path: Path, line: int, row: Mapping[str, Any], known: SuiteFormat) -> str:
    name = next((n for n in known.ids if n in row), None)
    if name is None:
        return f"line {line}"
    if isinstance(row[name], bool) or not isinstance(row[name], (str, int)) or row[name] == "":
        raise PromptError(f"{path}, line {line}: {name} should be text or a whole number, found {_kind(row[name])}")
    return str(row[name])


def _valid(path: Path, line: int, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{path}, line {line}: half of a surrogate pair, {text[error.start]!r}, is not text") from None
    return text


def _empty(path: Path) -> PromptError:
    return PromptError(f"{path} holds no prompt; expected one JSON object on each line")


# ---- from prompts to tokens a model can take ------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """Prompts as token ids that leave room for the new ones. cut: id -> tokens that were left out."""

    tokens: list[list[int]]
    cut: Mapping[str, int]


def fit(core, prompts: Sequence[SuitePrompt], max_new_tokens: int, truncate: str | None = None, most: int | None = None) -> Fitted:
    """Token ids of every prompt, at most what the context leaves beside max_new_tokens and, if given, at most `most`.

    truncate: None refuses a longer prompt; "left" leaves out its first tokens, but keeps a beginning-of-sequence token in front. The
    last new token is never an input, so it needs no room. Raises ContextError, SettingError, and PromptError for messages where the
    model has no chat template.
    """
    if truncate not in (None, "left"):
        raise SettingError(f"truncate must be 'left' or nothing, got {truncate!r}")
    room = core.config.context + 1 - max_new_tokens
    if room < 1:
        raise ContextError(f"{max_new_tokens} new tokens leave no room for a prompt: this model's context is {core.config.context}; "
                           f"ask for at most {core.config.context}")
    room = room if most is None else min(room, most)
    rows, cut = [], {}
    for prompt in prompts:
        try:
            ids = (core.apply_chat_template(prompt.messages) if prompt.messages else core.prompt_tokens(prompt.text)).tolist()
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id} (line {prompt.line}): {error}") from error
        if len(ids) > room:
            cut[prompt.id] = len(ids) - room
            bos = ids[:1] if core.config.bos is not None and ids[0] == core.config.bos and room > 1 else []
            ids = bos + ids[len(ids) - room + len(bos) :]
        rows.append(ids)
    if cut and truncate is None:
        longest = max(cut.values()) + room
        names = ", ".join(list(cut)[:3]) + (" ..." if len(cut) > 3 else "")
        why = f"a context of {core.config.context} leaves no more beside {max_new_tokens} new ones"
        why = "the most asked for" if room == most else why
        raise ContextError(f"{len(cut)} of {len(prompts)} prompts are longer than {room} tokens ({why}): {names}; the longest has "
                           f"{longest}. Ask for fewer new tokens or shots, or cut them on the left (truncate='left', --truncate left)")
    return Fitted(rows, cut)
