"""`--suite FILE`: prompts from a file of JSON lines, read before the model is loaded and cut to its context after."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import SettingError

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore
    from loopscope.suites import SuiteFormat, SuitePrompt


@dataclass
class Suite:
    """The prompts of a file, and what the model must leave room for."""

    path: Path
    format: SuiteFormat
    prompts: list[SuitePrompt]
    shots: int
    max_new_tokens: int
    truncate: str | None
    most: int | None
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The task in tables: the format's name, or the file's where the format says nothing."""
        return self.path.stem if self.format.name in ("plain", "chat") else self.format.name

    def tokens(self, core: LoopedCore) -> list[list[int]]:
        """Token ids of every prompt; says on stderr what was read, and what was cut."""
        from loopscope.suites import fit

        fitted = fit(core, self.prompts, self.max_new_tokens, self.truncate, self.most)
        self.cut = dict(fitted.cut)
        shots = f", each behind {self.shots} worked examples from its first rows" if self.shots else ""
        print(f"{self.path}: {len(self.prompts)} prompts ({self.format.name}){shots}, {min(map(len, fitted.tokens))} to "
              f"{max(map(len, fitted.tokens))} tokens", file=sys.stderr)
        if self.cut:
            print(f"{len(self.cut)} prompts lost tokens on the left: {', '.join(f'{name} ({n})' for name, n in self.cut.items())}",
                  file=sys.stderr)
        return fitted.tokens

    def facts(self) -> dict[str, Any]:
        """For a manifest: which file and rows, not their texts."""
        from loopscope.suites import digest

        return {"file": str(self.path), "sha256": digest(self.path), "format": self.format.name, "shots": self.shots,
                "ids": [p.id for p in self.prompts], "categories": [p.category for p in self.prompts], "cut": self.cut}


def texts_or_suite(texts: Sequence[str] | None, path: str | None, format: str | None = None, limit: int | None = None,
                   shots: int | None = None, truncate: str | None = None, new_tokens: int | None = None, default_new_tokens: int = 1,
                   as_published: bool = False) -> tuple[Sequence[str] | Suite | None, int]:
    """(the user's texts, or a suite, or None for built-in prompts; new tokens per prompt).

    Raises SettingError for both at once, and for an option of suites without one; what read_suite raises besides.
    """
    if path is None:
        given = {"--suite-format": format, "--limit": limit, "--shots": shots, "--truncate": truncate,
                 "--as-published": as_published or None}
        if names := [name for name, value in given.items() if value is not None]:
            raise SettingError(f"{', '.join(names)} can only be used with --suite FILE")
        return texts, default_new_tokens if new_tokens is None else new_tokens
    if texts:
        raise SettingError("--suite and --prompt both say what to read; give one of them")
    from loopscope.suites import read_suite, recognise, suite_format

    known, most = recognise(path) if format is None else suite_format(format), None
    if as_published and known.new_tokens is None:
        raise SettingError(f"nothing is published for the format {known.name}; leave out --as-published")
    if as_published:
        shots = known.shots if shots is None else shots
        new_tokens = known.new_tokens if new_tokens is None else new_tokens
        most = known.prompt_tokens
    new_tokens = default_new_tokens if new_tokens is None else new_tokens
    prompts = read_suite(path, known.name, limit, shots)
    return Suite(Path(path), known, prompts, shots or 0, new_tokens, truncate, most), new_tokens
