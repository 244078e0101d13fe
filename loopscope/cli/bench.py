"""`loopscope bench`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from loopscope.cli.folder import refuse_existing
from loopscope.cli.progress import Stages
from loopscope.cli.shared import AlreadyThere, Part
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
# What stands on the screen, and what it means.
COLUMNS = {"calls_per_token": "passes through the looped block per token; plain decoding (AR) makes T",
           "alpha": "share of the drafts that were compared with the model's own token and accepted, 0 to 1; NaN: no drafts",
           "seconds_per_token": "without prefill",
           "speedup": "mean over prompts of the ratio of decode times to AR's, with a 95 % percentile bootstrap interval over prompts",
           "token_mismatches": "tokens that are not AR's; 0 for every lossless decoder",
           "repetition_rate": "share of 4-grams that occurred before in the same text; text that repeats itself is easy to draft"}


def run_bench(model: str, names: list[str] | None, *, task, count, texts, out, max_new_tokens, repeats, depth, start, seed, threads,
              plain_loop=False, fresh=False, all_definitions=False, device=None, dtype=None) -> None:
    from decoders.bench import bench, with_references
    from decoders.named import decoder
    from decoders.plain_loop import PlainLoop

    wanted = [*(names or ("wfd", "dtv", "das-wave")), *([PlainLoop.label] if plain_loop else [])]
    chosen = [PlainLoop() if n in ("plain", PlainLoop.label) else decoder(n) for n in dict.fromkeys(wanted)]
    state = start_state(start)
    part = Part.of_this_process(out)
    if fresh and (out is None or part is not None):
        raise SettingError("--fresh throws away what an interrupted run left, which only a run with --out leaves" if out is None else
                           f"--fresh is for a run in one process; remove {part.folder} to begin this one anew")
    if out is not None:
        refuse_existing(out)
    with _journal(out, part, fresh) as journal:
        try:
            if out is not None:
                refuse_existing(out)  # a run that held the journal until now has just finished
            core = open_model(model, threads, device, dtype)
            label, prompts = read_texts(core, task, count, texts, seed)
            mine = len(prompts if part is None else part.share.of(len(prompts))) * repeats
            with Stages([1.0]) as stages, stages.stage(f"decoding: {_passes(mine, repeats)}, {len(with_references(chosen))} decoders"):
                result = bench(core, prompts, chosen, label, max_new_tokens, repeats, seed, depth=depth, start_state=state, journal=journal,
                               only=None if part is None else part.share, progress=_telling(stages, journal, mine, repeats))
            every = [t for t in (result, result.acceptance, result.by_depth) if t is not None]
            tables = [t for t in every if len(t.frame)]
            facts = {"model": core.source, "prompts": recorded(texts, prompts), "seed": seed, "settings": dict(result.meta)}
            if part is not None:
                part.save(every, journal, len(prompts), **facts)
            else:
                print(f"{core.source}, {len(prompts)} prompts ({label}), {max_new_tokens} new tokens")
                say(result, plain_loop=any(isinstance(d, PlainLoop) for d in chosen), all_definitions=all_definitions)
                save(tables, out, **facts)
        except AlreadyThere:
            part.say_done()
        except KeyboardInterrupt:
            if journal is not None and journal.groups:
                raise KeyboardInterrupt(f"interrupted; {_passes(len(journal.groups), repeats)} are kept in {journal.folder}: the same "
                                        "command goes on from there" + ("" if part is not None else ", --fresh starts anew")) from None
            raise
        if journal is not None:
            journal.discard()


def _journal(out: str | None, part: Part | None, fresh: bool):
    from decoders.bench_journal import Journal

    if part is not None:
        return Journal(part.journal, agree=part.agree)
    return Journal(f"{out.rstrip(os.sep)}.partial", fresh) if out is not None else nullcontext()


def _passes(groups: int, repeats: int) -> str:
    """'8 prompts' or, where each is decoded more than once, '16 passes over a prompt'."""
    s = "s" * (groups != 1), "es" * (groups != 1)
    return f"{groups} prompt{s[0]}" if repeats == 1 else f"{groups} pass{s[1]} over a prompt"


def _telling(stages: Stages, journal: Journal | None, total: int, repeats: int):
    """The progress function; says once that prompts of an earlier run are there already (their decodes have no label)."""
    told, shown = False, 0

    def progress(done: int, planned: int, label: str) -> None:
        nonlocal told, shown
        if journal is not None and not label and not told:
            told = True
            print(f"going on: {len(journal.groups)} of {_passes(total, repeats)} were decoded by an earlier run", file=sys.stderr)
        stages.advance(done, planned, label)
        passes = done * total // planned
        if not stages.terminal and passes * 10 // total > shown * 10 // total:
            print(f"{passes} of {_passes(total, repeats)}", file=sys.stderr, flush=True)  # a long run's log says how far it is
            shown = passes

    return progress


def say(result: BenchResult, plain_loop: bool = False, all_definitions: bool = False) -> None:
    """The table of a benchmark, with what its columns mean."""
    from decoders.bench import HEADLINE
    from decoders.plain_loop import PlainLoop

    summary = result.summary()
    summary["speedup"] = _with_intervals(summary, HEADLINE)
    print_table(summary[["decoder", "fidelity", *COLUMNS]])
    print("\n".join(f"  {name:18}{words}" for name, words in COLUMNS.items()))
    for row in summary[summary.fidelity != "lossless"].itertuples():
        print(f"{row.decoder}: {row.token_match:.1%} of its tokens are AR's" + (f", {row.reference_match:.1%} those of {row.reference}"
                                                                               if row.reference not in ("AR", row.decoder) else ""))
    if plain_loop:
        middle, low, high = result.speedup("AR", PlainLoop.label)
        print(f"AR is {_between(middle, low, high)} times as fast as the plain loop over the same modules")
    if all_definitions:
        for name, words in DEFINITIONS.items():
            print(f"\n{name}: {words}")
            print_table(summary[["decoder"]].assign(**{name: _with_intervals(summary, name)}))


def _with_intervals(summary: pd.DataFrame, name: str) -> list[str]:
    return [_between(*row) for row in zip(*(summary[name + end] for end in ("", "_low", "_high")))]


def _between(middle: float, low: float, high: float) -> str:
    """A number and its interval; one prompt has none."""
    return f"{middle:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low == low else "")
