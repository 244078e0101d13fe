"""Arithmetic problems whose answers spell out each step. Each generator returns ``(question, answer)``."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("Ann", "Ben", "Eva", "Tom", "Mia", "Sam", "Leo", "Ida")
THINGS = ("apples", "pens", "books", "coins", "cards", "shells", "cups", "stones")
GOODS = ("pens", "books", "cups", "cards", "lamps", "balls")


def story(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """A person's things through ``difficulty`` events (all counts stay within 1..99)."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends = [n for n in NAMES if n != name]
    have = rng.randint(5, 40)
    question = [f"{name} has {have} {thing}."]
    answer = [f"{name} starts with {have} {thing}."]
    for _ in range(difficulty):
        kind = rng.choice(("find", "give", "bags", "double" if have <= 45 else "give"))
        if kind == "give" and have < 4:
            kind = "find"
        if kind in ("find", "bags") and have > 60:
            kind = "give"
        if kind == "find":
            n = rng.randint(2, 30)
            question.append(f"{name} finds {n} more.")
            answer.append(f"After finding {n} there are {have}+{n}={have + n}.")
            have += n
        elif kind == "give":
            n, friend = rng.randint(1, min(have - 1, 30)), rng.choice(friends)
            question.append(f"{name} gives {n} to {friend}.")
            answer.append(f"After giving {n} to {friend} there are {have}-{n}={have - n}.")
            have -= n
        elif kind == "bags":
            bags, each = rng.randint(2, 5), rng.randint(2, 7)
            n = bags * each
            question.append(f"{name} buys {bags} bags of {each}.")
            answer.append(f"The {bags} bags hold {bags}*{each}={n}, so there are {have}+{n}={have + n}.")
            have += n
        else:
            question.append(f"Then the {thing} double.")
            answer.append(f"Doubling gives {have}*2={have * 2}.")
            have *= 2
    question.append(f"How many {thing} does {name} have?")
    answer.append(f"The answer is {have}.")
    return " ".join(question), " ".join(answer)


def bill(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """Buy ``difficulty`` kinds of goods and count the change."""
    name = rng.choice(NAMES)
    goods = rng.sample(GOODS, difficulty)
    lines, steps, total = [], [], 0
    for i, good in enumerate(goods):
        n, price = rng.randint(2, 6), rng.randint(2, 8)
        lines.append(f"{n} {good} for {price} coins each")
        steps.append(f"The {n} {good} cost {n}*{price}={n * price} coins.")
        if i:
            steps.append(f"Together {total}+{n * price}={total + n * price} coins.")
        total += n * price
    paid = rng.randint(total // 10 + 1, 15) * 10
    question = f"{name} buys {' and '.join(lines)}, and pays with {paid} coins. How much is the change?"
    steps.append(f"The change is {paid}-{total}={paid - total} coins. The answer is {paid - total}.")
    return question, " ".join(steps)


def boxes(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """Division with remainder by trying multiples; difficulty 2 takes some away first."""
    thing, size = rng.choice(THINGS), rng.randint(3, 9)
    full, left = rng.randint(2, 9), rng.randint(0, size - 1)
    n = size * full + left
    steps = []
    if difficulty == 1:
        question = f"{n} {thing} are packed in boxes of {size}. How many boxes are full and how many {thing} are left?"
    else:
        lost = rng.randint(1, 9)
        question = (
            f"Of {n + lost} {thing} {lost} break. The others are packed in boxes of {size}. "
            f"How many boxes are full and how many {thing} are left?"
        )
        steps.append(f"There are {n + lost}-{lost}={n} {thing} to pack.")
    steps.append(f"{full} boxes hold {full}*{size}={full * size}.")
    steps.append(f"{full + 1} boxes would hold {full * size}+{size}={(full + 1) * size}, more than {n}.")
    steps.append(f"So {full} boxes are full and {n}-{full * size}={left} {thing} are left.")
    steps.append(f"The answer is {full} and {left}.")
    return question, " ".join(steps)


def columns(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """Add two numbers of ``difficulty`` digits column by column, from the right, with carries."""
    low, high = 10 ** (difficulty - 1), 10**difficulty - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        terms = f"{x}+{y}+{carry}" if carry else f"{x}+{y}"
        carry, digit = divmod(total, 10)
        steps.append(f"{terms}={total}, write {digit}{', carry 1' if carry else ''}.")
    if carry:
        steps.append("Write the last 1.")
    steps.append(f"The answer is {a + b}.")
    return f"Add {a} and {b} in columns.", " ".join(steps)


def _tree(rng: random.Random, operators: int) -> Any:
    """A random expression tree with the given number of operators; leaves are digits."""
    if operators == 0:
        return rng.randint(1, 9)
    left = rng.randint(0, operators - 1)
    return [_tree(rng, left), rng.choice("+-*"), _tree(rng, operators - 1 - left)]


def _show(tree: Any, top: bool = True) -> str:
    if not isinstance(tree, list):
        return str(tree) if int(tree) >= 0 or top else f"({tree})"
    text = f"{_show(tree[0], False)}{tree[1]}{_show(tree[2], False)}"
    return text if top else f"({text})"


def _apply(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def _reduce(tree: Any) -> tuple[Any, bool]:
    """Replace the first operator whose two sides are numbers; says whether one was found."""
    if not isinstance(tree, list):
        return tree, False
    left, op, right = tree
    if not isinstance(left, list) and not isinstance(right, list):
        return _apply(left, op, right), True
    left, done = _reduce(left)
    if not done:
        right, done = _reduce(right)
    return [left, op, right], done


def steps(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """Reduce a bracketed expression one operator at a time (every value stays within -99..99)."""
    while True:
        tree = _tree(rng, difficulty)
        shown, values, current = [_show(tree)], [], tree
        while isinstance(current, list):
            current, _ = _reduce(current)
            shown.append(_show(current))
            values.extend(_leaves(current))
        if all(-99 <= v <= 99 for v in values):
            break
    return f"Work out {shown[0]} step by step.", f"{' = '.join(shown)}. The answer is {shown[-1]}."


def _leaves(tree: Any) -> list[int]:
    return [tree] if not isinstance(tree, list) else _leaves(tree[0]) + _leaves(tree[2])
