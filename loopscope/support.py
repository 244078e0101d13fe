"""What the tests checked of every family, and on which versions: support.json, which `pytest --write-support -m support` writes.

A test says with `@pytest.mark.support(check)` what it shows of the families that it is parametrized over; tests/conftest.py notes
what came of it in a Record. Nothing in the file is written by hand.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from loopscope.errors import SettingError

FILE = Path(__file__).with_name("support.json")
CHECKS = {
    "golden logits": "logits at every stored depth are those of the official code on the same weights",
    "golden states": "the state after every recurrence is the official code's",
    "golden tokens": "greedy tokens, with the cache, are exactly the official code's",
    "transformers": "drawn sizes give the logits of the class, or a loop around the layers, that transformers has",
    "bridge": "every depth shows what TransformerLens's own bridge shows",
    "batches": "a row of a batch is the row alone",
    "splits": "any split of a prompt through the cache is one pass without a cache",
    "padding": "a left-padded row is the row alone",
    "hooks": "every hook at every depth fires once",
    "decoders": "every lossless decoder commits the autoregressive tokens, keys and values",
    "save": "what was loaded is written and loaded again bit for bit",
    "inspect": "parameters and K/V are counted right without reading the weights",
}
PACKAGES = ("torch", "transformers", "transformer-lens")


@dataclass(frozen=True)
class Support:
    """versions: of Python and the packages that the tests ran on. families: the checks that passed, in the order of CHECKS."""

    versions: dict[str, str]
    families: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        width = max(map(len, self.families), default=0)
        lines = [f"{family:{width}}  {', '.join(checks)}" for family, checks in self.families.items()]
        return "\n".join(lines)


def read_support(file: Path = FILE) -> Support:
    raw = json.loads(file.read_text(encoding="utf-8"))
    return Support(raw["versions"], {family: tuple(checks) for family, checks in raw["families"].items()})


@dataclass
class Record:
    """Outcomes of marked tests: (family, check) -> whether each test of it passed."""

    outcomes: dict[tuple[str, str], list[bool]] = field(default_factory=dict)

    def add(self, families: Iterable[str], check: str, passed: bool) -> None:
        if check not in CHECKS:
            raise SettingError(f"{check!r} is not one of the checks of loopscope/support.py: {', '.join(map(repr, CHECKS))}")
        for family in families:
            self.outcomes.setdefault((family, check), []).append(passed)

    def write(self, expected: Collection[tuple[str, str]], file: Path = FILE) -> None:
        """Write what passed. Raises SettingError, and writes nothing, if a test failed or an expected pair never ran."""
        bad = sorted({pair for pair, passed in self.outcomes.items() if not all(passed)} | (set(expected) - set(self.outcomes)))
        if bad or not self.outcomes:
            why = "; ".join(f"{check} of {family} did not pass" for family, check in bad) or "no test with a support marker ran"
            raise SettingError(f"the support file is not written: {why}")
        families = {family: [check for check in CHECKS if (family, check) in self.outcomes]
                    for family in sorted({family for family, _ in self.outcomes})}
        versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
        file.write_text(json.dumps({"versions": versions, "families": families}, indent=1) + "\n", encoding="utf-8")
