"""The commands for runs that several processes share."""

from __future__ import annotations

from typing import Annotated

import typer

from loopscope.cli.app import app
from loopscope.cli.guard import guarded


@app.command(short_help="Put the parts of a shared run together.")
@guarded
def merge(folder: Annotated[str, typer.Argument(metavar="DIR", help="What the processes of a run with --out DIR left: DIR.shards.")],
          out: Annotated[str | None, typer.Option("--out", help="The run folder to make. Default: DIR.")] = None) -> None:
    """Put together what several processes measured of one run: bench, probe or intervene under torchrun or on a cluster.

    The result is the folder that one process would have left. It is refused unless every prompt is there exactly once, measured with
    the same settings, model, code and versions; what is missing is named. The parts stay where they are.
    """
    from loopscope.cli.merge import run_merge

    typer.echo(f"saved in {run_merge(folder, out)}")


@app.command(short_help="Share a run over jobs of a Slurm cluster.", context_settings={"ignore_unknown_options": True})
@guarded
def submit(words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="bench, probe or intervene with its arguments, --out "
                                                      "among them. Write -- before it.")],
           shards: Annotated[int, typer.Option(min=1, help="Jobs that share the prompts.")] = 2,
           minutes: Annotated[int, typer.Option(min=1, help="Time limit of a job. One that reaches it is queued again and goes on.")] = 60,
           cpus: Annotated[int, typer.Option(min=1, help="CPU cores per job.")] = 1,
           gpus: Annotated[int, typer.Option(min=0, help="Cards per job.")] = 0,
           memory_gb: Annotated[float | None, typer.Option(help="Memory per job. Default: the cluster's.")] = None,
           partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
           cluster: Annotated[str | None, typer.Option(metavar="NAME", help="slurm, or local: processes on this machine. Default: what is "
                                                       "there.")] = None,
           wait: Annotated[bool, typer.Option("--wait", help="Wait for all jobs, then merge.")] = False) -> None:
    """Share a run over jobs of a Slurm cluster (needs the extra: pip install 'loopscope[cluster]').

    loopscope submit --shards 8 --gpus 1 -- bench MODEL --suite gsm8k.jsonl --device cuda --out runs/x

    Logs are in DIR.shards/logs. A job that is preempted or killed is run again by the same command, and loses the prompt in hand.
    """
    from loopscope.cli.submit import run_submit

    typer.echo(run_submit(words, shards, wait=wait, cluster=cluster, minutes=minutes, cpus=cpus, gpus=gpus, memory_gb=memory_gb,
                          partition=partition))
