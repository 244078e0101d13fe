"""Python code from the standard library of the running interpreter: the code half of the shipped models' data.

Which files are used is fixed by ``stdlib_modules.txt`` (relative paths, sorted); a file that this Python lacks is
skipped. The text itself is that of the running interpreter, so the card records its version. A module is held out
by a hash of its name: no window of a held-out module is ever trained on.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path

LISTED = Path(__file__).with_name("stdlib_modules.txt")
#: Characters kept of one file: without a cap a few giants would be most of the corpus.
LONGEST = 50_000
#: One module in this many is held out.
HELD_OUT_EVERY = 10


def module_name(relative: str) -> str:
    """``"asyncio/tasks.py"`` -> ``"asyncio.tasks"``."""
    return relative.removesuffix(".py").replace("/", ".")


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out split (a hash of its name, the same on every machine)."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0


def documents(held_out: bool) -> dict[str, str]:
    """Module name -> text, in sorted order, of one split.

    Raises:
        FileNotFoundError: if none of the listed files is there (an interpreter without its standard library's source).
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for relative in LISTED.read_text().split():
        module = module_name(relative)
        if is_held_out(module) != held_out:
            continue
        try:
            text = (root / relative).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found[module] = text[:LONGEST]
    if not found:
        raise FileNotFoundError(f"no standard-library source below {root}: training needs a Python with its .py files")
    return found


def window(text: str, rng: random.Random, shortest: int = 300, longest: int = 1200) -> str:
    """A random stretch of whole lines of roughly ``shortest`` to ``longest`` characters."""
    size = rng.randint(shortest, longest)
    start = rng.randint(0, max(len(text) - size, 0))
    if start:
        start = text.find("\n", start) + 1 or start
    end = text.find("\n", start + size) + 1
    return text[start : end or len(text)]
