"""Held-out evaluation prompts for the shipped models: the same on every machine and every Python.

Maths prompts come from the generators with a seed of their own and only from held-out questions; code prompts are
stored in ``code_prompts.json`` (stretches of held-out standard-library modules; see NOTICE).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from loopscope.errors import SettingError
from loopscope.tiny import tasks

CODE_PROMPTS = Path(__file__).with_name("code_prompts.json")
#: Worked tasks whose answers run to 40 tokens and more.
LONG_ANSWERS = ("story", "bill", "boxes", "columns")


def maths_problems(n: int, seed: int = 0) -> list[tasks.Problem]:
    """``n`` different held-out worked problems with long answers, tasks in turn, hard and easy mixed."""
    rng = random.Random(f"evaluation prompts {seed}")
    problems: dict[str, tasks.Problem] = {}
    while len(problems) < n:
        task = LONG_ANSWERS[len(problems) % len(LONG_ANSWERS)]
        _, low, high = tasks.WORKED[task]
        # the shortest column additions have answers of about 30 tokens: leave those out
        problem = tasks.make(task, rng.randint(low + (task == "columns"), high), rng, held_out=True)
        problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def prompts(task: str = "maths", n: int = 20, seed: int = 0) -> list[str]:
    """Evaluation prompts.

    Args:
        task: ``"maths"`` (worked problems, ending in ``A:``) or ``"code"`` (about 40 to 100 tokens of Python).
        n: how many; at most 40 for code.
        seed: other maths problems, or another order of the code prompts.

    Raises:
        SettingError: for an unknown task, fewer than one prompt, or more code prompts than are stored.
    """
    if n < 1:
        raise SettingError(f"at least one prompt is needed, got n={n}")
    if task == "maths":
        return [p.prompt for p in maths_problems(n, seed)]
    if task != "code":
        raise SettingError(f"no prompts for task {task!r}; known: 'maths', 'code'")
    stored = [p["text"] for p in json.loads(CODE_PROMPTS.read_text(encoding="utf-8"))["prompts"]]
    if n > len(stored):
        raise SettingError(f"{n} code prompts asked for, {len(stored)} are stored")
    return random.Random(f"code order {seed}").sample(stored, n) if seed else stored[:n]
