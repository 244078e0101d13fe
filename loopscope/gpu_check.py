"""Every decoder on a device: its tokens against plain decoding, and what calls cost there. Prints JSON.

    python -m loopscope.gpu_check --device cuda [--toy] [--out FILE]

Runs from a bare source tree with torch, transformers, numpy and pandas: no transformer-lens, typer or pyarrow.
What is checked (docs/algorithms.md, 2.7): L0, float64: tokens equal plain decoding's on the device and on the CPU; L1,
float32: tokens equal plain decoding's on the device; L2, bfloat16: a first difference counts as explained if the two best
tokens there are nearer to each other than twice the largest logit deviation between two row counts; L3: where plain decoding is
made in calls of the wave's shape, tokens are equal in every dtype. The attention kernel is held
to its twin. Then published sizes with random weights, built on the device: tokens per second and share of the roofline of every decoder
at forced acceptance (decoders/forced_speed.py), beside what the cost model predicts. --toy does all of it on small models.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import LoopscopeError, OutOfMemoryError, SettingError

if TYPE_CHECKING:
    import torch

    from decoders.decoder import Decoder
    from loopscope.models.looped import LoopedCore

_TOKENS, _TOY_TOKENS = 48, 16
_CONTEXTS, _TOY_CONTEXTS = (1024, 2048, 8192), (24,)
_SPEED_TOKENS, _TOY_SPEED_TOKENS = 65, 9


def run(device: str = "cuda", toy: bool = False, out: str | None = None, seed: int = 0) -> int:
    """Check, write the JSON to `out` or stdout, a summary to stderr; 0 if every check holds, 1 otherwise.

    Raises SettingError for a device that is not there.
    """
    result = check(device, toy=toy, seed=seed, say=lambda line: print(line, file=sys.stderr, flush=True))
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        from loopscope.records import write_text

        write_text(text, Path(out))
    bad = [f"{r['model']} {r['dtype']} {r['decoder']}" for r in result["decodes"] if not r["ok"]]
    bad += [f"kernel {r['dtype']} d_head {r['d_head']} rows {r['rows']}" for r in result["kernel"]["checks"] if not r["ok"]]
    print(f"{len(result['decodes'])} decodes and {len(result['kernel']['checks'])} kernel calls on {result['device']}: "
          + ("all hold" if not bad else f"FAILED: {', '.join(bad)}"), file=sys.stderr)
    return 1 if bad else 0


def check(device: str = "cuda", *, toy: bool = False, seed: int = 0, say=lambda line: None) -> dict[str, Any]:
    """The facts of the machine, and records: kernel (per shape and dtype), decodes (per model, dtype, decoder and prompt length), timings
    (of calls, per model and dtype), and speed (per published size, context, decoder and acceptance)."""
    import torch

    where = _device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)  # small products on two threads wait for each other, ten times as long where others run too
    kernel = _kernel(where, seed, toy)
    decodes, timings = [], []
    for name, build, dtypes in _models(toy, seed):
        for dtype in dtypes:
            begin = time.perf_counter()
            facts = {"model": name, "dtype": str(dtype).removeprefix("torch.")}
            decodes += [{**facts, **record} for record in _decodes(build, dtype, where, seed, _TOY_TOKENS if toy else _TOKENS)]
            if not toy:
                timings += [{**facts, **record} for record in _timings(build(dtype, where))]
            say(f"{name} {dtype}: {time.perf_counter() - begin:.0f} s")
    hardware = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    return {"device": str(where), "hardware": hardware, "torch": torch.__version__, "python": platform.python_version(), "seed": seed,
            "toy": toy, "kernel": kernel, "decodes": decodes, "timings": timings, "speed": _speed(where, seed, toy, say)}


def _kernel(device: torch.device, seed: int, toy: bool) -> dict[str, Any]:
    """Kernel against twin; without triton nothing is checked, and that is said."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return {"checks": [], "skipped": "triton is not installed"}
    from loopscope.kernels.check import kernel_checks

    return {"checks": kernel_checks(device, seed, toy or device.type != "cuda"), "skipped": ""}


def _speed(device: torch.device, seed: int, toy: bool, say) -> dict[str, Any]:
    """Every published size at every context and acceptance; where memory does not suffice, that is said instead."""
    import torch

    from decoders.forced_speed import ALPHAS, forced_speed, summary
    from decoders.roofline import bandwidth
    from loopscope.full_size import SIZES, full_size

    reaches, records, skipped = bandwidth(device), [], []
    dtype = torch.float32 if toy else torch.bfloat16
    for name in SIZES if toy or device.type == "cuda" else ():
        contexts = _TOY_CONTEXTS if toy else _CONTEXTS
        core = full_size(name, device, dtype, context=2 * contexts[-1], seed=seed, toy=toy)
        for context in contexts:
            try:
                found = forced_speed(core, context, ALPHAS[::3] if toy else ALPHAS, _TOY_SPEED_TOKENS if toy else _SPEED_TOKENS,
                                     repeats=1 if toy else 2, seed=seed, reaches=reaches, calibrate_seconds=0.2 if toy else 5.0,
                                     static=True)
            except (OutOfMemoryError, torch.OutOfMemoryError) as error:
                skipped.append({"model": core.source, "context": context, "why": str(error)})
                continue
            records += [{"model": core.source, "dtype": str(dtype).removeprefix("torch."), **r} for r in found]
            for line in summary(found):
                say(f"{core.source}, {context} positions: {line}")
        del core
    return {"bytes_per_second": reaches, "records": records, "skipped": skipped}


def _device(name: str) -> torch.device:
    from loopscope.models.loading import usable_device

    try:
        return usable_device(name)
    except SettingError as error:
        raise SettingError(f"{error} (try --device cpu)") from error


def _models(toy: bool, seed: int) -> Iterator[tuple[str, Any, tuple[torch.dtype, ...]]]:
    """(name, build(dtype, device), dtypes)."""
    import torch

    from loopscope.models.loading import load_core, shipped_models
    from loopscope.random_models import make_random_core

    every = (torch.float64, torch.float32, torch.bfloat16)
    for family in ("huginn", "ouro"):
        yield (f"random-{family}", lambda dtype, device, f=family: make_random_core(  # at this gain drafts are right half the time
            f, seed=seed, gain=0.2, dtype=torch.float64, depth=6, context=160).to(device=device, dtype=dtype), every)
    if toy:
        return
    for name in shipped_models():
        yield name, lambda dtype, device, n=name: load_core(n, device, dtype), every
    # Large enough that a call's time is the device's, not Python's: 16 heads of 128, a core of 4 layers.
    yield ("random-huginn-large", lambda dtype, device: make_random_core(
        "huginn", seed=seed, gain=0.1, dtype=torch.float32, d_model=2048, n_heads=16, d_mlp=5632, depth=16, context=1024,
        vocab_size=8192).to(device=device, dtype=dtype), (torch.bfloat16,))


def _decoders(core: LoopedCore) -> list[Decoder]:
    from decoders import DASWave, DraftThenVerify, Wavefront

    depth = core.config.depth
    return [*(Wavefront(d) for d in (1, 2, depth - 1) if d < depth),
            *(DraftThenVerify(1, 4, read=r) for r in ("aligned", "deep_v", "deep_k", "deep_kv")), DraftThenVerify(2, 3),
            DASWave(4, 1), DASWave(3, 2, read="aligned")]


def _decodes(build, dtype: torch.dtype, device: torch.device, seed: int, tokens: int) -> Iterator[dict[str, Any]]:
    import torch

    from decoders import Autoregressive

    core = build(dtype, device)
    twin = build(dtype, torch.device("cpu")) if dtype == torch.float64 and device.type != "cpu" else None
    draw = torch.Generator().manual_seed(seed)
    for length in (1, 40):
        prompt = torch.randint(0, core.config.vocab_size, (length,), generator=draw).tolist()
        plain = Autoregressive().generate(core, prompt, max_new_tokens=tokens)
        yield _record(core, plain, plain.tokens, prompt, ok=True)
        if twin is not None:
            cpu = Autoregressive().generate(twin, prompt, max_new_tokens=tokens)
            yield _record(twin, cpu, plain.tokens, prompt, label="AR on the CPU")
        for decoder in _decoders(core):
            if core.device.type == "cuda":
                decoder.generate(core, prompt, max_new_tokens=4)  # the first call of a shape pays for its set-up
            yield _record(core, decoder.generate(core, prompt, max_new_tokens=tokens), plain.tokens, prompt)
        yield from _static(core, plain, prompt, tokens)


def _static(core: LoopedCore, plain, prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """Whole turns on the device, as graphs on CUDA: their tokens are the eager ones' (decoders/static.py)."""
    from decoders import Autoregressive, DASWave, Wavefront
    from decoders.static import release, why_not_static

    for decoder in (Autoregressive(), Wavefront(1), DASWave(4, 1)):
        if why_not_static(decoder, decoder._open(core, prompt, tokens)):
            continue
        for again in range(2 if core.device.type == "cuda" else 1):  # captured, then replayed
            g = decoder.generate(core, prompt, max_new_tokens=tokens, static=True)
            yield _record(core, g, plain.tokens, prompt, label=f"{g.decoder}, static{', replayed' if again else ''}")
    release(core)
    if core.config.depth > 1:
        yield from _padded(core, prompt, tokens)


def _padded(core: LoopedCore, prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """L3: a wave whose calls all have one shape, against plain decoding in calls of that shape: equal tokens whatever the dtype."""
    from decoders import Autoregressive, Wavefront
    from decoders.static_wave import Filled, padded_autoregressive

    wave = Wavefront(1)
    session = wave._open(core, prompt, tokens)
    wave._run(session, static=True, runner=Filled(len(prompt) + tokens - 1))
    expected = padded_autoregressive(Autoregressive()._open(core, prompt, tokens), 1)
    record = _record(core, session.result(wave), expected, prompt, label="WFD d=1, L3")
    yield record | {"ok": not record["token_mismatches"]}  # no difference is explained here


def _record(core: LoopedCore, g, expected: list[int], prompt: list[int], *, label: str = "", ok: bool | None = None) -> dict[str, Any]:
    import torch

    from decoders.bench import mismatches

    wrong = mismatches(g.tokens, expected)
    record = {"decoder": label or g.decoder, "prompt_length": len(prompt), "tokens": len(g.tokens), "token_mismatches": wrong,
              "recur_calls": g.calls.recur, "proposed": g.proposed, "accepted": g.accepted, "prefill_seconds": g.seconds.prefill,
              "decode_seconds": g.seconds.decode}
    explained = wrong == 0
    if wrong and core.dtype in (torch.bfloat16, torch.float16):
        first = next(i for i, (a, b) in enumerate(zip([*g.tokens, -1], [*expected, -1])) if a != b)
        margin, deviation = _margin(core, prompt + expected[:first])
        explained = margin < 2 * deviation
        record |= {"first_difference": first, "margin": margin, "deviation": deviation}
    return record | {"ok": explained if ok is None else ok}


def _margin(core: LoopedCore, tokens: list[int]) -> tuple[float, float]:
    """(gap between the two best logits behind `tokens`, largest deviation of any logit between one pass and token by token)."""
    import torch

    ids = torch.tensor([tokens], device=core.device)
    with torch.inference_mode():
        whole = core(ids)[0]
        cache = core.make_cache(len(tokens))
        steps = torch.cat([core(ids[:, i : i + 1], cache=cache)[0] for i in range(len(tokens))])
    best = steps[-1].float().topk(2).values
    return float(best[0] - best[1]), float((whole.float() - steps.float()).abs().max())


def _timings(core: LoopedCore) -> list[dict[str, Any]]:
    from decoders.calibrate import calibrate

    table = calibrate(core, prefix_length=64, repeats=20, host=False).frame
    median = table.groupby(["part", "shape", "rows"])["seconds"].median()
    return [{"part": part, "shape": shape, "rows": int(rows), "seconds": float(s)} for (part, shape, rows), s in median.items()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loopscope.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="random tiny models only")
    parser.add_argument("--out", help="write the JSON here instead of to stdout")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        return run(given.device, given.toy, given.out, given.seed)
    except LoopscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
