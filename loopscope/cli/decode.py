"""`loopscope decode` and `loopscope bench`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from loopscope.cli.progress import Stages
from loopscope.cli.study import open_model, print_table, read_texts, save, start_state

if TYPE_CHECKING:
    from decoders import Generation


def run_decode(model: str, prompt: str, name: str, *, max_new_tokens, depth, stop, start, seed, compare, threads, **settings) -> None:
    from decoders.named import decoder

    chosen = decoder(name, **settings)  # a wrong name is said before the model is loaded
    state = start_state(start)
    core = open_model(model, threads)
    options = {"max_new_tokens": max_new_tokens, "depth": depth, "stop": stop, "start_state": state, "seed": seed}
    if compare:  # the first decode pays for set-up, so it must not be one of the two that are compared
        chosen.generate(core, prompt, **(options | {"max_new_tokens": min(max_new_tokens, 8)}))
    result = chosen.generate(core, prompt, **options)
    print(result.text if result.text is not None else " ".join(map(str, result.tokens)))
    sys.stdout.flush()
    print(describe(result), file=sys.stderr)
    if compare:
        plain = decoder("ar").generate(core, prompt, **options)
        same = "the same tokens" if plain.tokens == result.tokens else "DIFFERENT tokens"
        speed = plain.seconds.decode / result.seconds.decode if result.seconds.decode else float("nan")
        print(f"{describe(plain)}\n{result.decoder} gave {same} as AR, {speed:.2f}x as fast", file=sys.stderr)


def describe(g: Generation) -> str:
    later = len(g.tokens) - 1  # prefill commits the first
    per_token = f"{g.calls.recur / later:.2f} block calls per token (AR: {g.depth})" if later else "no decoding after prefill"
    drafts = f", {g.accepted} of {g.proposed} drafts accepted" if g.proposed else ""
    lossless = "lossless" if g.lossless else "not lossless"
    return (f"{g.decoder} ({lossless}): {len(g.tokens)} tokens, {per_token}{drafts}, {g.seconds.prefill:.2f} s prefill, "
            f"{g.seconds.decode:.2f} s decoding")


def run_bench(model: str, names: list[str] | None, *, task, count, texts, out, max_new_tokens, repeats, depth, start, seed,
              threads, plain_loop=False) -> None:
    from decoders.bench import HEADLINE, bench
    from decoders.named import decoder
    from decoders.plain_loop import PlainLoop

    wanted = [*(names or ("wfd", "dtv", "das-wave")), *([PlainLoop.label] if plain_loop else [])]
    chosen = [PlainLoop() if n in ("plain", PlainLoop.label) else decoder(n) for n in dict.fromkeys(wanted)]
    state = start_state(start)
    core = open_model(model, threads)
    label, prompts = read_texts(core, task, count, texts, seed)
    with Stages([1.0]) as stages, stages.stage("decoding"):
        result = bench(core, prompts, chosen, label, max_new_tokens, repeats, seed, depth=depth, start_state=state, progress=stages.advance)
    summary = result.summary()
    summary["speedup"] = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for middle, low, high in
                          zip(*(summary[HEADLINE + end] for end in ("", "_low", "_high")))]
    print(f"{core.source}, {len(prompts)} prompts ({label}), {max_new_tokens} new tokens; speedup: mean over prompts of the "
          "ratio of decode times, with a 95 % interval over prompts")
    print_table(summary[["decoder", "fidelity", "calls_per_token", "alpha", "seconds_per_token", "speedup", "token_mismatches",
                         "repetition_rate"]])
    for row in summary[summary.fidelity != "lossless"].itertuples():
        print(f"{row.decoder}: {row.token_match:.1%} of its tokens are AR's" + (f", {row.reference_match:.1%} those of {row.reference}"
                                                                               if row.reference not in ("AR", row.decoder) else ""))
    if any(isinstance(d, PlainLoop) for d in chosen):
        middle, low, high = result.speedup("AR", PlainLoop.label)
        print(f"AR is {middle:.2f} [{low:.2f}, {high:.2f}] times as fast as the plain loop over the same modules")
    save([result, *([result.acceptance] if len(result.acceptance.frame) else [])], out, model=core.source, prompts=prompts, seed=seed)
