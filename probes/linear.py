"""Linear probes: what can be read off the state by a linear map at each depth, on prompts that the map was not fitted on.

Notable: the control. A probe with many weights can learn any function of the token it stands on, whether the model computes
it or not. So each probe has a twin with random labels, a fixed one for each type of token: only what the probe does better
than its twin (its selectivity) says something about the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm

from loopscope.errors import PromptError, SettingError
from loopscope.records import Result
from probes.inputs import check_finite, core_of, name_of, read_prompts, start_label
from probes.nulls import generator
from probes.recording import Recording

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from loopscope.models.looped import LoopedCore

KINDS = {"classify": "accuracy", "regress": "absolute_error"}
TRUE, CONTROL, BASELINE = "true", "control", "baseline"


class Labelled(NamedTuple):
    """A prompt (text or token ids), positions in it, and what a probe should find there.

    types: what the control's random label is a fixed function of, one for each position; by default the token there.
    """

    prompt: Any
    positions: Sequence[int]
    labels: Sequence[Any]
    types: Sequence[Any] | None = None


@dataclass(frozen=True, eq=False)
class LinearProbeResult(Result):
    """One row per prompt, depth and kind of labels; averaged over the prompt's positions, by a probe that was fitted without it."""

    kind = "linear_probe"
    columns = ("model", "task", "prompt", "start", "property", "labels", "depth", "metric", "value", "n_positions")

    def selectivity(self) -> pd.DataFrame:
        """By prompt and depth, how much better the probe is than its control: positive is better, in the metric's unit."""
        keys = ["model", "task", "prompt", "start", "property", "metric", "depth"]
        wide = self.frame.pivot_table(index=keys, columns="labels", values="value").reset_index()
        if CONTROL not in wide:
            raise SettingError("selectivity is the difference to the control, which was left out: run linear_probe with control=True")
        sign = wide["metric"].map({"accuracy": 1.0, "absolute_error": -1.0})
        return wide[keys].assign(selectivity=sign * (wide[TRUE] - wide[CONTROL]))


def linear_probe(model: Any, examples: Iterable[Labelled], *, property: str = "label", kind: str = "classify", control: bool = True,
                 folds: int = 5, penalty: float = 10.0, task: str = "", model_name: str | None = None, depth: int | None = None,
                 start_state: str | torch.Tensor | None = None, seed: int = 0, progress: bool = True) -> LinearProbeResult:
    """Fit a linear map from the state to a label at each depth r = 1..T, and score it on prompts that it has not seen.

    model: LoopedCore or LoopedModel. examples: prompts with labelled positions; all labels together must be of at least two
    values. kind: "classify" (logistic regression on texts or whole numbers, scored by accuracy) or "regress" (ridge regression
    on finite numbers, scored by the absolute error). States are standardised on the training prompts; penalty: weight of the
    squared length of the map. folds: prompts are dealt into so many parts, each scored by a map that was fitted on the
    others, so that no prompt is ever scored by a map that saw it.

    labels in the table: "true"; "control" (random labels with the frequencies of the true ones, the same label for the
    same type everywhere: needs more than one type; a type that training prompts lack can only be guessed); "baseline"
    (the most frequent label of the training prompts, or their mean).

    Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Source: Alain and Bengio 2017 (Understanding
    intermediate layers using linear classifier probes); control and selectivity: Hewitt and Liang 2019 (Designing and
    Interpreting Probes with Control Tasks).
    """
    import numpy as np
    import pandas as pd

    core = core_of(model)
    depth = core.check_depth(depth)
    if kind not in KINDS:
        raise SettingError(f"kind {kind!r} is unknown; use 'classify' or 'regress'")
    examples = list(examples)
    tokens = read_prompts(core, [e.prompt for e in examples], 1, "a state")
    _check(examples, [len(ids) for ids in tokens], kind, folds, penalty)
    name, start = name_of(core, model_name), start_label(core, start_state)
    states = _states(core, tokens, examples, depth, start_state, seed, tqdm(tokens, desc=f"linear probe {name}", unit="prompt",
                                                                           disable=not progress))
    labels = np.array([label for e in examples for label in e.labels], dtype=float if kind == "regress" else None)
    groups = np.repeat(np.arange(len(examples)), [len(e.positions) for e in examples])
    types = [t for e, ids in zip(examples, tokens) for t in (e.types if e.types is not None else ids[list(e.positions)].tolist())]
    tasks = {TRUE: labels}
    if control:
        tasks[CONTROL] = control_labels(labels, types, seed)
    rows: list[tuple] = []
    for r, values in enumerate(tqdm(states, desc=f"linear probe {name}", unit="depth", disable=not progress), start=1):
        scores = {what: _held_out(values, y, groups, kind, folds, penalty, seed) for what, y in tasks.items()}
        scores[BASELINE] = _held_out(values, labels, groups, kind, folds, None, seed)
        rows += [(name, task, index, start, property, what, r, KINDS[kind], float(score[groups == index].mean()),
                  int((groups == index).sum())) for what, score in scores.items() for index in range(len(examples))]
    meta = {"depth": depth, "seed": seed, "prompts": len(examples), "folds": folds, "penalty": penalty, "kind": kind}
    return LinearProbeResult(pd.DataFrame(rows, columns=list(LinearProbeResult.columns)), meta)


@torch.inference_mode()
def _states(core: LoopedCore, tokens: list, examples: list[Labelled], depth: int, start_state: Any, seed: int, bar: Iterable) -> np.ndarray:
    """[depth, examples, d_model] in float64."""
    found = []
    for ids, example in zip(bar, examples):
        recorded = Recording(core, ids, depth=depth, start_state=start_state, seed=seed)
        check_finite(recorded.logits, "a full-depth pass")
        found.append(recorded.states()[:, list(example.positions)].double().cpu())
    return torch.cat(found, dim=1).numpy()


def control_labels(labels: np.ndarray, types: Sequence[Any], seed: int) -> np.ndarray:
    """A label for every type, drawn from the labels as often as they occur. Raises SettingError for a single type."""
    if len(set(types)) < 2:
        raise SettingError("all labelled positions are of one type (by default: hold the same token), so the control's labels would all be "
                           "the same and say nothing; give types=[...] in Labelled, what a label could be a function of, or control=False")
    draws = {t: int(torch.randint(len(labels), (), generator=generator(seed, "control", t))) for t in set(types)}
    return labels[[draws[t] for t in types]]


def _held_out(x: np.ndarray, y: np.ndarray, groups: np.ndarray, kind: str, folds: int, penalty: float | None, seed: int) -> np.ndarray:
    """The score [n] of each example by a map that was fitted without its prompt; penalty None: by the baseline."""
    import numpy as np
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    out = np.empty(len(y))
    with threadpool_limits(limits=1):  # products this small are slower on several threads
        for train, test in GroupKFold(folds, shuffle=True, random_state=seed).split(x, y, groups):
            if len(set(y[train])) == 1 or penalty is None:  # nothing to tell apart
                estimator = DummyClassifier() if kind == "classify" else DummyRegressor()
            else:
                estimator = LogisticRegression(C=1 / penalty, max_iter=2000) if kind == "classify" else Ridge(penalty)
            said = make_pipeline(StandardScaler(), estimator).fit(x[train], y[train]).predict(x[test])
            out[test] = said == y[test] if kind == "classify" else np.abs(said - y[test])
    return out


def _check(examples: list[Labelled], lengths: list[int], kind: str, folds: int, penalty: float) -> None:
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise SettingError(f"folds must be a whole number of at least 2, got {folds!r}")
    if len(examples) < folds:
        raise PromptError(f"{folds} parts of held-out prompts need at least {folds} prompts, got {len(examples)}; give more, or "
                          "fewer folds")
    if isinstance(penalty, bool) or not isinstance(penalty, Real) or not 0 < penalty < math.inf or not math.isfinite(1 / penalty):
        raise SettingError(f"penalty must be above 0 and finite, got {penalty!r}")
    for index, (example, length) in enumerate(zip(examples, lengths)):
        if not len(example.positions):
            raise PromptError(f"prompt {index} has no labelled position; leave it out")
        if example.labels is None:
            raise SettingError(f"prompt {index} has no labels; give one for each of its positions, or leave it out")
        for what in ("labels", "types"):
            given = getattr(example, what)
            if given is not None and len(given) != len(example.positions):
                raise SettingError(f"prompt {index} has {len(example.positions)} positions and {len(given)} {what}; give one for each")
        foreign = next((t for t in (() if example.types is None else example.types) if not _hashable(t)), None)
        if foreign is not None:
            raise SettingError(f"prompt {index} has the type {foreign!r}, which cannot be looked up; give texts, numbers or tuples of them")
        wrong = next((p for p in example.positions if isinstance(p, bool) or not isinstance(p, int) or not 0 <= p < length), None)
        if wrong is not None:
            raise PromptError(f"prompt {index} has {length} tokens: position {wrong!r} is not one of them (0 to {length - 1})")
    _check_labels(examples, kind)
    labels = [label for e in examples for label in e.labels]
    if len(set(labels)) < 2:
        raise SettingError(f"every label is {labels[0]!r}: there is nothing to tell apart")


def _check_labels(examples: list[Labelled], kind: str) -> None:
    """Finite numbers for a regression; for classes only texts or only whole numbers, as the estimators tell apart no others."""
    texts = isinstance(next(iter(examples[0].labels)), str)
    for index, example in enumerate(examples):
        for label in example.labels:
            if kind == "regress":
                if not isinstance(label, Real):
                    raise SettingError(f"regression needs numbers as labels, prompt {index} has {label!r}; use kind='classify' for names")
                if not _finite(label):
                    raise SettingError(f"regression needs finite labels, prompt {index} has {label!r}; leave that position out")
            elif isinstance(label, str) != texts or not (isinstance(label, str) or _whole(label)):
                raise SettingError(f"classes must be all texts or all whole numbers, prompt {index} has {label!r}; write all labels as "
                                   "texts, or use kind='regress' for fractions")


def _finite(label: Any) -> bool:
    try:
        return math.isfinite(label)
    except OverflowError:  # a whole number beyond any float
        return False


def _whole(label: Any) -> bool:
    import numpy as np

    if not isinstance(label, (Real, np.bool_)) or not _finite(label):
        return False
    return label == int(label) and abs(int(label)) < 2**63


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
