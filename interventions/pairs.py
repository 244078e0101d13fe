"""Pairs of prompts that differ in one digit of a sum, for activation patching on the shipped models."""

from __future__ import annotations

import random

from loopscope.errors import SettingError


def sum_pairs(n: int = 4, seed: int = 0) -> list[tuple[str, str]]:
    """n (clean, corrupted) prompts of the maths task, up to the sum of the last digits: "Add 352 and 134 in columns.\\nA: 2+4=".

    The corrupted prompt has another last digit of the first number, in the question and in the working; both sums have one
    digit, so that the answers are two different tokens. All prompts have as many tokens (the shipped tokenizer gives every
    digit a token of its own). Raises SettingError for fewer than one.
    """
    if n < 1:
        raise SettingError(f"at least one pair is needed, got n={n}")
    draw, pairs = random.Random(f"sum pairs {seed}"), []
    for _ in range(n):
        y = draw.randint(1, 6)
        x, other = draw.sample(range(1, 10 - y), 2)
        tens, b = draw.randint(10, 99), 10 * draw.randint(10, 99) + y
        clean, corrupted = (f"Q: Add {10 * tens + digit} and {b} in columns.\nA: {digit}+{y}=" for digit in (x, other))
        pairs.append((clean, corrupted))
    return pairs
