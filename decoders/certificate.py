"""The certificate of the losslessness ladder: what was decoded, what differed, and what explains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.rungs import COLUMNS, EMPTY, Record
from loopscope.records import Result

if TYPE_CHECKING:
    import pandas as pd

_BAR = 40  # characters of the longest bar
_SHOWN = 10  # failures that are printed; the table holds all


@dataclass(frozen=True, eq=False)
class Certificate(Result):
    """One row per generation (decoders/rungs.py). meta: how it was made, and whether the run was `complete`.

    A generation fails where its tokens differ and no near tie explains it, where materialised K/V, counted calls or the first
    block's drafts are not what they must be, or where it raised an error. An incomplete certificate certifies nothing.
    """

    kind = "certificate"
    columns = COLUMNS

    @classmethod
    def of(cls, records: Iterable[Record], meta: Mapping[str, Any]) -> Certificate:
        import pandas as pd

        frame = pd.DataFrame(list(records), columns=list(COLUMNS))
        return cls(frame.astype({name: type(value) for name, value in EMPTY.items() if isinstance(value, (bool, int))}), meta)

    @property
    def failed(self) -> pd.DataFrame:
        """The rows that fail."""
        f = self.frame
        return f[(f["mismatch"] & ~f["explained"]) | f["cache_mismatch"] | f["count_mismatch"] | f["draft_mismatch"] | (f["error"] != "")]

    @property
    def complete(self) -> bool:
        return bool(self.meta.get("complete", True))

    @property
    def passed(self) -> bool:
        return self.complete and len(self.frame) > 0 and not len(self.failed)

    def counts(self) -> dict[str, int]:
        """The sums that matter, over all rows."""
        return {name: int(value) for name, value in _sums(self.frame).items()}

    def acceptance(self) -> list[tuple[str, int]]:
        """(bin, generations) of accepted / proposed: exactly 0, ten bins between, exactly 1."""
        judged = self.frame[self.frame["proposed"] > 0]
        alpha = judged["accepted"] / judged["proposed"]
        between = [(f"({i / 10:.1f}, {(i + 1) / 10:.1f}]", int(((alpha > i / 10) & (alpha <= (i + 1) / 10) & (alpha < 1)).sum()))
                   for i in range(10)]
        return [("0", int((alpha == 0).sum())), *between, ("1", int((alpha == 1).sum()))]

    def by(self, *names: str) -> pd.DataFrame:
        """The same sums for each value of some columns, with the mean acceptance."""
        import pandas as pd

        rows = [{**dict(zip(names, key)), **_sums(group)} for key, group in self.frame.groupby(list(names), sort=True)]
        return pd.DataFrame(rows)

    def facts(self) -> dict[str, Any]:
        """The certificate without its rows, for JSON."""
        ties = self.frame[self.frame["mismatch"]]
        audit = ties[["level", "model", "schedule", "case", "sequence", "first_difference", "margin", "deviation", "explained"]]
        return {"passed": self.passed, **self.meta, **self.counts(), "acceptance": dict(self.acceptance()),
                "acceptance_between": self._between() if self.frame["proposed"].any() else None,
                "near_tie_audit": audit.to_dict("records"),
                "failures": self.failed[["level", "model", "schedule", "case", "sequence", "verdict", "error"]].to_dict("records")}

    def _between(self) -> float:
        judged = self.frame[self.frame["proposed"] > 0]
        if not len(judged):
            return float("nan")
        return float((judged["accepted"] / judged["proposed"]).between(0.2, 0.95).mean())

    def text(self) -> str:
        """The certificate as it is printed."""
        total, lines = self.counts(), []
        for level, rows in self.frame.groupby("level", sort=True):
            lines += [f"{level} ({_LEVELS[str(level)]}): {_sentence(_sums(rows))}"]
        if len(self.frame):
            lines += ["", _table(self.by("level", "decoder")), ""]
        if self.frame["family"].nunique() > 1:
            lines += [_table(self.by("level", "family")), ""]
        bars = self.acceptance()
        longest = max(n for _, n in bars)
        if longest:
            lines += [f"Drafts accepted, in generations that drafted ({self._between():.0%} between .2 and .95):"]
            lines += [f"  {label:>10} {n:6}  {'#' * round(_BAR * n / longest)}" for label, n in bars]
            lines += [""]
        ties = self.frame[self.frame["mismatch"]]
        if len(ties):
            lines += ["Where tokens differ (margin: by how many logits plain decoding preferred its own token; deviation: what the row "
                      "count does to logits):"]
            lines += [f"  {r.level} {r.model} {r.schedule}{_case(r)}: new token {r.first_difference}, margin {r.margin:.2e}, deviation "
                      f"{r.deviation:.2e}: {'near tie' if r.explained else 'UNEXPLAINED'}" for r in ties.head(_SHOWN).itertuples()]
            lines += [f"  and {len(ties) - _SHOWN} more"] if len(ties) > _SHOWN else []
            lines += [""]
        failed = self.failed
        if len(failed):
            lines += [f"{len(failed)} failures:"]
            lines += [f"  {r.level} {r.model}{_case(r)}: {r.error or r.verdict}" for r in failed.head(_SHOWN).itertuples()]
            if (failed["case"] >= 0).any():
                lines += ["Run one again with: loopscope verify --case NUMBER, and the same --decoder"]
            lines += [""]
        state = "PASSED" if self.passed else "FAILED" if len(failed) or self.complete else "INCOMPLETE"
        interrupted = "" if self.complete else ", interrupted: this certifies nothing"
        return "\n".join([*lines, *_origin(self.meta),
                          f"{state}: {total['generations']} generations, {total['tokens']} tokens{interrupted}"])


_LEVELS = {"L0": "float64: tokens, K/V after every commit and calls equal", "L1": "float32: tokens equal",
           "L2": "bfloat16: a first difference is a near tie"}


def _sums(rows: pd.DataFrame) -> dict[str, Any]:
    return {"generations": len(rows), "tokens": rows["tokens"].sum(), "mismatches": rows["mismatch"].sum(),
            "explained": rows["explained"].sum(), "unexplained": (rows["mismatch"] & ~rows["explained"]).sum(),
            "cache_mismatches": rows["cache_mismatch"].sum(), "count_mismatches": rows["count_mismatch"].sum(),
            "draft_mismatches": rows["draft_mismatch"].sum(), "errors": (rows["error"] != "").sum(),
            "proposed": rows["proposed"].sum(), "accepted": rows["accepted"].sum()}


def _sentence(sums: Mapping[str, Any]) -> str:
    return (f"{sums['generations']} generations, {sums['tokens']} tokens; {sums['mismatches']} differ ({sums['explained']} by near ties, "
            f"{sums['unexplained']} unexplained), {sums['cache_mismatches']} K/V mismatches, {sums['count_mismatches']} call-count "
            f"mismatches, {sums['draft_mismatches']} draft mismatches, {sums['errors']} errors")


def _table(frame: pd.DataFrame) -> str:
    frame = frame.assign(accepted=(frame["accepted"] / frame["proposed"]).map(lambda x: f"{x:.2f}" if x == x else "-"))
    return frame.drop(columns="proposed").to_string(index=False)


def _origin(meta: Mapping[str, Any]) -> list[str]:
    """What is needed to make the certificate again."""
    if "command" not in meta:
        return []
    versions = f"torch {meta['versions']['torch']}, Python {meta['python']}, commit {meta['git']}"
    took = f", {meta['seconds']:.0f} s" if "seconds" in meta else ""
    return [f"{meta['command']} (seed {meta.get('seed')}){took}, {versions}"]


def _case(row: Any) -> str:
    return f" case {row.case}" if row.case >= 0 else ""
