"""How often a draft names the full-depth token, looked up in the tables of the probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopscope.errors import SettingError


class Agreements:
    """Agreement with the full-depth token by policy, depth and lag, from the probes' tables.

    prefix_channels is preferred, since it measures what a draft behind a verified prefix sees; between measured lags
    agreement is interpolated, beyond the largest it stays. depth_lens stands in for aligned reads where it is missing.
    """

    def __init__(self, tables: Mapping[str, Any], *, task: str | None = None, start: str | None = None) -> None:
        import pandas as pd

        self._cells: dict[tuple[str, int], dict[int, list[tuple[int, float, float]]]] = {}
        self._lens: dict[int, list[tuple[int, float, float]]] = {}
        found = False
        for kind in ("depth_lens", "prefix_channels"):
            table = tables.get(kind)
            frame = getattr(table, "frame", table)
            if not isinstance(frame, pd.DataFrame):
                continue
            for column, value in (("task", task), ("start", start)):
                if value is not None:
                    frame = frame[frame[column] == value]
            found = found or len(frame) > 0
            if kind == "depth_lens":
                for row in frame.itertuples():
                    self._lens.setdefault(row.depth, []).append((row.prompt, row.agreement, row.n_positions))
            else:
                for row in frame[frame["control"] == "none"].itertuples():
                    cell = self._cells.setdefault((row.policy, row.depth), {})
                    cell.setdefault(row.lag, []).append((row.prompt, row.agreement, row.n_positions))
        if not found:
            wanted = ", ".join(f"{k} {v!r}" for k, v in (("task", task), ("start", start)) if v is not None)
            raise SettingError("a plan needs a depth_lens or a prefix_channels table with rows" + (f" of {wanted}" if wanted else ""))
        self._weights: Mapping[int, float] | None = None
        self._known: dict[tuple[str, int, int], float | None] = {}

    @property
    def prompts(self) -> list[int]:
        cells = [*self._lens.values(), *(rows for lags in self._cells.values() for rows in lags.values())]
        return sorted({prompt for rows in cells for prompt, _, _ in rows})

    def resampled(self, drawn: Sequence[int]) -> Agreements:
        """The same findings with prompts counted as often as they were drawn."""
        other = object.__new__(Agreements)
        other.__dict__.update(self.__dict__)
        counts: dict[int, float] = {}
        for prompt in drawn:
            counts[prompt] = counts.get(prompt, 0) + 1
        other._weights, other._known = counts, {}
        return other

    def agreement(self, policy: str, depth: int, lag: int) -> float | None:
        """How often a draft made so names the full-depth token, 0..1; None where nothing was measured."""
        key = policy, depth, lag
        if key not in self._known:
            self._known[key] = self._between(policy, depth, lag)
        return self._known[key]

    def positions(self, policy: str, depth: int, lag: int) -> int:
        """How many positions `agreement` is a mean over, of all prompts; where it lies between two lags, of the one with fewer."""
        lags = self._cells.get((policy, depth), {})
        if not lags:
            return sum(int(n) for _, _, n in self._lens.get(depth, [])) if policy == "aligned" else 0
        return min(sum(int(n) for _, _, n in lags[at]) for at in self._around(lags, lag))

    @staticmethod
    def _around(lags: Mapping[int, Any], lag: int) -> tuple[int, int]:
        """The measured lags on both sides of this one; beyond the last, that one."""
        return max((n for n in lags if n <= lag), default=min(lags)), min((n for n in lags if n >= lag), default=max(lags))

    def _between(self, policy: str, depth: int, lag: int) -> float | None:
        lags = self._cells.get((policy, depth), {})
        if not lags:
            return self._mean(self._lens.get(depth, [])) if policy == "aligned" else None
        below, above = self._around(lags, lag)
        low, high = self._mean(lags[below]), self._mean(lags[above])
        if low is None or high is None or below == above:
            return low
        return low + (high - low) * (lag - below) / (above - below)

    def _mean(self, rows: list[tuple[int, float, float]]) -> float | None:
        weights = [(n * (1 if self._weights is None else self._weights.get(prompt, 0)), value) for prompt, value, n in rows]
        total = sum(w for w, _ in weights)
        return sum(w * value for w, value in weights) / total if total else None
