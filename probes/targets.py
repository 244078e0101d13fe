"""A property that the shipped models compute: the last digit of a sum, at the equals sign in front of it."""

from __future__ import annotations

import random
import re
from typing import Any

from loopscope.errors import PromptError, SettingError
from loopscope.tiny.tasks import make
from probes.inputs import core_of
from probes.linear import Labelled

_SUM = re.compile(r"(\d(?:\+\d)+)=(\d+)")


def sum_digits(model: Any, n: int = 40, seed: int = 0) -> list[Labelled]:
    """n held-out column additions, worked out; at every "=" of a sum of digits the label is the sum's last digit.

    Of a sum of 10 and more the next token is its first digit, so that the label is not what the model says next, and must
    have been worked out to carry on. Type: the sum's terms ("6+8"), which fix the label: the control's random function of
    them is as easy to learn by heart. Raises SettingError for fewer than one, PromptError for a model without a tokenizer.
    """
    core = core_of(model)
    if n < 1:
        raise SettingError(f"at least one prompt is needed, got n={n}")
    if core.tokenizer is None:
        raise PromptError("this model came without a tokenizer.json, so a position in a text has no place among its tokens")
    draw, found = random.Random(f"sum digits {seed}"), dict[str, str]()
    while len(found) < n:
        problem = make("columns", draw.randint(2, 4), draw, held_out=True)
        found.setdefault(problem.prompt, problem.prompt + problem.answer)
    return [labelled(core, text) for text in found.values()]


def labelled(core: Any, text: str) -> Labelled:
    """A text with its sums of digits labelled."""
    ids = core.prompt_tokens(text)
    offsets = core.tokenizer.encode(text, add_special_tokens=False).offsets
    shift = len(ids) - len(offsets)  # a token for the beginning
    at = {character: i + shift for i, (begin, end) in enumerate(offsets) for character in range(begin, end)}
    sums = list(_SUM.finditer(text))
    return Labelled(ids.tolist(), [at[m.end(1)] for m in sums], [int(m[2][-1]) for m in sums], [m[1] for m in sums])
