"""Predictions that are on disk before anything is measured, and whether the counts came out as they say.

    written = write_down({"plan": plan.frame, "calls": expected.frame}, folder, "tiny-huginn_maths")    # then: bench(...)
    held(expected.frame, result.frame)                      # a row per decoder: calls predicted, counted, and prompts that differ

A prediction counts only if nobody could have fitted it afterwards: every table is written with the time (UTC) and the SHA-256 of its
file, and the record of both goes into the manifest of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.records import Result, write_table, write_text

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = ("recur_calls", "proposed", "accepted")
HELD = ("model", "task", "decoder", "prompts", "exact", "calls_predicted", "calls_counted", "prompts_differ")


def write_down(tables: Mapping[str, pd.DataFrame | Result], folder: Path, name: str) -> dict[str, Any]:
    """Write FOLDER/NAME_KIND.parquet for every table and FOLDER/NAME.json, the record of when and what; returns the record.

    Of a result, its facts are written too.

    The record: {"written": ISO time in UTC, "files": {file name: SHA-256 of the file}}. Raises RunFolderError.
    """
    files = {}
    for kind, frame in tables.items():
        path = folder / f"{name}_{kind}.parquet"
        write_table(frame.frame, path, frame.meta) if isinstance(frame, Result) else write_table(frame, path)
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    record = {"written": datetime.now(UTC).isoformat(timespec="milliseconds"), "files": files}
    write_text(json.dumps(record, indent=1) + "\n", folder / f"{name}.json")
    return record


def altered(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Files of a record that are missing, or not what they were when it was written."""
    def digest(name: str) -> str | None:
        path = Path(folder) / name
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    return [name for name, sha in record["files"].items() if digest(name) != sha]


def held(expected: pd.DataFrame, bench: pd.DataFrame) -> pd.DataFrame:
    """One row per model, task and decoder that was both predicted (table replay_prediction) and run (table bench).

    calls: block calls per token after the prefill's, over all prompts. exact: the prediction says of every prompt that it is the
    decoder's own count. prompts_differ: prompts on which calls, proposed or accepted drafts of any repeat are not the predicted ones.
    """
    import pandas as pd

    by = ["model", "task", "prompt", "decoder"]
    both = expected.dropna(subset=["recur_calls"]).merge(bench, on=by, suffixes=("_said", ""))
    both["differs"] = False
    for count in _COUNTS:
        both["differs"] |= both[f"{count}_said"] != both[count]
    per_prompt = both.groupby(by, observed=True, sort=False).agg(
        exact=("exact", "all"), differs=("differs", "any"), said=("recur_calls_said", "first"), said_tokens=("tokens_said", "first"),
        counted=("recur_calls", "mean"), tokens=("tokens", "first")).reset_index()
    rows = []
    for key, part in per_prompt.groupby(["model", "task", "decoder"], observed=True, sort=False):
        later, said_later = (int((part[name] - 1).sum()) for name in ("tokens", "said_tokens"))
        rows.append((*key, len(part), bool(part.exact.all()), part.said.sum() / said_later if said_later else float("nan"),
                     part.counted.sum() / later if later else float("nan"), int(part.differs.sum())))
    return pd.DataFrame(rows, columns=list(HELD))


def sentence(outcome: pd.DataFrame) -> str:
    """What `held` found, for a reader: whether calls that were said to be exact are, and how near the others came."""
    exact, rest = outcome[outcome.exact], outcome[~outcome.exact]
    said = []
    wrong = exact[exact.prompts_differ > 0]
    if len(exact) and wrong.empty:
        prompts = int(exact.prompts.max())
        said.append(f"Calls and accepts predicted from the replay were counted exactly so, for all {len(exact)} decoders it is exact for, "
                    f"on {'every one of ' if prompts > 1 else ''}{prompts} prompt{'s' if prompts > 1 else ''}.")
    for r in wrong.itertuples():
        said.append(f"The replay was wrong about {r.decoder}: it promised {r.calls_predicted:.3f} block calls per token exactly, and "
                    f"{r.calls_counted:.3f} were counted ({r.prompts_differ} of {r.prompts} prompts differ); please report this.")
    if len(rest):
        off = (rest.calls_predicted / rest.calls_counted - 1).abs()
        worst = rest.loc[off.idxmax()]
        which = f"Of the {len(rest)} it only estimates, {worst.decoder} is furthest off, by" if len(rest) > 1 else (
            f"Its one estimate, {worst.decoder}, is off by")
        said.append(f"{which} {off.max():.1%} of its calls.")
    return " ".join(said)
