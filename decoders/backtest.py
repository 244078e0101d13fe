"""Back-test: published accepted drafts per verification, predicted from the same paper's agreement tables alone.

    frame = backtest(das)        # das: figures/published/das.json, read; `python -m figures.published` prints the frame

Nothing is fitted: `decoders.predict` gets agreements (DAS, arXiv 2609.34538, GSM8K, 756 positions) and a schedule. Which group
a cell is in says what the formula claims there; docs/algorithms.md, section 4, gives the errors to expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.calibrate import Calibration
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.predict import predict

if TYPE_CHECKING:
    import pandas as pd

AGREEMENT_TASK = "gsm8k"  # the task on which the agreement tables were measured
GROUPS = {
    "sequential aligned": "drafts one after the other, prefix read at the draft's depth",
    "sequential deep": "drafts one after the other, prefix read at full depth",
    "carried, Huginn": "DAS-Wave on Huginn with one or two recurrences a round",
    "carried, others": "DAS-Wave on Huginn with more recurrences a round, and on the Raven models",
    "carried, narrow": "DAS-Wave whose block is full before its rounds end",
    "other task": "a task on which no agreement was published: GSM8K's stands in",
    "outside": "carried states with another read than deep K/V, of which the law says nothing",
}
_POLICIES = {"00": "aligned", "01": "deep_v", "10": "deep_k", "11": "deep_kv"}  # (deep K, deep V), as the factorial's cells are named


@dataclass(frozen=True)
class Cell:
    """One published number: A of a decoder on a model and task."""

    table: str
    model: str
    task: str
    decoder: Decoder
    published: float


def backtest(das: Mapping[str, Any]) -> pd.DataFrame:
    """One row per published A: group, table, model, task, decoder, published, predicted, error, percent.

    error: predicted / published - 1; percent: the same in whole per cent, as docs/algorithms.md states it (the published
    values themselves have two to four digits). Cells for which no formula exists (drafts from other sources than the model's own
    depths, rounds without carry) are not in it.
    """
    import pandas as pd

    depth, agreements = 32, das["agreement_by_policy"]
    # Accepted drafts do not depend on what calls cost: every call takes a second.
    unit = Calibration(pd.DataFrame([("", part, "chain", 1, 0, 1.0, 0) for part in ("recur", "prelude", "readout")],
                                    columns=list(Calibration.columns)))
    rows = []
    for cell in cells(das):
        known = {policy: dict(zip(agreements["depths"], values)) for policy, values in agreements[cell.model].items()}
        found = predict(cell.decoder, lambda policy, d, lag: known[policy].get(d), unit, depth, beyond=True)
        error = found.accepted / cell.published - 1
        rows.append((_group(cell), cell.table, cell.model, cell.task, cell.decoder.label, cell.published, found.accepted, error,
                     round(100 * error)))
    columns = ["group", "table", "model", "task", "decoder", "published", "predicted", "error", "percent"]
    return pd.DataFrame(rows, columns=columns).sort_values("group", key=lambda g: g.map(list(GROUPS).index), kind="stable",
                                                           ignore_index=True)


def cells(das: Mapping[str, Any]) -> Iterator[Cell]:
    """Every published A that has a formula, from all tables of the paper."""
    main = das["speedup_and_A"]
    for model in (m for m in main if m not in ("tasks", "cell")):
        for name in ("draft_then_verify", "mature_spec", "das_wave"):
            for task, (_, accepted) in zip(main["tasks"], main[model][name]):
                decoder = _wave(das, model) if name == "das_wave" else _sequential(das, model, name)
                yield Cell("speedup_and_A", model, task, decoder, accepted)
    for model, settings in das["fixed_setting_gsm8k"].items():
        for name, (_, accepted) in settings.items():
            how, policy = name.split()
            if how == "sequential":  # both reads at Mature-Spec's schedule
                yield Cell("fixed_setting_gsm8k", model, AGREEMENT_TASK, _sequential(das, model, "mature_spec", policy), accepted)
            elif how == "carry":
                yield Cell("fixed_setting_gsm8k", model, AGREEMENT_TASK, _wave(das, model, policy), accepted)
    for name, sweep in das["budget_sweep_gsm8k"].items():
        model, varied = name.split()[:2]  # "huginn k at gamma 32", "huginn gamma at k=2"; what stays fixed is the default
        for value, (_, accepted) in sweep.items():
            settings = {"updates": int(value)} if varied == "k" else {"capacity": int(value)}
            yield Cell("budget_sweep_gsm8k", model, AGREEMENT_TASK, _wave(das, model, **settings), accepted)
    tasks = {"gsm": "gsm8k", "math": "math500"}
    for column, name in enumerate(das["factorial_G"]["columns"]):
        model, task = name.split()
        for switches, values in das["factorial_G"].items():
            if switches[:1] == "1":  # carried; G = A + 1, since the paper commits no bonus token and blocks are never right throughout
                decoder = _wave(das, model, _POLICIES[switches[1:]])
                yield Cell("factorial_G", model, tasks[task], decoder, values[column] - 1)


def _family(model: str) -> str:
    return model.split("_")[0]


def _sequential(das, model: str, name: str, policy: str | None = None) -> DraftThenVerify:
    config = das["configs"][name][_family(model)]
    return DraftThenVerify(config["d"], config["block"], policy or ("aligned" if name == "draft_then_verify" else "deep_kv"))


def _wave(das, model: str, policy: str = "deep_kv", updates: int | None = None, capacity: int | None = None) -> DASWave:
    config = das["configs"]["das_wave"]
    return DASWave(config["J"], updates or config["k"][_family(model)], capacity or config["gamma"], config["W_init"], policy,
                   growth=config["growth"], bonus=False)


def _group(cell: Cell) -> str:
    decoder = cell.decoder
    if isinstance(decoder, DASWave) and decoder.read != "deep_kv":
        return "outside"
    if cell.task != AGREEMENT_TASK:
        return "other task"
    if isinstance(decoder, DraftThenVerify):
        return "sequential aligned" if decoder.read == "aligned" else "sequential deep"
    if decoder.capacity < decoder.initial_width + decoder.rounds - 1:
        return "carried, narrow"
    return "carried, Huginn" if cell.model == "huginn" and decoder.updates <= 2 else "carried, others"
