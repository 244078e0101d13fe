"""Which probes `loopscope probe` runs, and what it prints of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopscope.errors import SettingError, closest

if TYPE_CHECKING:
    import pandas as pd

    from loopscope.models.looped import LoopedCore
    from loopscope.records import Result

DEFAULT = ("convergence", "depth_lens")  # also what several processes can share and loopscope merge puts together
_TOP = {"target": "top", "against": "mean"}
_OPTIONS: dict[str, dict[str, Any]] = {"attribution": _TOP, "head_attribution": _TOP}
_SUMS = ("linear_probe", "patching")  # on built-in sums, whatever the prompts are
NAMES = (*DEFAULT, "second_candidate", "agreement_runs", "block_lens", "trajectories", "layer_fixed_points", "head_stability",
         "depth_similarity", "token_grid", "attribution", "head_attribution", *_SUMS)
_SUM_PROMPTS = 5  # labelled sums for each prompt that was asked for: a probe needs more texts than a mean
_LARGEST = 5


def chosen(only: str | None) -> tuple[str, ...]:
    """The probes of --only, in the order of this page: names with commas between them, or "all". Raises SettingError."""
    if only is None:
        return DEFAULT
    wanted = [name.strip().replace("-", "_") for name in only.split(",")]
    for name in wanted:
        if name not in (*NAMES, "all"):
            near = closest(name, NAMES, 1)
            meant = f" (did you mean {near}?)" if near else ""
            raise SettingError(f"no probe is called {name!r}{meant}; known: {', '.join(NAMES)}, or all")
    return tuple(name for name in NAMES if name in wanted or "all" in wanted)


def run(names: tuple[str, ...], core: LoopedCore, prompts: list, count: int, options: dict[str, Any]) -> list[Result]:
    """The results of the named probes on prompts; those on sums make their own texts, `count` of them."""
    probes = import_module("probes")
    results = []
    for name in names:
        if name == "linear_probe":
            examples = probes.sum_digits(core, max(10, _SUM_PROMPTS * count), options["seed"])
            results.append(probes.linear_probe(core, examples, property="last digit of the sum", **{**options, "task": "sums"}))
        elif name == "patching":
            interventions = import_module("interventions")
            pairs = interventions.sum_pairs(max(1, count // 4), options["seed"])
            results.append(interventions.activation_patching(core, pairs, **{**options, "task": "sums"}))
        else:
            results.append(getattr(probes, name)(core, prompts, **_OPTIONS.get(name, {}), **options))
    return results


def by_depth(results: list[Result]) -> pd.DataFrame | None:
    """One row per depth, the columns of every probe that has some; None where none has."""
    import pandas as pd

    parts = [_BY_DEPTH[r.kind](r.frame) for r in results if r.kind in _BY_DEPTH]
    return pd.concat(parts, axis=1).sort_index().loc[lambda t: t.index >= 1] if parts else None


def largest(results: list[Result]) -> list[tuple[str, pd.DataFrame]]:
    """(heading, the rows with the largest means) of the tables whose cells are places rather than depths."""
    found = []
    for result in results:
        if result.kind in _PLACES:
            heading, keys, value = _PLACES[result.kind]
            means = result.frame.dropna(subset=[value]).groupby(list(keys))[value].mean()
            found.append((heading, means.loc[means.abs().nlargest(_LARGEST).index].reset_index()))
    return found


def _pivot(frame: pd.DataFrame, columns: str, value: str, order: tuple[str, ...]) -> pd.DataFrame:
    table = frame.pivot_table(index="depth", columns=columns, values=value)
    return table[[c for c in order if c in table]]


def _convergence(frame: pd.DataFrame) -> pd.DataFrame:
    return _pivot(frame[(frame.null == "none") & (frame.metric == "cosine")], "channel", "value", ("q", "k", "v", "attn_out", "state"))


def _means(columns: dict[str, str], keep: Callable[[pd.DataFrame], Any], frame: pd.DataFrame) -> pd.DataFrame:
    return frame[keep(frame)].groupby("depth")[list(columns)].mean().rename(columns=columns)


def _lengths(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean length of the runs between two disagreements, those that the text's end cut left out."""
    whole = frame[~frame.cut]
    means = (whole.length * whole.runs).groupby(whole.depth).sum() / whole.runs.groupby(whole.depth).sum()
    return means.rename("run_length").to_frame()


def _all(frame: pd.DataFrame) -> Any:
    return slice(None)


_BY_DEPTH: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "convergence": _convergence,
    "depth_lens": partial(_means, {"agreement": "agreement", "kl_nats": "kl_nats", "loss_nats": "loss_nats"}, _all),
    "second_candidate": partial(_means, {"first": "top_right", "second": "runner_up_right"}, _all),
    "agreement_runs": _lengths,
    "block_lens": partial(_means, {"rank": "rank_layer_0"}, lambda f: (f.lens == "coda") & (f.layer == 0) & (f.cycle == 0)),
    "trajectories": partial(_means, {"step": "step", "fixed_point": "fixed_point"}, _all),
    "layer_fixed_points": partial(_means, {"apart": "apart"}, lambda f: f.layer >= 0),
    "head_stability": partial(_means, {"js_nats": "js_nats"}, _all),
    "depth_similarity": partial(_means, {"cka": "cka_to_T"}, lambda f: f.other_depth == f.other_depth.max()),
    "linear_probe": lambda f: _pivot(f, "labels", "value", ("true", "control", "baseline")),
}
_PLACES = {
    "attribution": ("components that add or take most of the top token's logit (less the mean)", ("part", "depth", "layer", "branch"),
                    "value_logits"),
    "head_attribution": ("heads that add or take most of it", ("part", "depth", "layer", "head"), "value_logits"),
    "patching": ("clean activations that bring back most of the answer (-1: all)", ("site", "depth", "layer", "position", "head"),
                 "restored"),
}
