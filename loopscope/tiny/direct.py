"""Problems answered at once, in one or two tokens. Each generator returns ``(question, answer)``."""

from __future__ import annotations

import random

from loopscope.tiny.worked import NAMES, _apply, _leaves, _reduce, _show, _tree

LETTERS = "abcdefgh"


def nested(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """The last digit of a bracketed expression with ``difficulty`` operators (no negative value on the way)."""
    while True:
        tree = _tree(rng, difficulty)
        shown, values, current = _show(tree), [], tree
        while isinstance(current, list):
            current, _ = _reduce(current)
            values.extend(_leaves(current))
        if all(0 <= v <= 999 for v in values):
            return f"Last digit of {shown}?", f"{current % 10}."


def counter(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """A one-digit counter through ``difficulty`` changes, modulo 10."""
    value = rng.randint(0, 9)
    lines = [f"x={value}"]
    for _ in range(difficulty):
        op, n = rng.choice("+-"), rng.randint(1, 9)
        lines.append(f"x{op}={n}")
        value = _apply(value, op, n) % 10
    return f"{'; '.join(lines)}; x mod 10?", f"{value}."


def lookup(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """What one of ``difficulty`` people has."""
    names = rng.sample(NAMES, difficulty)
    owned = [rng.randint(0, 9) for _ in names]
    i = rng.randrange(difficulty)
    listed = ", ".join(f"{name} has {n}" for name, n in zip(names, owned, strict=True))
    return f"{listed}. What has {names[i]}?", f"{owned[i]}."


def pointer(rng: random.Random, difficulty: int) -> tuple[str, str]:
    """Follow ``difficulty`` arrows through a random cycle of five letters, listed in random order."""
    letters = rng.sample(LETTERS, 5)
    after = {a: b for a, b in zip(letters, letters[1:] + letters[:1], strict=True)}
    listed = ", ".join(f"{a}>{after[a]}" for a in rng.sample(letters, len(letters)))
    start = end = rng.choice(letters)
    for _ in range(difficulty):
        end = after[end]
    return f"{listed}. From {start} go {difficulty}?", f"{end}."
