"""`loopscope decode`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from loopscope.cli.guard import INTERRUPTED
from loopscope.cli.study import open_model, start_state
from loopscope.errors import SettingError

if TYPE_CHECKING:
    from decoders import Decoder, Generation


def run_decode(model: str, prompts: list[str], name: str, *, max_new_tokens, depth, stop, start, seed, compare, stream, sampling, threads,
               device=None, dtype=None, **settings) -> None:
    from decoders.named import decoder

    chosen = decoder(name, **settings)  # a wrong name or combination is said before the model is loaded
    drawn = _sampling(**sampling)
    if stream and len(prompts) > 1:
        raise SettingError("--stream prints one text as it is committed, and several prompts are decoded together; give one prompt")
    if compare and drawn is not None and drawn.method == "rejection":
        raise SettingError("--compare compares tokens, and by rejection every decoder draws its own; use --sampler shared-noise")
    state = start_state(start)
    core = open_model(model, threads, device, dtype)
    options = {"max_new_tokens": max_new_tokens, "depth": depth, "stop": stop, "start_state": state, "seed": seed, "sampling": drawn}
    if compare:  # the first decode pays for set-up, so it must not be one of the two that are compared
        chosen.generate(core, prompts[0], **(options | {"max_new_tokens": min(max_new_tokens, 8)}))
    if stream:
        results, seconds = [_stream(chosen, core, prompts[0], options)], 0.0
    elif len(prompts) == 1:
        results, seconds = [chosen.generate(core, prompts[0], **options)], 0.0
    else:
        batch = chosen.generate_batch(core, prompts, **options)
        results, seconds = batch.generations, batch.seconds
    for i, result in enumerate(results, 1):
        if len(prompts) > 1:
            print(f"--- {i} of {len(prompts)}")
        if not stream:
            print(result.text if result.text is not None else " ".join(map(str, result.tokens)))
        sys.stdout.flush()
        print(describe(result), file=sys.stderr)
    if len(prompts) > 1:
        print(f"together: {batch.calls.recur} block calls, {batch.rows} rows, prefill included; {seconds:.2f} s. A prompt's seconds "
              "are those of the calls it shared", file=sys.stderr)
    if compare:
        _compare(chosen, core, prompts, options, results, seconds)


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None, sampler: str | None):
    """None (greedy) or a Sampling. Raises SettingError for filters of a greedy decode."""
    from decoders import Sampling

    filters = {"--top-k": top_k, "--top-p": top_p, "--min-p": min_p, "--sampler": sampler}
    given = [name for name, value in filters.items() if value is not None]
    if not temperature:
        if given:
            greedy = "decoding is greedy until --temperature is given" if temperature is None else "--temperature 0 is greedy"
            raise SettingError(f"{', '.join(given)}: {greedy}, so nothing is drawn; add a temperature, such as --temperature 0.8")
        return None
    return Sampling(temperature, top_k, top_p, min_p, (sampler or "shared-noise").replace("-", "_"))


def _stream(chosen: Decoder, core, prompt: str, options: dict) -> Generation:
    """Print pieces as they are committed. Ctrl-C ends the text; what it cost until then is said all the same."""
    import typer

    stream = chosen.stream(core, prompt, **options)
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not stream.tokens:
            raise
        print(flush=True)
        print(f"interrupted\n{describe(stream.result())}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(flush=True)
    return stream.result()


def _compare(chosen: Decoder, core, prompts: list[str], options: dict, results: list[Generation], seconds: float) -> None:
    from decoders import Autoregressive
    from decoders.bench import reference_of

    if len(prompts) == 1:
        plain = [Autoregressive().generate(core, prompts[0], **options)]
        print(describe(plain[0]), file=sys.stderr)
        ours, theirs = results[0].seconds.decode, plain[0].seconds.decode
    else:
        batch = Autoregressive().generate_batch(core, prompts, **options)
        plain, ours, theirs = batch.generations, seconds, batch.seconds
    wrong = [i for i, (a, b) in enumerate(zip(results, plain), 1) if a.tokens != b.tokens]
    same = "DIFFERENT tokens" if wrong else "the same tokens"
    if wrong and len(prompts) > 1:
        same += f" for prompt {', '.join(map(str, wrong))}"
    note = "" if results[0].lossless else f" (plain decoding without approximation; {results[0].fidelity}, so they may differ)"
    speed = theirs / ours if ours else float("nan")
    print(f"{results[0].decoder} gave {same} as AR{note}, {speed:.2f}x as fast", file=sys.stderr)
    reference = reference_of(chosen)
    if not results[0].lossless and reference.label not in ("AR", results[0].decoder):
        print(f"loopscope bench also compares it with {reference.label}, plain decoding with the same approximation", file=sys.stderr)


def describe(g: Generation) -> str:
    later = len(g.tokens) - 1  # prefill commits the first
    per_token = f"{g.calls.recur / later:.2f} block calls per token (AR: {g.depth})" if later else "no decoding after prefill"
    drafts = f", {g.accepted} of {g.proposed} drafts accepted" if g.proposed else ""
    fidelity = "" if g.decoder.endswith(f"({g.fidelity})") else f" ({g.fidelity})"
    return (f"{g.decoder}{fidelity}: {len(g.tokens)} tokens, {per_token}{drafts}, {g.seconds.prefill:.2f} s prefill, "
            f"{g.seconds.decode:.2f} s decoding")
