"""The 2 x 2 x 2 factorial of DAS-Wave: carried states x deep prefix keys x deep prefix values (arXiv 2609.34538, appendix C.4).

    result = factorial(model, prompts, rounds=12, updates=1)
    result.cells()                  one row per cell: A, G, calls per token, speedups
    result.effects()                main effects, two-way and three-way interactions, in the unit of each measure

All cells run on the same prompts in one benchmark, so every effect is a contrast of the same prompts and its interval is paired.
An effect is a difference: of a switch on and off (main), of two such differences (two-way), of two of those (three-way), each
averaged over the switches that it does not name. Without input injection nothing can be carried: then it is the 2 x 2 of the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from decoders.bench import bench
from decoders.das_wave import DASWave
from decoders.repeats import together
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SWITCHES = ("carry", "deep_k", "deep_v")
READS = {(False, False): "aligned", (False, True): "deep_v", (True, False): "deep_k", (True, True): "deep_kv"}  # (deep K, deep V)
# measure -> (its words, its unit)
MEASURES = {"accepted_per_verification": ("A, drafts accepted per verification", "tokens"),
            "committed_per_verification": ("G, tokens committed per verification", "tokens"),
            "calls_per_token": ("recurrence calls per token", "calls"),
            "call_speedup": ("times fewer recurrence calls than AR", "x"),
            "time_speedup": ("times faster than AR, decode seconds", "x")}
_NEARLY = 0.9
NO_CARRY = ("carry is off throughout: {family} does not inject its embedding at every recurrence, so a revised guess could not reach a "
            "carried state")


@dataclass(frozen=True, eq=False)
class FactorialResult(Result):
    """One row per prompt, repeat and cell, with AR's cost on the same prompt and repeat beside it.

    verifications, accepted, committed: counts; committed leaves out what prefill and a last single step commit.
    """

    kind = "factorial"
    columns = ("model", "task", "prompt", "repeat", "decoder", *SWITCHES, "tokens", "verifications", "accepted", "committed",
               "recur_calls", "decode_seconds", "ar_recur_calls", "ar_decode_seconds", "token_mismatches")

    def cells(self, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
        """One row per cell: each measure (MEASURES) with NAME_low and NAME_high, a 95 % bootstrap interval over prompts."""
        return cells(self.frame, resamples, seed)

    @property
    def full(self) -> list[str]:
        """Decoders whose blocks are nearly all right (A at least 90 % of a block's length): there, no switch can show what it brings."""
        longest = min(self.meta["capacity"], self.meta["initial_width"] + self.meta["growth"] * (self.meta["rounds"] - 1))
        total = self.frame.groupby("decoder", sort=False)[["accepted", "verifications"]].sum()
        return [label for label, r in total.iterrows() if r.accepted >= _NEARLY * longest * r.verifications]

    def effects(self, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
        """Columns measure, term, order, effect, low, high, n_prompts; low and high: a 95 % paired bootstrap interval over prompts.

        term: the switches whose effect or interaction it is, joined by " x "; order: how many.
        """
        return effects(self.frame, resamples, seed)


def design(injects: bool) -> list[tuple[bool, bool, bool]]:
    """The cells (carry, deep K, deep V), all off first; without injection those without carry."""
    return [cell for cell in product((False, True), repeat=3) if injects or not cell[0]]


def factorial(model, prompts: Iterable[Any], rounds: int = 12, updates: int = 1, task: str = "", max_new_tokens: int = 64,
              repeats: int = 1, seed: int = 0, *, capacity: int = 32, initial_width: int = 2, growth: int = 1, bonus: bool = False,
              depth: int | None = None, start_state=None, stop: Sequence[str] = (), model_name: str | None = None,
              progress: Callable[[int, int, str], None] | None = None) -> FactorialResult:
    """Run all cells and AR on every prompt. bonus=False is the paper's: a fully right block commits no token more.

    Other options as for `bench`. Raises what `bench` raises.
    """
    core = model.core
    made = {cell: DASWave(rounds, updates, capacity, initial_width, READS[cell[1:]], cell[0], growth, bonus=bonus)
            for cell in design(core.config.injects)}
    result = bench(core, prompts, list(made.values()), task, max_new_tokens, repeats, seed, depth=depth, start_state=start_state,
                   stop=stop, model_name=model_name, progress=progress)
    frame = _beside_ar(result.frame, {d.label: cell for cell, d in made.items()}, rounds)
    reason = "" if core.config.injects else NO_CARRY.format(family=core.family)
    return FactorialResult(frame, {**result.meta, "rounds": rounds, "updates": updates, "capacity": capacity, "growth": growth,
                                   "initial_width": initial_width, "bonus": bonus, "reason": reason})


def _beside_ar(frame: pd.DataFrame, cell_of: dict[str, tuple[bool, bool, bool]], rounds: int) -> pd.DataFrame:
    """The bench rows of the cells, AR's calls and seconds of the same prompt and repeat beside them."""
    keys = ["prompt", "repeat"]
    ar = frame[frame.decoder == "AR"].set_index(keys)[["recur_calls", "decode_seconds"]].add_prefix("ar_")
    out = frame[frame.decoder.isin(cell_of)].join(ar, on=keys).rename(columns={"runs": "verifications"})
    for i, switch in enumerate(SWITCHES):
        out[switch] = [cell_of[label][i] for label in out.decoder]
    # A block makes a prelude call per round and one to verify; what is left over is the single step that ends a text.
    steps = out.prelude_calls - out.verifications * (rounds + 1)
    out["committed"] = (out.tokens - 1).clip(lower=0) - steps
    return out[list(FactorialResult.columns)].reset_index(drop=True)


# ---- from rows to cells and effects ------------------------------------------------------------------------------


def cells(frame: pd.DataFrame, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """`FactorialResult.cells` of a table of one model and task."""
    import pandas as pd

    keys, every, draws = _measured(frame, resamples, seed)
    out = pd.DataFrame(keys, columns=list(SWITCHES))
    out["read"] = [READS[(k, v)] for _, k, v in keys]
    for name in MEASURES:
        low, high = _interval(draws[name]) if draws is not None else (float("nan"), float("nan"))
        out[name], out[f"{name}_low"], out[f"{name}_high"] = every[name], low, high
    return out


def effects(frame: pd.DataFrame, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """`FactorialResult.effects` of a table of one model and task."""
    import numpy as np
    import pandas as pd

    keys, every, draws = _measured(frame, resamples, seed)
    varied = [i for i in range(3) if len({key[i] for key in keys}) == 2]
    if len(keys) != 2 ** len(varied):
        raise SettingError(f"a factorial needs every cell of its {len(varied)} switches, {2 ** len(varied)} of them; found {len(keys)}")
    n = frame.prompt.nunique()
    rows = []
    for name in MEASURES:
        for order in range(1, len(varied) + 1):
            for term in combinations(varied, order):
                signs = np.array([np.prod([1.0 if key[i] else -1.0 for i in term]) for key in keys])
                weights = signs / 2 ** (len(varied) - order)  # averaged over the switches that the term does not name
                low, high = _interval(draws[name] @ weights) if draws is not None else (float("nan"), float("nan"))
                words = " x ".join(SWITCHES[i] for i in term)
                rows.append((name, words, order, float(every[name] @ weights), float(low), float(high), n))
    return pd.DataFrame(rows, columns=["measure", "term", "order", "effect", "low", "high", "n_prompts"])


def _measured(frame: pd.DataFrame, resamples: int, seed: int):
    """(cells, measure -> [cells], measure -> [resamples, cells] or None for one prompt)."""
    import numpy as np

    # Repeats of one prompt are one observation of it (decoders/repeats.py).
    counted = ["tokens", "verifications", "accepted", "committed", "recur_calls", "decode_seconds", "ar_recur_calls", "ar_decode_seconds"]
    typed = frame.astype({s: bool for s in SWITCHES})
    per_prompt = together(typed, [*SWITCHES, "prompt"], counted)
    keys = sorted(set(per_prompt.index.droplevel("prompt")))
    prompts = sorted(frame.prompt.unique())
    if len(per_prompt) != len(keys) * len(prompts):
        raise SettingError("a factorial needs every prompt in every cell: effects are differences on the same prompts")
    order = [(*key, p) for key in keys for p in prompts]
    values = {c: per_prompt[c].reindex(order).to_numpy(float).reshape(len(keys), len(prompts)) for c in counted}

    def measures(pick: np.ndarray) -> dict[str, np.ndarray]:
        """pick [samples, prompts] -> each measure [samples, cells]."""
        got = {c: v[:, pick].transpose(1, 0, 2) for c, v in values.items()}  # [samples, cells, prompts]
        with np.errstate(divide="ignore", invalid="ignore"):
            verifications, later = got["verifications"].sum(-1), (got["tokens"] - 1).sum(-1)
            return {"accepted_per_verification": got["accepted"].sum(-1) / verifications,
                    "committed_per_verification": got["committed"].sum(-1) / verifications,
                    "calls_per_token": got["recur_calls"].sum(-1) / later,
                    "call_speedup": got["ar_recur_calls"].sum(-1) / got["recur_calls"].sum(-1),
                    "time_speedup": _mean_of_ratios(got["ar_decode_seconds"], got["decode_seconds"], got["recur_calls"])}

    every = {name: value[0] for name, value in measures(np.arange(len(prompts))[None]).items()}
    if len(prompts) < 2 or not resamples:
        return keys, every, None
    draw = np.random.default_rng(seed)
    return keys, every, measures(draw.integers(len(prompts), size=(resamples, len(prompts))))


def _mean_of_ratios(above: np.ndarray, below: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """Mean over prompts of above / below; a text that ended at its first token has nothing to time."""
    import numpy as np

    timed = calls > 0
    ratio = np.where(timed, above / np.where(timed, below, 1), 0)
    return ratio.sum(-1) / np.where(timed.any(-1), timed.sum(-1), np.nan)


def _interval(samples: np.ndarray):
    import numpy as np

    return np.nanpercentile(samples, (2.5, 97.5), axis=0)
