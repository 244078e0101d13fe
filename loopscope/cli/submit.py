"""`loopscope submit`: a shared run as jobs of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopscope.cli.folder import refuse_existing
from loopscope.errors import LoopscopeError, SettingError
from loopscope.shards import shards_folder


def run_submit(words: Sequence[str], shards: int, *, wait: bool, **settings: Any) -> str:
    """What was queued and how to go on; with `wait`, the merged run."""
    from loopscope.cluster import submit

    out = _out(words)
    refuse_existing(out)
    folder = shards_folder(out) if shards > 1 else None
    jobs = submit(words, shards, (folder or shards_folder(out)) / "logs", **settings)
    said = f"{len(jobs)} jobs: {', '.join(job.job_id for job in jobs)}"
    if not wait:
        return f"{said}\nwhen all are done: loopscope merge {folder}" if folder else said
    failed = [job.job_id for job in jobs if job.exception() is not None]
    if failed:
        raise JobsFailed(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}; their logs are in {jobs[0].paths.folder}. The "
                         "same command runs what is left")
    if folder is None:
        return f"{said}\nsaved in {out}"
    from loopscope.cli.merge import run_merge

    return f"{said}\nsaved in {run_merge(str(folder), None)}"


class JobsFailed(LoopscopeError):
    """Jobs of a cluster that ended without a result."""


def _out(words: Sequence[str]) -> str:
    """The DIR of --out DIR or --out=DIR. Raises SettingError without one."""
    for word, following in zip(words, [*words[1:], ""]):
        if word == "--out" and following:
            return following
        if word.startswith("--out="):
            return word.removeprefix("--out=")
    raise SettingError("jobs must keep what they measure somewhere; add --out DIR to the command after --")
