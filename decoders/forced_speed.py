"""Decoders at a given acceptance on a model of any weights: tokens per second, share of the roofline, where the time goes, and what the
cost model said.

    rows = forced_speed(core, context=1024, alphas=(0.8, 0.95), new_tokens=64)      # one dict per decoder and alpha, AR first

Every call is real; which drafts are accepted is decided by coins (decoders/forced.py). The prompt is not read: the cache holds random
keys and values, which cost what others do. For each row: calls counted; the speedup over AR measured, and predicted from the counted
calls and a sweep of single calls at this context (decoders/calibrate.py); bytes read, by count, over time, as a share of what the device
reaches; and how much of a tick passes inside the model's calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from decoders.autoregressive import Autoregressive
from decoders.calibrate import calibrate
from decoders.calls import Steps
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.forced import Forced
from decoders.generation import Generation
from decoders.graphs import runner_for
from decoders.roofline import bandwidth, traffic
from decoders.session import Session
from decoders.static import why_not_static
from decoders.tally import observed
from decoders.wavefront import Wavefront

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

ALPHAS = (0.8, 0.9, 0.95, 1.0)
_CALLS = ("recur", "embed", "read")


def schedules(depth: int) -> list[Decoder]:
    """What is timed beside AR at full depth T: the papers' settings where they fit."""
    das = DASWave(24, 2, bonus=False) if depth >= 16 else DASWave(max(2, depth), 1, bonus=False)
    return [DraftThenVerify(1, 8), Wavefront(1), das]


@torch.inference_mode()
def forced_speed(core: LoopedCore, context: int, alphas: Sequence[float] = ALPHAS, new_tokens: int = 64, repeats: int = 2, seed: int = 0,
                 decoders: Sequence[Decoder] | None = None, reaches: float | None = None,
                 calibrate_seconds: float = 6.0, static: bool | None = None) -> list[dict[str, Any]]:
    """One record per decoder and alpha, AR first; every timing the fastest of `repeats` decodes, orders alternated, after a warm-up.

    context: positions already in the cache. reaches: bytes per second of the device (default: measured here). calibrate_seconds: for
    the sweep of single calls behind such a prefix. static: run turns on the device where a decoder can (decoders/static.py), as graphs
    on CUDA, and time the sweep's calls likewise; default: on CUDA. Time inside calls is not told apart then. new_tokens includes the
    one that a prompt's own pass gives.
    """
    depth = core.config.depth
    reaches = bandwidth(core.device) if reaches is None else reaches
    static = core.device.type == "cuda" if static is None else static
    calibration = calibrate(core, prefix_length=context, repeats=8, seconds=calibrate_seconds, host=False, seed=seed,
                            runner=runner_for(core.device) if static else None)
    asked = [(Autoregressive(), None), *((d, a) for a in alphas for d in (decoders or schedules(depth)))]
    run = [decoder if alpha is None else Forced(decoder, alpha, seed) for decoder, alpha in asked]
    best: dict[int, tuple[Generation, dict[str, float]]] = {}
    for turn in range(repeats + 1):
        for i in range(len(run)):
            at = (i + turn) % len(run)
            got = behind(core, run[at], context, new_tokens if turn else 6, seed, static)
            if turn and (at not in best or got[0].seconds.decode < best[at][0].seconds.decode):
                best[at] = got
    predicted = [calibration.cost(observed(d, _opened(core, d, context, new_tokens, seed)), d.label) for d in run]
    return [{"decoder": decoder.label, "alpha": alpha, "context": context,
             **_record(core, *best[at], best[0][0], context, reaches, predicted[at], predicted[0])}
            for at, (decoder, alpha) in enumerate(asked)]


def _record(core: LoopedCore, g: Generation, inside: dict[str, float], ar: Generation, context: int, reaches: float, predicted: float,
            ar_predicted: float) -> dict[str, Any]:
    """predicted: seconds of the calls that were counted, at the sweep's prices; of AR's likewise."""
    later, depth = len(g.tokens) - 1, core.config.depth
    seconds, plain = g.seconds.decode / later, ar.seconds.decode / (len(ar.tokens) - 1)
    needs = traffic(core, context)
    expected, expected_plain = predicted / later, ar_predicted / (len(ar.tokens) - 1)
    moved = needs.decode(g.calls.recur, g.calls.prelude, depth)
    return {"tokens_per_second": 1 / seconds, "speedup": plain / seconds, "speedup_predicted": expected_plain / expected,
            "calls_per_token": g.calls.recur / later, "accepted": g.accepted, "proposed": g.proposed,
            "seconds_per_token": seconds, "seconds_per_token_predicted": expected,
            "bytes_per_second": moved / g.seconds.decode, "roofline": moved / g.seconds.decode / reaches,
            "roofline_tokens_per_second": reaches / needs.token(depth), "inside": {k: v / g.seconds.decode for k, v in inside.items()},
            "static": not inside,
            "between": 1 - sum(inside.values()) / g.seconds.decode if inside else None}


def behind(core: LoopedCore, decoder: Decoder, context: int, new_tokens: int, seed: int = 0,
           static: bool = False) -> tuple[Generation, dict[str, float]]:
    """One decode behind `context` random positions that are in the cache already, and seconds inside each kind of call; none where the
    decode is static, as far as the decoder can be."""
    session = _opened(core, decoder, context, new_tokens, seed)
    if static and not why_not_static(decoder, session):
        decoder._run(session, static=True)
        return session.result(decoder), {}
    with timeline(core) as spent:
        decoder._run(session)
        found = session.result(decoder)
    return found, {name: sum(took() for took in calls) for name, calls in spent.items()}


def _opened(core: LoopedCore, decoder: Decoder, context: int, new_tokens: int, seed: int) -> Session:
    """A session whose prompt is not read but given."""
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, core.config.vocab_size, (context,), generator=draw).tolist()
    session = decoder._open(core, prompt, new_tokens, seed=seed)
    session.eos = frozenset()
    session.prefill = lambda: _given(session, seed)  # type: ignore[method-assign]
    return session


def _given(session: Session, seed: int) -> Steps:
    """In place of a prefill: random keys and values at every depth, and a first token."""
    cache = session.cache
    draw = torch.Generator(device=cache.device).manual_seed(seed)
    for pair in (*cache.prelude, *cache.core, *cache.coda):
        for buffer in pair:
            buffer[..., : session.prompt_length, :].normal_(generator=draw)
    cache.commit(session.prompt_length)
    session.begin(int(session.prompt[0]))
    return
    yield  # a generator, as prefill is


@contextmanager
def timeline(core: LoopedCore) -> Iterator[dict[str, list[Any]]]:
    """While it lasts, every recurrence, prelude and readout leaves a function that gives its seconds: on CUDA between two events, which
    nobody waits for until it is asked."""
    cuda = core.device.type == "cuda"
    spent: dict[str, list[Any]] = {name: [] for name in _CALLS}

    def watch(name: str):
        call, kept = getattr(core, name), spent[name]

        def on_gpu(*args, **kwargs):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            out = call(*args, **kwargs)
            end.record()
            kept.append(lambda: begin.elapsed_time(end) / 1e3)
            return out

        def on_cpu(*args, **kwargs):
            begin = time.perf_counter()
            out = call(*args, **kwargs)
            took = time.perf_counter() - begin
            kept.append(lambda: took)
            return out

        return on_gpu if cuda else on_cpu

    for name in _CALLS:
        object.__setattr__(core, name, watch(name))
    try:
        yield spent
    finally:
        for name in _CALLS:
            object.__delattr__(core, name)
        if cuda:
            torch.cuda.synchronize(core.device)


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for a reader: tokens per second, share of the roofline, speedup measured and predicted."""
    lines = []
    for r in records:
        what = r["decoder"] if r["alpha"] is None else f"{r['decoder']} at {r['alpha']:g}"
        lines.append(f"{what}: {r['tokens_per_second']:.1f} tokens/s, {r['roofline']:.0%} of the roofline, {r['speedup']:.2f}x "
                     f"(predicted {r['speedup_predicted']:.2f}x), "
                     + ("static" if r["static"] else f"{r['between']:.0%} between calls"))
    return lines
