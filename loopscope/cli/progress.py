"""One progress bar for a job of unequal stages, with the time left; plain lines where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Stages:
    """Progress over stages with weights (rough seconds): `with stages.stage("..."):`, in the order they were given.

    Inside a stage, `advance(done, total)` moves the bar by that share of the stage.
    """

    def __init__(self, weights: Sequence[float], stream=None) -> None:
        from tqdm import tqdm

        self.stream = stream or sys.stderr
        self.weights, self.index, self.total = list(weights), 0, sum(weights)
        self.begin, self.before, self.inside = time.monotonic(), 0.0, 0.0
        self.seconds: dict[str, float] = {}  # of every stage that is over, by its label
        self.terminal = self.stream.isatty()
        layout = "{percentage:3.0f}%|{bar:24}| {elapsed}, {remaining} left  {desc}"
        self.bar = tqdm(total=self.total, bar_format=layout, file=self.stream, disable=not self.terminal, leave=False)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    @contextmanager
    def stage(self, label: str) -> Iterator[Stages]:
        self.bar.set_description_str(label)
        if not self.terminal:
            print(f"[{self.index + 1}/{len(self.weights)}] {label}{self._left()}", file=self.stream, flush=True)
        begin = time.monotonic()
        yield self
        self.seconds[label] = round(time.monotonic() - begin, 2)
        self._move(self.weights[self.index])
        self.before += self.weights[self.index]
        self.index, self.inside = self.index + 1, 0.0

    def advance(self, done: int, total: int, label: str = "") -> None:
        self._move(self.weights[self.index] * done / total)

    def _move(self, inside: float) -> None:
        self.bar.update(inside - self.inside)
        self.inside = inside

    def _left(self) -> str:
        if not self.before:
            return ""
        spent = time.monotonic() - self.begin
        return f"  ({spent:.0f} s so far, about {spent * (self.total - self.before) / self.before:.0f} s left)"
