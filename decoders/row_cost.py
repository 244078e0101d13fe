"""What a row more costs on this CPU, with plain and with packed weights, and what a wave makes of it. Prints JSON.

    python -m decoders.row_cost [--threads 2] [--repeats 9] [--decodes 5] [--prefix 32] [--toy] [--out FILE]

The model is a random Huginn of 103M parameters (1 prelude, 12 core and 1 coda layers of width 768), built from a seed. Measured are one
recurrence on n rows, as lanes of a wave and as a chain, and whole decodes by AR and by a wavefront at T = 16, d = 1, with forced
acceptance (decoders/forced.py: real calls, accept decisions replaced). The two forms of the weights take turns call by call, decoders take
turns decode by decode, and a ratio is that of neighbours in time, so that a machine with other work slows both; medians, with 95 %
intervals from order statistics.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decoders.autoregressive import Autoregressive
from decoders.decoder import Decoder
from decoders.forced import Forced
from decoders.wavefront import Wavefront
from loopscope.random_models import make_random_core
from loopscope.records import manifest, write_text
from loopscope.rows import Chain, Rows, Wave

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

ROWS = (1, 2, 4, 8, 16)
SIZE: dict[str, Any] = {"d_model": 768, "n_heads": 8, "d_mlp": 2048, "vocab_size": 4096, "n_prelude": 1, "n_core": 12, "n_coda": 1,
                        "depth": 16, "context": 1024}
TOY = SIZE | {"d_model": 512, "n_heads": 4, "d_mlp": 512, "vocab_size": 520, "n_core": 1, "context": 128}


def measure(*, toy: bool = False, repeats: int = 9, decodes: int = 5, prefix: int = 32, alpha: float = 0.95, seed: int = 0,
            dtype: torch.dtype = torch.float32, seconds: float = math.inf,
            say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The facts of the machine and what was measured, as plain data. repeats: of each call; decodes: of each decoder.

    prefix: positions before the rows, and prompt of the wave. seconds: after so many of decodes no further turn begins.
    """
    core = make_random_core("huginn", seed=seed, gain=0.2, dtype=dtype, **(TOY if toy else SIZE))
    plain = copy.deepcopy(core)
    plain.packs = False
    forms = {"plain": plain, "packed": core}
    calls = _calls(forms, prefix, repeats)
    say(_calls_lines(calls))
    new_tokens = 20 if toy else 96
    return {**manifest(date=datetime.now(UTC).isoformat(timespec="seconds")), "seed": seed, "dtype": str(dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in plain.parameters()), "config": TOY if toy else SIZE, "prefix": prefix,
            "calls": calls, "profile": {name: _profile(one, prefix) for name, one in forms.items()},
            "decodes": _decodes(forms, prefix, new_tokens, decodes, alpha, seed, seconds, say)}


def _rows(shape: str, n: int, prefix: int, depth: int) -> Rows:
    return Chain(prefix, n, depth) if shape == "chain" or n == 1 else Wave(prefix, tuple(range(depth, depth - n, -1)))


class _Stage:
    """A cache behind `prefix` positions, and states of as many rows as are asked for."""

    def __init__(self, core: LoopedCore, prefix: int) -> None:
        self.core, self.prefix, self.depth = core, prefix, core.config.depth
        self.cache = core.make_cache(prefix + max(ROWS))
        core(torch.arange(prefix)[None] % core.config.vocab_size, cache=self.cache)
        self.x = core.embed(torch.arange(max(ROWS))[None], Chain(prefix, max(ROWS)), self.cache)
        self.state = core.start(self.x, Chain(prefix, max(ROWS)))

    def seconds(self, shape: str, n: int) -> float:
        rows, state, x = _rows(shape, n, self.prefix, self.depth), self.state[:, :n], self.x[:, :n]
        begin = time.perf_counter()
        self.core.recur(state, x, rows, self.cache)
        return time.perf_counter() - begin


@torch.inference_mode()
def _calls(forms: dict[str, LoopedCore], prefix: int, repeats: int) -> list[dict[str, Any]]:
    """One record per form, shape and number of rows; milliseconds of one recurrence, and how often one row's it takes."""
    stages = {name: _Stage(core, prefix) for name, core in forms.items()}
    cells = [(shape, n) for n in ROWS for shape in ("wave", "chain")]
    times: dict[tuple, list[float]] = {(name, *cell): [] for name in forms for cell in cells}
    for turn in range(repeats + 1):  # the first pays for set-up
        for cell in cells if turn % 2 else cells[::-1]:
            for name in stages:
                seconds = stages[name].seconds(*cell)
                if turn:
                    times[name, *cell].append(seconds)
    out = []
    for name in forms:
        for shape, n in cells:
            own, one = times[name, shape, n], times[name, shape, 1]
            out.append({"weights": name, "shape": shape, "rows": n, "ms": _of([t * 1e3 for t in own]), "best_ms": min(own) * 1e3,
                        "ratio": _of([a / b for a, b in zip(own, one)])})
    return out


def _decodes(forms: dict[str, LoopedCore], prefix: int, new_tokens: int, repeats: int, alpha: float, seed: int,
             seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds per token of AR and of the wave, and their ratio within each turn.

    AR makes an eighth of the tokens, about the same mean position: each takes as many calls, and costs the same but for its prefix.
    """
    few = max(2, new_tokens // 8)
    behind = prefix + (new_tokens - few) // 2
    decoders: dict[str, tuple[Decoder, int, int]] = {
        "AR": (Forced(Autoregressive(), alpha, seed), behind, few), "WFD": (Forced(Wavefront(1), alpha, seed), prefix, new_tokens)}
    times: dict[tuple[str, str], list[float]] = {(name, d): [] for name in forms for d in decoders}
    facts: dict[str, Any] = {}
    order = list(times)
    begin = time.perf_counter()
    for turn in range(repeats):
        if turn and time.perf_counter() - begin > seconds:
            break
        for name, d in order if turn % 2 else order[::-1]:
            decoder, length, n = decoders[d]
            g = decoder.generate(forms[name], [i % forms[name].config.vocab_size for i in range(length)], max_new_tokens=n, seed=seed)
            times[name, d].append(g.seconds.decode / (len(g.tokens) - 1) * 1e3)
            say(f"  turn {turn + 1}: {name} {d} {times[name, d][-1]:.1f} ms/token")
            facts[d] = {"label": g.decoder, "tokens": len(g.tokens), "prompt_length": length, "recur_calls": g.calls.recur,
                        "rows": g.rows, "mean_rows": g.rows / g.calls.recur, "alpha": None if math.isnan(g.alpha) else g.alpha}
    per_token = {d: f["recur_calls"] / (f["tokens"] - 1) for d, f in facts.items()}
    return {"forced_alpha": alpha, "facts": facts, "ratio_of_calls": per_token["AR"] / per_token["WFD"],
            "ms_per_token": {name: {d: _of(times[name, d]) for d in decoders} for name in forms},
            "speedup_of_the_wave": {name: _of([a / b for a, b in zip(times[name, "AR"], times[name, "WFD"])]) for name in forms},
            "speedup_by_packing": {d: _of([a / b for a, b in zip(times["plain", d], times["packed", d])]) for d in decoders}}


_GROUPS = {"products": ("mm", "linear", "matmul", "addmm"), "attention": ("scaled_dot_product", "flash_attention")}


@torch.inference_mode()
def _profile(core: LoopedCore, prefix: int) -> dict[str, dict[str, float]]:
    """Milliseconds by what a recurrence is made of, on 1 row and on 16 lanes: where the time of a row more goes."""
    from torch.profiler import ProfilerActivity, profile

    stage, out = _Stage(core, prefix), {}
    for n in (1, max(ROWS)):
        stage.seconds("wave", n)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            stage.seconds("wave", n)
        spent = dict.fromkeys((*_GROUPS, "rest"), 0.0)
        for event in seen.key_averages():
            group = next((g for g, names in _GROUPS.items() if any(name in event.key for name in names)), "rest")
            spent[group] += event.self_cpu_time_total / 1e3
        out[f"{n} row{'s' * (n > 1)}"] = spent
    return out


def _of(values: Sequence[float]) -> dict[str, float]:
    """Median, and an interval that holds the true one with 95 %: the order statistics of a binomial."""
    ordered, n = sorted(values), len(values)
    skip, tail = 0, 0.0
    while (tail := tail + math.comb(n, skip) * 0.5**n) <= 0.025:
        skip += 1
    skip = max(0, skip - 1)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return {"median": middle, "low": ordered[skip], "high": ordered[n - 1 - skip], "n": n}


def _calls_lines(calls: list[dict[str, Any]]) -> str:
    lines = ["ms of one recurrence on n rows (times that on one)"]
    for shape in ("wave", "chain"):
        for name in ("plain", "packed"):
            cells = [c for c in calls if c["weights"] == name and c["shape"] == shape]
            lines.append(f"  {shape:5} {name:6} " + "  ".join(
                f"n={c['rows']}: {c['ms']['median']:.1f} ({c['ratio']['median']:.2f})" for c in cells))
    return "\n".join(lines)


def _decodes_lines(decodes: dict[str, Any]) -> str:
    lines = [f"forced acceptance {decodes['forced_alpha']:g}: AR makes {decodes['ratio_of_calls']:.2f}x the calls of the wave"]
    for name, row in decodes["speedup_of_the_wave"].items():
        ms = decodes["ms_per_token"][name]
        lines.append(f"  {name}: AR {ms['AR']['median']:.0f}, WFD {ms['WFD']['median']:.0f} ms/token, {row['median']:.2f}x "
                     f"[{row['low']:.2f}, {row['high']:.2f}], n={row['n']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decoders.row_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="of each call")
    parser.add_argument("--decodes", type=int, default=5, help="of each decoder")
    parser.add_argument("--prefix", type=int, default=32)
    parser.add_argument("--alpha", type=float, default=0.95)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further turn of decodes after so many")
    parser.add_argument("--toy", action="store_true", help="a model of 3M parameters")
    parser.add_argument("--out", help="write the JSON here instead of to stdout")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    result = measure(toy=given.toy, repeats=given.repeats, decodes=given.decodes, prefix=given.prefix, alpha=given.alpha,
                     dtype=getattr(torch, given.dtype), seconds=given.seconds, say=lambda line: print(line, file=sys.stderr, flush=True))
    text = json.dumps(result, indent=1) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        write_text(text, Path(given.out))
    print(_decodes_lines(result["decodes"]), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
