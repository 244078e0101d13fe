"""`loopscope factorial`: the eight cells of carry x deep K x deep V, and what each switch and their interplay bring."""

from __future__ import annotations

from loopscope.cli.progress import Stages
from loopscope.cli.study import open_model, print_table, read_texts, recorded, save, start_state


def run_factorial(model: str, *, task, count, texts, out, rounds, updates, capacity, initial_width, growth, bonus, max_new_tokens, repeats,
                  depth, start, seed, threads) -> None:
    from decoders.factorial import MEASURES, factorial

    state = start_state(start)
    core = open_model(model, threads)
    label, prompts = read_texts(core, task, count, texts, seed)
    with Stages([1.0]) as stages, stages.stage("decoding"):
        result = factorial(core, prompts, rounds, updates, label, max_new_tokens, repeats, seed, capacity=capacity,
                           initial_width=initial_width, growth=growth, bonus=bonus, depth=depth, start_state=state,
                           progress=stages.advance)
    print(f"{core.source}, {len(prompts)} prompts ({label}), DAS-Wave J={rounds} k={updates}, {max_new_tokens} new tokens; [95 % bootstrap "
          "intervals over prompts]")
    if result.meta["reason"]:
        print(result.meta["reason"])
    cells = result.cells()
    shown = cells[["carry", "deep_k", "deep_v"]].replace({True: "on", False: "off"})
    names = {"accepted_per_verification": "A", "committed_per_verification": "G", "calls_per_token": "calls_per_token",
             "call_speedup": "call_speedup", "time_speedup": "speedup"}
    for name, short in names.items():
        shown[short] = [_between(*row) for row in zip(*(cells[name + end] for end in ("", "_low", "_high")))]
    print_table(shown)
    effects = result.effects()
    for name in ("committed_per_verification", "time_speedup"):
        part = effects[effects.measure == name]
        print(f"\nEffects on {MEASURES[name][0]}:")
        print_table(part.assign(effect=[_between(*row, sign="+") for row in zip(part.effect, part.low, part.high)])[["term", "effect"]])
    if result.full:
        print(f"\n{len(result.full)} of {len(cells)} cells accept nearly every guess of a block: effects are smaller than they would be "
              "with room for more; try fewer --rounds with a larger --initial-width")
    wrong = int(result.frame.token_mismatches.sum())
    print(f"\ntokens equal to AR's in every cell: {'yes' if not wrong else f'no, {wrong} differ'}")
    save([result], out, model=core.source, prompts=recorded(texts, prompts), seed=seed)


def _between(middle: float, low: float, high: float, sign: str = "") -> str:
    return f"{middle:{sign}.2f}" + (f" [{low:{sign}.2f}, {high:{sign}.2f}]" if low == low else "")
