"""Generated problems with known answers: the maths half of the shipped models' data.

Two kinds. *Worked* problems spell out each step, so that almost every token is easy and a shallow recurrence
predicts it. *Direct* problems are answered at once: the computation has to happen inside the model, between
reading the question and writing one token.

Every generator is a pure function of a ``random.Random`` and a difficulty. Training and held-out problems are told
apart by a hash of the question, never by luck: ``is_held_out``.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from loopscope.tiny import direct, worked

#: One question in this many is held out.
HELD_OUT_EVERY = 16


class Problem(NamedTuple):
    """A question (``prompt`` ends in ``A:``) and the text that answers it (starts with a blank, ends in a newline)."""

    prompt: str
    answer: str
    task: str
    difficulty: int

    @property
    def final(self) -> str:
        """What counts as right: the words after ``The answer is`` in a worked text, else the whole answer."""
        return final_answer(self.answer)


def final_answer(text: str) -> str:
    """The final answer in a (generated) answer text; an empty string where a worked text never reaches one."""
    first = text.strip().split("\n")[0]
    if "The answer is" in first:
        first = first.rsplit("The answer is", 1)[1]
    return first.strip().rstrip(".")


#: task name -> (generator, lowest difficulty, highest difficulty)
WORKED: dict[str, tuple[Callable, int, int]] = {
    "story": (worked.story, 2, 4),
    "bill": (worked.bill, 2, 3),
    "boxes": (worked.boxes, 1, 2),
    "columns": (worked.columns, 2, 4),
    "steps": (worked.steps, 2, 4),
}
DIRECT: dict[str, tuple[Callable, int, int]] = {
    "nested": (direct.nested, 1, 4),
    "counter": (direct.counter, 1, 4),
    "lookup": (direct.lookup, 2, 5),
    "pointer": (direct.pointer, 1, 3),
}


def is_held_out(prompt: str) -> bool:
    """Whether a question belongs to the held-out split."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_EVERY == 0


def make(task: str, difficulty: int, rng: random.Random, held_out: bool) -> Problem:
    """Draw one problem of ``task`` from the wanted split.

    Raises:
        KeyError: for an unknown task.
    """
    generator = (WORKED | DIRECT)[task][0]
    while True:  # 15 of 16 draws are training questions, so this ends quickly on either side
        question, answer = generator(rng, difficulty)
        prompt = f"Q: {question}\nA:"
        if is_held_out(prompt) == held_out:
            return Problem(prompt, f" {answer}\n", task, difficulty)


def draw(rng: random.Random, kind: str, held_out: bool = False) -> Problem:
    """Draw a problem of a random task and difficulty; ``kind`` is ``"worked"`` or ``"direct"``."""
    tasks = WORKED if kind == "worked" else DIRECT
    task = rng.choice(list(tasks))
    _, low, high = tasks[task]
    return make(task, rng.randint(low, high), rng, held_out)


def every_cell(kind: str) -> Iterator[tuple[str, int]]:
    """All (task, difficulty) pairs of a kind, in a fixed order."""
    for task, (_, low, high) in (WORKED if kind == "worked" else DIRECT).items():
        for difficulty in range(low, high + 1):
            yield task, difficulty
