"""`loopscope bench`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from loopscope.cli.folder import refuse_existing
from loopscope.cli.progress import Stages
from loopscope.cli.study import open_model, print_table, read_texts, recorded, save, start_state
from loopscope.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

    from decoders.bench import BenchResult
    from decoders.bench_journal import Journal

# The names that docs/algorithms.md (section 4) and decoders.bench use -> what they mean.
DEFINITIONS = {"ratio_of_mean_throughputs": "mean over prompts of tokens per second, over AR's; with prefill",
               "total_tokens_over_total_time": "all tokens by all seconds, over AR's; with prefill",
               "mean_of_prompt_ratios": "mean over prompts of the ratio of tokens per second to AR's; with prefill",
               "decode_only": "all tokens by all seconds, over AR's; without prefill and its token",
               "mean_of_decode_ratios": "mean over prompts of the ratio to AR's; without prefill and its token (the one above)"}


def run_bench(model: str, names: list[str] | None, *, task, count, texts, out, max_new_tokens, repeats, depth, start, seed, threads,
              plain_loop=False, fresh=False, all_definitions=False) -> None:
    from decoders.bench import bench
    from decoders.bench_journal import Journal
    from decoders.named import decoder
    from decoders.plain_loop import PlainLoop

    wanted = [*(names or ("wfd", "dtv", "das-wave")), *([PlainLoop.label] if plain_loop else [])]
    chosen = [PlainLoop() if n in ("plain", PlainLoop.label) else decoder(n) for n in dict.fromkeys(wanted)]
    state = start_state(start)
    if fresh and out is None:
        raise SettingError("--fresh throws away what an interrupted run left, which only a run with --out leaves")
    if out is not None:
        refuse_existing(out)
    with Journal(f"{out.rstrip(os.sep)}.partial", fresh) if out is not None else nullcontext() as journal:
        try:
            if out is not None:
                refuse_existing(out)  # a run that held the journal until now has just finished
            core = open_model(model, threads)
            label, prompts = read_texts(core, task, count, texts, seed)
            with Stages([1.0]) as stages, stages.stage("decoding"):
                result = bench(core, prompts, chosen, label, max_new_tokens, repeats, seed, depth=depth, start_state=state, journal=journal,
                               progress=_telling(stages.advance, journal, len(prompts) * repeats))
            print(f"{core.source}, {len(prompts)} prompts ({label}), {max_new_tokens} new tokens; speedup: mean over prompts of the "
                  "ratio of decode times, with a 95 % interval over prompts")
            _say(result, plain_loop=any(isinstance(d, PlainLoop) for d in chosen), all_definitions=all_definitions)
            save([t for t in (result, result.acceptance, result.by_depth) if t is not None and len(t.frame)], out, model=core.source,
                 prompts=recorded(texts, prompts), seed=seed, settings=dict(result.meta))
        except KeyboardInterrupt:
            if journal is not None and journal.groups:
                raise KeyboardInterrupt(f"interrupted; {len(journal.groups)} finished prompts are kept in {journal.folder}: the same "
                                        "command goes on from there, --fresh starts anew") from None
            raise
        if journal is not None:
            journal.discard()


def _telling(advance, journal: Journal | None, total: int):
    """The progress function; says once that prompts of an earlier run are there already (their decodes have no label)."""
    told = False

    def progress(done: int, planned: int, label: str) -> None:
        nonlocal told
        if journal is not None and not label and not told:
            told = True
            print(f"going on: {len(journal.groups)} of {total} prompts were decoded by an earlier run", file=sys.stderr)
        advance(done, planned, label)

    return progress


def _say(result: BenchResult, plain_loop: bool, all_definitions: bool) -> None:
    from decoders.bench import HEADLINE
    from decoders.plain_loop import PlainLoop

    summary = result.summary()
    summary["speedup"] = _with_intervals(summary, HEADLINE)
    print_table(summary[["decoder", "fidelity", "calls_per_token", "alpha", "seconds_per_token", "speedup", "token_mismatches",
                         "repetition_rate"]])
    for row in summary[summary.fidelity != "lossless"].itertuples():
        print(f"{row.decoder}: {row.token_match:.1%} of its tokens are AR's" + (f", {row.reference_match:.1%} those of {row.reference}"
                                                                               if row.reference not in ("AR", row.decoder) else ""))
    if plain_loop:
        middle, low, high = result.speedup("AR", PlainLoop.label)
        print(f"AR is {middle:.2f} [{low:.2f}, {high:.2f}] times as fast as the plain loop over the same modules")
    if all_definitions:
        for name, words in DEFINITIONS.items():
            print(f"\n{name}: {words}")
            print_table(summary[["decoder"]].assign(**{name: _with_intervals(summary, name)}))


def _with_intervals(summary: pd.DataFrame, name: str) -> list[str]:
    return [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for middle, low, high in zip(*(summary[name + end] for end in ("", "_low", "_high")))]
