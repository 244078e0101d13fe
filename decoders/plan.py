"""The first plan: rank decoders and schedules by predicted speed, from what the probes found and what calls cost here.

    plan = rank({"depth_lens": lens, "prefix_channels": channels}, calibrate(model))
    plan.best.generate(model, prompt)

With a replay of some text (decoders/replay.py) the calls, rows and accepts of every decoder that reads aligned are exact there, and
priced call by call. The others are predicted from agreements, which are averages: their drafts are taken to fail independently of each
other. The benchmark says how far off the plan was; the report shows both side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.loopspec import LoopSpec
from decoders.named import decoder as by_label
from decoders.predict import Prediction, predict, schedules
from decoders.prompt_lookup import PromptLookup
from decoders.wavefront import Wavefront
from loopscope.errors import SettingError
from loopscope.records import Result

if TYPE_CHECKING:
    from decoders.bench import BenchResult
    from decoders.calibrate import Calibration
    from decoders.carried import Refinements
    from probes.replay import ReplayResult

LABEL = "first plan"
_RESAMPLES = 200


class Findings:
    """Agreement with the full-depth token by policy, depth and lag, from the probes' tables.

    prefix_channels is preferred, since it measures what a draft behind a verified prefix sees; between measured lags
    agreement is interpolated, beyond the largest it stays. depth_lens stands in for aligned reads where it is missing.
    """

    def __init__(self, tables: Mapping[str, Any], *, task: str | None = None, start: str | None = None) -> None:
        import pandas as pd

        self._cells: dict[tuple[str, int], dict[int, list[tuple[int, float, float]]]] = {}
        self._lens: dict[int, list[tuple[int, float, float]]] = {}
        found = False
        for kind in ("depth_lens", "prefix_channels"):
            table = tables.get(kind)
            frame = getattr(table, "frame", table)
            if not isinstance(frame, pd.DataFrame):
                continue
            for column, value in (("task", task), ("start", start)):
                if value is not None:
                    frame = frame[frame[column] == value]
            found = found or len(frame) > 0
            if kind == "depth_lens":
                for row in frame.itertuples():
                    self._lens.setdefault(row.depth, []).append((row.prompt, row.agreement, row.n_positions))
            else:
                for row in frame[frame["control"] == "none"].itertuples():
                    cell = self._cells.setdefault((row.policy, row.depth), {})
                    cell.setdefault(row.lag, []).append((row.prompt, row.agreement, row.n_positions))
        if not found:
            wanted = ", ".join(f"{k} {v!r}" for k, v in (("task", task), ("start", start)) if v is not None)
            raise SettingError("a plan needs a depth_lens or a prefix_channels table with rows" + (f" of {wanted}" if wanted else ""))
        self._weights: Mapping[int, float] | None = None

    @property
    def prompts(self) -> list[int]:
        cells = [*self._lens.values(), *(rows for lags in self._cells.values() for rows in lags.values())]
        return sorted({prompt for rows in cells for prompt, _, _ in rows})

    def resampled(self, drawn: Sequence[int]) -> Findings:
        """The same findings with prompts counted as often as they were drawn."""
        other = object.__new__(Findings)
        other.__dict__.update(self.__dict__)
        counts: dict[int, float] = {}
        for prompt in drawn:
            counts[prompt] = counts.get(prompt, 0) + 1
        other._weights = counts
        return other

    def agreement(self, policy: str, depth: int, lag: int) -> float | None:
        lags = self._cells.get((policy, depth), {})
        if not lags:
            return self._mean(self._lens.get(depth, [])) if policy == "aligned" else None
        below = max((n for n in lags if n <= lag), default=min(lags))
        above = min((n for n in lags if n >= lag), default=max(lags))
        low, high = self._mean(lags[below]), self._mean(lags[above])
        if low is None or high is None or below == above:
            return low
        return low + (high - low) * (lag - below) / (above - below)

    def _mean(self, rows: list[tuple[int, float, float]]) -> float | None:
        weights = [(n * (1 if self._weights is None else self._weights.get(prompt, 0)), value) for prompt, value, n in rows]
        total = sum(w for w, _ in weights)
        return sum(w * value for w, value in weights) / total if total else None


@dataclass(frozen=True, eq=False)
class Plan(Result):
    """Predicted (and, after `beside`, measured) cost per committed token of every schedule, fastest first."""

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


def rank(findings: Mapping[str, Any] | Findings, calibration: Calibration, *, replay: ReplayResult | None = None,
         refinements: Refinements | None = None, depth: int | None = None, injects: bool | None = None, task: str | None = None,
         start: str | None = None, decoders: Sequence[Decoder] | None = None, seed: int = 0) -> Plan:
    """Rank schedules by predicted seconds per committed token.

    replay: text at every depth (decoders.replay.replay); decoders it covers are predicted from it, prompt by prompt.
    refinements: blocks of the same texts (decoders.carried.Refinements), which do the same for DAS-Wave.

    findings: the tables "depth_lens" and "prefix_channels" (results or frames; the second may be missing), of which
    `task` and `start` choose rows. calibration: what calls cost on this machine. depth and injects: the model's T and
    whether it injects its embedding; default: as the calibration recorded them. decoders: what to compare; default:
    AR and a few settings of every decoder. `low` and `high` are a 95 % bootstrap interval over the findings' prompts.
    Raises SettingError where the findings have no rows.
    """
    import pandas as pd

    facts = calibration.meta
    depth = int(facts["depth"]) if depth is None else depth
    injects = bool(facts.get("injects", True)) if injects is None else injects
    found = findings if isinstance(findings, Findings) else Findings(findings, task=task, start=start)
    compared = {d.label: d for d in (decoders or schedules(depth))}
    compared.setdefault("AR", Autoregressive())
    played = _played(replay, refinements, compared.values(), calibration)
    predicted = {label: p for label, d in compared.items() if (p := played[label].mean() if label in played else _from_agreements(
        d, found, calibration, depth, injects))}
    order = sorted(predicted, key=lambda label: predicted[label].seconds_per_token)
    ar = predicted["AR"]
    model = calibration.frame["model"].iloc[0] if len(calibration.frame) else ""
    intervals = _intervals([compared[label] for label in order], found, calibration, depth, injects, seed, played)
    rows = [(model, task or "", label, "predicted", p.calls_per_token, p.seconds_per_token, ar.calls_per_token / p.calls_per_token,
             ar.seconds_per_token / p.seconds_per_token, *intervals[label], p.accepted, p.seconds_per_call,
             played[label].exact if label in played else False)
            for label in order for p in [predicted[label]]]
    frame = pd.DataFrame(rows, columns=[*Plan.columns, "accepted_per_run", "seconds_per_call", "exact_calls"])
    best_of_kind: dict[type, str] = {}
    for label in order:
        best_of_kind.setdefault(type(compared[label]), label)
    kinds = list(best_of_kind.values())
    rivals = [label for label in kinds[1:] if label != "AR"] + (["AR"] if kinds[0] != "AR" else [])
    return Plan(frame, {"label": LABEL, "model": model, "task": task or "", "start": start, "depth": depth, "best": kinds[0],
                        "rivals": rivals, "evidence": _evidence(compared[kinds[0]], rivals, predicted, found, depth, played, replay)})


@dataclass(frozen=True)
class _Played:
    """What one decoder does on the replayed prompts, an entry for each: block calls, seconds, tokens, accepted drafts, runs."""

    calls: list[float]
    seconds: list[float]
    tokens: list[float]
    accepted: list[float]
    runs: list[float]
    exact: bool

    def mean(self, drawn: Sequence[int] | None = None) -> Prediction:
        """Over all prompts, or those drawn."""
        at = range(len(self.tokens)) if drawn is None else drawn
        calls, seconds, tokens, accepted, runs = (sum(x[i] for i in at) for x in (self.calls, self.seconds, self.tokens, self.accepted,
                                                                                 self.runs))
        return Prediction(calls / tokens, seconds / tokens, accepted / runs if runs else 0.0)


def _played(replay: ReplayResult | None, refinements: Refinements | None, decoders: Iterable[Decoder],
            calibration: Calibration) -> dict[str, _Played]:
    """Outcome of every decoder that the replay covers, by label; prompts that end with their first token have nothing to decode."""
    from decoders.replay import replayed

    texts = [] if replay is None else [(i, text) for i, text in enumerate(replay.prompts()) if text.lanes]
    out: dict[str, _Played] = {}
    for decoder in _most_rounds_first(decoders) if texts else ():
        if isinstance(decoder, LoopSpec):
            continue  # a tree's calls have no price in the sweep yet
        if isinstance(decoder, DASWave):
            outcomes = [refinements.outcome(i, decoder) for i, _ in texts] if refinements is not None else [None]
        else:
            outcomes = [replayed(text, decoder) for _, text in texts]
        known = [o for o in outcomes if o is not None]
        if len(known) == len(outcomes):
            cost = [calibration.cost(o.widths, o.readout, o.prelude, decoder.label) for o in known]
            out[decoder.label] = _Played([o.recur for o in known], cost, [text.lanes for _, text in texts], [o.accepted for o in known],
                                         [len(o.runs) for o in known], all(o.exact for o in known))
    return out


def _most_rounds_first(decoders: Iterable[Decoder]) -> list[Decoder]:
    """Refinements of many rounds serve those of few."""
    return sorted(decoders, key=lambda d: -d.rounds if isinstance(d, DASWave) else 0)


def _from_agreements(decoder: Decoder, found: Findings, calibration: Calibration, depth: int, injects: bool) -> Prediction | None:
    """By formula; None for what only a replay could predict."""
    if isinstance(decoder, (LoopSpec, PromptLookup)) or (isinstance(decoder, Wavefront) and decoder.redraft is not None):
        return None
    return predict(decoder, found.agreement, calibration, depth, injects)


def _intervals(decoders: Sequence[Decoder], found: Findings, calibration: Calibration, depth: int, injects: bool, seed: int,
               played: Mapping[str, _Played]) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of the predicted speedup over resampled prompts; nan with fewer than two prompts."""
    import numpy as np

    prompts, texts = found.prompts, len(played["AR"].tokens) if "AR" in played else 0
    draw = np.random.default_rng(seed)
    formula = predict(Autoregressive(), found.agreement, calibration, depth, injects).seconds_per_token
    speedups: dict[str, list[float]] = {d.label: [] for d in decoders}
    for _ in range(_RESAMPLES):
        again = found.resampled(draw.choice(prompts, len(prompts)).tolist()) if len(prompts) > 1 else None
        picked = draw.choice(texts, texts).tolist() if texts > 1 else None
        ar = played["AR"].mean(picked).seconds_per_token if "AR" in played else formula
        for d in decoders:
            if d.label in played:
                p = played[d.label].mean(picked) if picked else None
            else:
                p = again and _from_agreements(d, again, calibration, depth, injects)
            if p is not None:
                speedups[d.label].append(ar / p.seconds_per_token)
    return {label: tuple(np.percentile(s, (2.5, 97.5)).tolist()) if s else (float("nan"),) * 2 for label, s in speedups.items()}


def _evidence(best: Decoder, rivals: Sequence[str], predicted: Mapping[str, Prediction], found: Findings, depth: int,
              played: Mapping[str, _Played], replay: ReplayResult | None) -> str:
    """Why the winner wins, in one sentence of numbers."""
    p, ar = predicted[best.label], predicted["AR"]
    against = next((label for label in rivals if label != "AR"), None)
    if isinstance(best, Autoregressive):
        reason = "no draft was measured"
        if against:
            reason = (f"the best other, {against}, would need {predicted[against].calls_per_token:.2f} block calls per token instead of "
                      f"{depth}, but ones that cost more than they save")
        return f"The {LABEL} is AR: {reason}."
    d = getattr(best, "draft_depth", getattr(best, "updates", 1))
    policy = getattr(best, "read", "aligned")
    right = found.agreement(policy, d, 1)
    how = f"{p.accepted:.1f} drafts are accepted per check"
    if right is not None:
        how = (f"a draft after {d} of {depth} recurrences ({policy.replace('_', ' ')} reads) already names the full-depth token "
               f"{right:.0%} of the time")
    settled = settle_depth(replay) if replay is not None and getattr(best, "redraft", None) is not None else None
    if settled is not None:
        how += f", and one that is read again as it deepens is final after {settled:.1f} on average"
    exact = best.label in played and played[best.label].exact
    text = f"The {LABEL} is {best.label}: {how}, so a token costs {p.calls_per_token:.2f} block calls instead of {ar.calls_per_token:.0f}"
    if exact:
        texts = len(played[best.label].tokens)
        text += f", replayed exactly on {texts} text{'s' if texts > 1 else ''}"
    if against:
        calls = predicted[against].calls_per_token
        text += f" ({against} would need {calls:.2f}{', but dearer ones' if calls < p.calls_per_token else ''})"
    speedup = ar.seconds_per_token / p.seconds_per_token
    return f"{text}; by the call times of this machine that is {speedup:.1f}x the speed of AR."


def settle_depth(replay: ReplayResult) -> float | None:
    """Mean over the drafts of a replay of the first depth from which the top token never changes; None without drafts."""
    depths: list[int] = []
    for text in replay.prompts():
        changed = text.drafts != text.drafts[-1]
        depths += [max((r + 2 for r in range(text.depth) if changed[r, i]), default=1) for i in range(text.lanes)]
    return sum(depths) / len(depths) if depths else None
