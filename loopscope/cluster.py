"""A shared run as jobs of a Slurm cluster, through submitit: thin, because the processes of a run need nothing of each other.

    jobs = submit(["bench", "tiny-huginn", "--out", "runs/x"], shards=4, folder="runs/x.shards/logs", minutes=30)

A job is the command itself with RANK and WORLD_SIZE in its environment. What it measured is on the disk prompt by prompt, so one that
is preempted, or reaches its time limit, is queued again as it is and goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.errors import SettingError


@dataclass
class Worker:
    """One process of a shared run; a job calls it. Returns the exit status, or raises CalledProcessError with what was said last."""

    words: tuple[str, ...]
    rank: int
    world: int

    def __call__(self) -> int:
        environment = {**os.environ, "RANK": str(self.rank), "WORLD_SIZE": str(self.world)}
        environment.pop("LOCAL_RANK", None)  # a job sees its own cards only, numbered from 0
        run = subprocess.run([sys.executable, "-m", "loopscope", *self.words], env=environment)
        if run.returncode:
            raise subprocess.CalledProcessError(run.returncode, ["loopscope", *self.words])
        return run.returncode

    def checkpoint(self):
        """What submitit queues where Slurm ends a job before it is done: the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(words: Sequence[str], shards: int, folder: str | os.PathLike, *, cluster: str | None = None, minutes: int = 60, cpus: int = 1,
           gpus: int = 0, memory_gb: float | None = None, partition: str | None = None) -> list[Any]:
    """Queue `shards` jobs that share `loopscope WORDS`; submitit's jobs, in the order of their ranks.

    folder: logs and pickled jobs. cluster: "slurm", "local" (processes on this machine), or what submitit finds. minutes: the time
    limit of a job. cpus, gpus, memory_gb: of each. Raises SettingError without submitit, for a command that cannot be shared, and for a
    cluster that is not there.
    """
    if not words or words[0] not in ("bench", "probe", "intervene"):
        raise SettingError(f"bench, probe and intervene can be shared, not {words[0] if words else 'nothing'}; write: loopscope submit "
                           "--shards 4 -- bench MODEL --out DIR")
    try:
        import submitit
    except ImportError:
        raise SettingError("jobs are queued with submitit, which is not installed; pip install 'loopscope[cluster]'") from None
    try:
        executor = submitit.AutoExecutor(folder=Path(folder), cluster=cluster)
    except (RuntimeError, ValueError, KeyError) as error:
        raise SettingError(f"the cluster {cluster or 'slurm'!r} cannot be used here: {error}; use slurm or local") from error
    settings: dict[str, Any] = {"timeout_min": minutes, "cpus_per_task": cpus, "gpus_per_node": gpus, "name": "loopscope"}
    settings |= {} if memory_gb is None else {"mem_gb": memory_gb}
    settings |= {} if partition is None else {"slurm_partition": partition}
    executor.update_parameters(**settings)
    with executor.batch():
        return [executor.submit(Worker(tuple(words), rank, shards)) for rank in range(shards)]
