"""The plan: every decoder, read policy and schedule ranked by predicted speed, from what the probes found and what calls cost here.

    plan = decoders.plan(findings, calibrate(model))
    print(plan.evidence)
    plan.best.generate(model, prompt)

With a replay of some text (decoders/replay.py) the calls, rows and accepts of every decoder that reads aligned are exact there, and
priced call by call; so are those whose drafts are their own (decoders/carried.py), once they have been drafted along the text. The others
are predicted from agreements, which are averages: their drafts are taken to fail independently of each other. Which of them are worth
drafting is decided by that estimate, best first; where anything was replayed, what is picked was. The benchmark says how far off the plan
was; the report shows both side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from decoders.agreements import Agreements
from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.evidence import evidence
from decoders.loopspec import LoopSpec
from decoders.named import decoder as by_label
from decoders.predict import Prediction, predict, schedules, why_not
from decoders.priced import MEASURES, Played, intervals
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration
    from decoders.findings import Findings
    from decoders.replay_counts import Outcome
    from probes.replay import ReplayResult

LABEL = "plan"
_SHOWN = 8  # rows of a printed plan
_NEAR = 1.25  # drafted along the text if the estimate is no slower than this many times the best that was replayed
_REFINING = 0.25  # seconds of drafting along the texts, per second of decoding them autoregressively, both as calibrated


class Drafting(Protocol):
    """What a plan asks about decoders whose drafts are their own: decoders.carried.Refinements, or decoders.findings.Findings."""

    def outcome(self, index: int, decoder: Decoder) -> Outcome | None: ...
    def tried(self, index: int, decoder: Decoder) -> Outcome | None: ...


@dataclass(frozen=True, eq=False)
class Plan(Result):
    """Predicted (and, after `beside`, measured) cost per committed token of every schedule, fastest first.

    low and high: 95 % interval of time_speedup; NAME_low and NAME_high: of calls (per token), accepted (per run) and per_call (seconds).
    exact_calls: the calls were replayed exactly. host_per_call: of seconds_per_call, what passes between calls.
    """

    kind = "plan"
    columns = ("model", "task", "decoder", "basis", "calls_per_token", "seconds_per_token", "call_speedup", "time_speedup", "low", "high")

    @property
    def best(self) -> Decoder:
        """The schedule with the highest predicted speed, ready to generate."""
        return by_label(self.meta["best"])

    @property
    def rivals(self) -> list[Decoder]:
        """The best schedule of every other kind of decoder, fastest first; AR last."""
        return [by_label(label) for label in self.meta["rivals"]]

    @property
    def evidence(self) -> str:
        """One sentence: why the winner wins."""
        return self.meta["evidence"]

    @property
    def left_out(self) -> dict[str, str]:
        """Decoders that were to be compared and of which no number could be given: label -> why."""
        return self.meta["left_out"]

    def __repr__(self) -> str:
        return f"Plan of {self.meta['model'] or 'a model'}: {self.meta['best']}, picked from {len(self.frame)} schedules"

    def __str__(self) -> str:
        """The evidence, then the fastest schedules, a line each: calls per token, speedup over AR with its 95 % interval, and its basis."""
        width = max((len(label) for label in self.frame["decoder"].head(_SHOWN)), default=7)
        lines = [self.evidence, "", f"{'decoder':{width}}  calls per token  speedup over AR [95 %]  basis"]
        for row in self.frame.head(_SHOWN).to_dict("records"):
            interval = "" if row["low"] != row["low"] else f" [{row['low']:.2f}, {row['high']:.2f}]"
            basis = row["basis"] if row["basis"] != "predicted" else "exact" if row.get("exact_calls") is True else "estimated"
            lines.append(f"{row['decoder']:{width}}  {row['calls_per_token']:15.2f}  {row['time_speedup']:.2f}x{interval:16}  {basis}")
        rest = len(self.frame) - _SHOWN
        return "\n".join([*lines, *([f"and {rest} more: plan.frame"] if rest > 0 else [])])

    def shortlist(self, per_kind: int = 3, labels: Sequence[str] = ()) -> Plan:
        """This plan with the best few schedules of every kind of decoder only, and those named: what a figure can show."""
        kinds = self.frame["decoder"].map(lambda label: type(by_label(label)).__name__)
        rank_in_kind = self.frame.groupby([kinds, self.frame["basis"]]).cumcount()
        return Plan(self.frame[(rank_in_kind < per_kind) | self.frame["decoder"].isin(labels)].reset_index(drop=True), self.meta)

    def beside(self, bench: BenchResult) -> Plan:
        """This plan with the benchmark's measurements as rows of their own (basis "measured")."""
        import pandas as pd

        from decoders.bench import HEADLINE

        summary = bench.summary()
        rows = [(self.meta["model"], self.meta["task"], r.decoder, "measured", r.calls_per_token, r.seconds_per_token,
                 r.call_speedup, *(getattr(r, HEADLINE + end) for end in ("", "_low", "_high")), r.accepted_per_run, r.seconds_per_call)
                for r in summary.itertuples()]
        measured = pd.DataFrame(rows, columns=[*Plan.columns, "accepted_per_run", "seconds_per_call"])
        return Plan(pd.concat([self.frame, measured], ignore_index=True), self.meta)


def plan(findings: Findings | Mapping[str, Any], calibration: Calibration, *, decoders: Sequence[Decoder] | None = None,
         task: str | None = None, start: str | None = None, seed: int = 0) -> Plan:
    """Rank every decoder, read policy and schedule; `plan.best` is ready to generate, `plan.evidence` says why it wins.

    findings: a Findings, or the probes' tables by name ("depth_lens", "prefix_channels", and if at hand "convergence" and "replay").
    calibration: what calls cost on this machine. decoders: what to compare; default: what the findings say they were collected for, else
    AR and a few settings of every decoder that the model can run; of these, those far behind are not replayed. task, start: which rows
    of the tables.

    Raises SettingError where the tables have no rows, what is given is something else, or findings and calibration are of models that
    differ in T or in injection.
    """
    tables = getattr(findings, "tables", findings)
    if not isinstance(tables, Mapping):
        raise SettingError(f"a plan is made of findings, got {type(findings).__name__}: first Findings.collect(model, prompts), then "
                           "plan(findings, calibrate(model))")
    if not hasattr(calibration, "prices"):
        raise SettingError(f"a plan needs a calibration, got {type(calibration).__name__}: give plan(findings, calibrate(model))")
    replay = tables.get("replay")
    _check_same_model(findings, tables, calibration)
    drafting: Any = findings if hasattr(findings, "outcome") else None
    noted = list(getattr(findings, "decoders", ())) if decoders is None else []
    known = [d for d in noted if findings.knows(d)]  # type: ignore[union-attr]
    return rank(tables, calibration, replay=replay if hasattr(replay, "prompts") else None, refinements=drafting, task=task, start=start,
                decoders=decoders or noted or None, seed=seed, screen=decoders is None, certain=known)


def rank(findings: Mapping[str, Any] | Agreements, calibration: Calibration, *, replay: ReplayResult | None = None,
         refinements: Drafting | None = None, depth: int | None = None, injects: bool | None = None, task: str | None = None,
         start: str | None = None, decoders: Sequence[Decoder] | None = None, seed: int = 0, screen: bool = False,
         certain: Sequence[Decoder] = ()) -> Plan:
    """Rank schedules by predicted seconds per committed token.

    replay: text at every depth (decoders.replay.replay); decoders it covers are predicted from it, prompt by prompt.
    refinements: drafts along the same texts (decoders.carried.Refinements), which do the same for DAS-Wave and deep reads, and decode
    with a LoopSpec whose cap binds. screen: make them only for schedules whose estimate is near the best, and not for longer than about
    a quarter of what decoding the texts takes; default: for all. certain: those of `decoders` that are drafted whatever their estimate.

    findings: the tables "depth_lens" and "prefix_channels" (results or frames; the second may be missing), of which
    `task` and `start` choose rows, and "convergence" if the evidence is to name it. calibration: what calls cost on this machine. depth
    and injects: the model's T and whether it injects its embedding; default: as the calibration recorded them. decoders: what to compare;
    default: AR and a few settings of every decoder. Intervals are 95 %, by bootstrap over prompts and over the rounds of the sweep. A
    decoder of which neither a replay nor a formula says anything has no row; `left_out` says why. Raises SettingError where the findings
    have no rows.
    """
    import pandas as pd

    facts = calibration.meta
    if depth is None and "depth" not in facts:
        raise SettingError("the calibration does not say of which T it is, as a table of several models does not: give one that "
                           "calibrate() made or that it saved")
    depth = int(facts["depth"]) if depth is None else depth
    injects = bool(facts.get("injects", True)) if injects is None else injects
    found = findings if isinstance(findings, Agreements) else Agreements(findings, task=task, start=start)
    trees = calibration.has("recur", "tree")
    compared = {d.label: d for d in (decoders or schedules(depth, trees))}
    compared.setdefault("AR", Autoregressive())
    books = _Books(replay, refinements, calibration)
    reasons: dict[str, str] = {}
    predicted: dict[str, Prediction] = {}
    for label, d in compared.items():
        if isinstance(d, LoopSpec) and d.second_depth is not None and not trees:
            reasons[label] = "calls on branches have no price in this timing sweep"
            continue
        p = books.replayed(d) if not _drafts_itself(d) else None
        p = p or predict(d, found.agreement, calibration, depth, injects)
        if p is not None:
            predicted[label] = p
        elif not _drafts_itself(d):
            reasons[label] = why_not(d, injects) or "its agreements were not measured"
    own = [d for d in compared.values() if _drafts_itself(d) or books.doubtful(d)]
    wanted = {d.label for d in (certain if screen else own)}
    for d in _most_rounds_first([d for d in own if d.label in wanted]):
        p = books.drafted(d)
        if p is not None:
            predicted[d.label] = p
    if screen:
        _draft_the_best([d for d in own if d.label not in wanted], predicted, books)
    reasons |= {d.label: why_not(d, injects) or "its agreements were not measured" for d in own if d.label not in predicted}

    played = books.played
    order = sorted(predicted, key=lambda label: predicted[label].seconds_per_token)
    ar = predicted["AR"]
    model = calibration.frame["model"].iloc[0] if len(calibration.frame) else ""
    bounds = intervals([compared[label] for label in order], found, calibration, depth, injects, played, seed)
    rows = [(model, task or "", label, "predicted", p.calls_per_token, p.seconds_per_token, ar.calls_per_token / p.calls_per_token,
             ar.seconds_per_token / p.seconds_per_token, *bounds[label]["speedup"], p.accepted, p.seconds_per_call,
             label in played and played[label].exact, p.host_per_token / p.calls_per_token,
             *(x for name in MEASURES[:-1] for x in bounds[label][name]))
            for label in order for p in [predicted[label]]]
    extra = [f"{name}_{end}" for name in MEASURES[:-1] for end in ("low", "high")]
    frame = pd.DataFrame(rows, columns=[*Plan.columns, "accepted_per_run", "seconds_per_call", "exact_calls", "host_per_call", *extra])
    sure = [label for label in order if label in played] if screen and played else order
    best_of_kind: dict[type, str] = {}
    for label in [*sure, *(label for label in order if label not in sure)]:
        best_of_kind.setdefault(type(compared[label]), label)
    kinds = [label for label in order if label in best_of_kind.values()]
    kinds.remove(sure[0])
    kinds.insert(0, sure[0])
    rivals = [label for label in kinds[1:] if label != "AR"] + (["AR"] if kinds[0] != "AR" else [])
    said = evidence(compared[kinds[0]], rivals, predicted, found, depth, played, replay, _settling(findings, task, start), LABEL,
                    bounds[kinds[0]]["speedup"], calibration.scatter)
    return Plan(frame, {"label": LABEL, "model": model, "task": task or "", "start": start, "depth": depth, "best": kinds[0],
                        "rivals": rivals, "evidence": said, "left_out": reasons})


def _check_same_model(findings: Any, tables: Mapping[str, Any], calibration: Calibration) -> None:
    """T and injection, where both sides say them: a plan from one model's agreements and another's prices is of neither."""
    known = [getattr(of, "meta", None) or {} for of in (findings, tables.get("replay"), tables.get("depth_lens"))]
    for name, say in (("depth", lambda x: f"T = {x}"), ("injects", lambda x: f"{'an' if x else 'no'} injected embedding")):
        own, other = next((meta[name] for meta in known if meta.get(name) is not None), None), calibration.meta.get(name)
        if own is not None and other is not None and own != other:
            probed = known[0].get("model", "a model")
            measured = calibration.frame["model"].iloc[0] if len(calibration.frame) else "a model"
            raise SettingError(f"the findings are of {probed} with {say(own)}, the calibration is of {measured} with {say(other)}: "
                               "calibrate the model that the findings are of, and collect findings at the T that it decodes at")


class _Books:
    """What each decoder does on the replayed texts, by label, worked out when asked for; texts of one token have nothing to decode."""

    def __init__(self, replay: ReplayResult | None, drafting: Drafting | None, calibration: Calibration) -> None:
        self.texts = [] if replay is None else [(i, text) for i, text in enumerate(replay.prompts()) if text.lanes]
        self.drafting, self.calibration = drafting, calibration
        self.played: dict[str, Played] = {}

    def replayed(self, decoder: Decoder) -> Prediction | None:
        """By what the texts say at every depth."""
        from decoders.replay import replayed

        return self._enter(decoder, [self._known(i, decoder) or replayed(text, decoder) for i, text in self.texts])

    def drafted(self, decoder: Decoder) -> Prediction | None:
        """By drafting along the texts; of a tree whose cap binds, by decoding them."""
        if self.drafting is None:
            return None
        made = self._known if _drafts_itself(decoder) else self.drafting.tried
        return self._enter(decoder, [made(i, decoder) for i, _ in self.texts])

    def doubtful(self, decoder: Decoder) -> bool:
        """Whether only decoding says what it will do: its cap on lanes may bind."""
        return isinstance(decoder, LoopSpec) and decoder.label in self.played and not self.played[decoder.label].exact

    def _known(self, index: int, decoder: Decoder) -> Outcome | None:
        return None if self.drafting is None else self.drafting.outcome(index, decoder)

    def _enter(self, decoder: Decoder, outcomes: list[Outcome | None]) -> Prediction | None:
        known = [o for o in outcomes if o is not None]
        if not known or len(known) < len(outcomes):
            return None
        self.played[decoder.label] = Played.of(decoder, [text for _, text in self.texts], known, self.calibration)
        return self.played[decoder.label].mean(self.calibration.prices)


def _drafts_itself(decoder: Decoder) -> bool:
    """Whether a replay of it has to run its drafts."""
    return isinstance(decoder, DASWave) or (isinstance(decoder, DraftThenVerify) and decoder.read != "aligned")


def _most_rounds_first(decoders: Sequence[Decoder]) -> list[Decoder]:
    """Refinements of many rounds serve those of few."""
    return sorted(decoders, key=lambda d: -d.rounds if isinstance(d, DASWave) else 0)


def _draft_the_best(own: Sequence[Decoder], predicted: dict[str, Prediction], books: _Books) -> None:
    """Draft along the texts for the schedules that may be the best, nearest first, as long as that pays."""
    waiting = {d.label: d for d in own if d.label in predicted}
    if books.drafting is None or not books.texts:
        return
    left = _REFINING * predicted["AR"].seconds_per_token * sum(text.lanes for _, text in books.texts)
    while waiting:
        label = min(waiting, key=lambda label: predicted[label].seconds_per_token)
        d, estimate = waiting.pop(label), predicted[label]
        best = min(p.seconds_per_token for other, p in predicted.items() if other not in waiting and other != label)
        if estimate.seconds_per_token > _NEAR * best:
            return
        cost = sum(text.lanes for _, text in books.texts) * _drafting_seconds(d, estimate, books.calibration)
        if cost > left and (estimate.seconds_per_token > best or left <= 0):
            continue  # beyond what it may take; only an estimate that is the best of all may overdraw, and once
        p = books.drafted(d)
        if p is not None:
            left -= cost
            predicted[label] = p


def _drafting_seconds(decoder: Decoder, estimate: Prediction, calibration: Calibration) -> float:
    """About what drafting along a text takes per token, if its blocks are as long as estimated."""
    u = calibration.seconds
    blocks = 1 / (estimate.accepted + 1)
    if isinstance(decoder, DASWave):
        widths = [decoder.initial_width + decoder.growth * j for j in range(decoder.rounds)]
        return blocks * sum(decoder.updates * u("recur", w) + u("readout", w) + u("prelude", w) for w in widths)
    if isinstance(decoder, LoopSpec):
        return estimate.seconds_per_token
    d = decoder.draft_depth  # type: ignore[attr-defined]
    return (d * u("recur", 256) + u("readout", 256)) / 64 + blocks * (d * u("recur", 16) + u("readout", 16))


def _settling(findings: Any, task: str | None, start: str | None) -> Any:
    """The rows of the convergence table, if there is one."""
    table = findings.get("convergence") if isinstance(findings, Mapping) else None
    frame = getattr(table, "frame", table)
    for column, value in (("task", task), ("start", start)):
        if frame is not None and value is not None:
            frame = frame[frame[column] == value]
    return frame


class _Callable(ModuleType):
    """`from decoders import plan` gives this module once it has been imported, and the function before: both are called alike."""

    def __call__(self, *args: Any, **settings: Any) -> Plan:
        return plan(*args, **settings)


sys.modules[__name__].__class__ = _Callable
