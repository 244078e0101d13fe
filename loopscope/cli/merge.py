"""`loopscope merge`: the parts of a shared run as one run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loopscope.cli.folder import refuse_existing, run_folder
from loopscope.errors import RunFolderError
from loopscope.merge import merge
from loopscope.shards import SUFFIX

_OF_ONE_PROCESS = ("schema", "command", "git", "python", "versions", "hardware", "shard", "tables")


def run_merge(folder: str, out: str | None) -> Path:
    """Write the run folder that one process would have left; the parts stay where they are."""
    from loopscope.cli.study import draw
    from loopscope.records import manifest, write_table, write_text

    if out is not None:
        refuse_existing(out)
    run = merge(folder)
    if out is None:
        if run.folder.suffix != SUFFIX:
            raise RunFolderError(f"{run.folder} does not end in {SUFFIX}, so where to write the run must be said; add --out DIR")
        out = str(run.folder.with_suffix(""))
        refuse_existing(out)
    tables = {name: found for name, found in run.tables.items() if len(found[0])}  # as one process does: no table without rows
    if "prefix_channels" in tables:
        from interventions import paired_effects

        frame, meta = tables["prefix_channels"]
        effects = paired_effects(frame, meta=meta)
        tables["prefix_effects"] = effects.frame, dict(effects.meta)
    first = run.manifests[0]
    facts: dict[str, Any] = {name: value for name, value in first.items() if name not in _OF_ONE_PROCESS}
    shards = [{"rank": rank, "prompts": m["shard"]["prompts"], "sittings": m["shard"].get("sittings"), "command": m.get("command"),
               "git": m.get("git"), "hardware": m.get("hardware")} for rank, m in enumerate(run.manifests)]
    with run_folder(out) as part:
        for name, (frame, meta) in tables.items():
            write_table(frame, part / "tables" / f"{name}.parquet", meta)
        draw({name: frame for name, (frame, _) in tables.items()}, part)
        write_text(json.dumps(manifest(**facts, shards=shards), indent=1, default=str) + "\n", part / "manifest.json")
    if "bench" in tables:
        from decoders.bench import BenchResult
        from loopscope.cli.bench import say

        say(BenchResult(*run.tables["bench"]))
    return Path(out)
