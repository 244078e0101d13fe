"""Findings: everything that the probes and interventions say of a model on some prompts, as one object that a plan is made of.

    found = Findings.collect(model, prompts, task="maths")
    plan = decoders.plan(found, calibrate(model))
    found.save("runs/findings")                   # parquet tables and one manifest
    Findings.load("runs/findings", model)         # without the model: what was replayed so far, and formulae for the rest

Prompts are kept apart in every table, so that intervals can be drawn. Number i is the same prompt in all of them, but not every table
need stand on all: `Findings.of` takes tables that were measured already, the replay on fewer prompts than the probes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from decoders.carried import Refinements
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.hops import ANCHORS, ROUNDS, HopsResult, hops
from decoders.named import decoder as by_label
from decoders.outcomes import OutcomesResult
from decoders.replay import replay, replayed
from decoders.replay_counts import Outcome
from loopscope.errors import RunFolderError, SettingError
from loopscope.fingerprint import weights_hash
from loopscope.records import Result, manifest, write_text
from probes.inputs import core_of, name_of, read_prompts, start_label
from probes.replay import replay_table

if TYPE_CHECKING:
    from probes.lens import DepthLensResult

# table -> where its class is
_KINDS = {"convergence": "probes.settling:ConvergenceResult", "depth_lens": "probes.lens:DepthLensResult",
          "settle": "probes.lens:SettleResult", "second_candidate": "probes.candidates:SecondCandidateResult",
          "agreement_runs": "probes.runs:AgreementRunsResult", "prefix_channels": "interventions.prefix:PrefixChannelsResult",
          "depth_grid": "interventions.grid:DepthGridResult", "replay": "probes.replay:ReplayResult", "hops": "decoders.hops:HopsResult",
          "outcomes": "decoders.outcomes:OutcomesResult"}
_MANIFEST = "manifest.json"
_REPLAYED = ("replay", "hops", "outcomes")  # tables that stand on what was decoded, not on what was probed
_FACTS = ("depth", "start_state", "seed", "model", "task", "prompts", "new_tokens", "rounds")  # without which nothing can be replayed


class Findings:
    """Tables by name (`tables`), and what decoders do on the replayed texts (`outcome`).

    Tables: convergence, depth_lens, settle, second_candidate, agreement_runs, prefix_channels (four read policies by depth and lag),
    depth_grid, replay and hops (carried refinement); the last two are missing for a model that cannot be decoded in parallel at all.
    meta: the settings and prompts (token ids), and what each table stands on: `stands_on`, by table, the numbers of its prompts and how
    many new tokens followed them.
    """

    def __init__(self, tables: Mapping[str, Result], meta: Mapping[str, Any], model: Any = None) -> None:
        self._tables, self.meta = dict(tables), dict(meta)
        stored = self._tables.pop("outcomes", None)
        self._outcomes: dict[tuple[int, str], Outcome] = {} if stored is None else stored.by_text()
        self._core = None if model is None else core_of(model)
        self._refinements: Refinements | None = None
        if self._core is not None and "replay" in self._tables and not self._tables["replay"].passes:
            texts = [text.tokens for text in self._tables["replay"].prompts()]
            self._tables["replay"] = replay_table(self._core, self._replayed, texts, limit=self.meta["new_tokens"], task=self.meta["task"],
                                                  model_name=self.meta["model"], progress=False, **self._options)

    @property
    def tables(self) -> dict[str, Result]:
        """The tables by name; "outcomes" holds what decoders were replayed so far."""
        return self._tables | ({"outcomes": self._outcomes_table()} if self._outcomes else {})

    @property
    def _options(self) -> dict[str, Any]:
        return {name: self.meta[name] for name in ("depth", "start_state", "seed")}

    @property
    def _replayed(self) -> list[list[int]]:
        """The prompts of the replay: the first so many."""
        return self.meta["prompts"][: len(self._tables["replay"].prompts())]  # type: ignore[attr-defined]

    @property
    def decoders(self) -> list[Decoder]:
        """What these findings were collected to compare, where that was noted; else none."""
        return [by_label(label) for label in self.meta.get("decoders", ())]

    @property
    def refinements(self) -> Refinements | None:
        """Drafts along the replayed texts, made when asked for; None without the model or a replay."""
        if self._refinements is None and self._core is not None and "replay" in self._tables:
            self._refinements = Refinements(self._core, self._replayed, self._tables["replay"],  # type: ignore[arg-type]
                                            self.meta["rounds"], self.meta["start_state"], self.meta["seed"])
        return self._refinements

    def outcome(self, index: int, decoder: Decoder) -> Outcome | None:
        """What `decoder` does on replayed text `index` (decoders.replay_counts.Outcome).

        None where it cannot be replayed, or was not before the findings were saved and they were loaded without the model.
        """
        key = index, decoder.label
        if key not in self._outcomes and (drafting := self.refinements) is not None:
            made = drafting.outcome(index, decoder)
            made = made or replayed(self._tables["replay"].prompts()[index], decoder)
            if made is not None:
                self._outcomes[key] = made
        return self._outcomes.get(key)

    def knows(self, decoder: Decoder) -> bool:
        """Whether what a decoder does was worked out on all of the replayed texts already."""
        texts = self._tables["replay"].prompts() if "replay" in self._tables else []  # type: ignore[attr-defined]
        return bool(texts) and all((i, decoder.label) in self._outcomes for i, text in enumerate(texts) if text.lanes)

    def tried(self, index: int, decoder: Decoder) -> Outcome | None:
        """The same by decoding (decoders.carried.Refinements.tried), in place of what `outcome` said; without the model what is known."""
        if (drafting := self.refinements) is None:
            return self._outcomes.get((index, decoder.label))
        made = drafting.tried(index, decoder)
        if made is not None:
            self._outcomes[index, decoder.label] = made
        return made

    def _outcomes_table(self) -> OutcomesResult:
        return OutcomesResult.of(self._outcomes, self.meta["model"], self.meta["task"])

    def trace_hops(self, anchors: int = ANCHORS) -> HopsResult:
        """Make the table `hops` from the refinements that `outcome` draws on, from at most `anchors` places of every text.

        Raises SettingError without the model, or for one that cannot be decoded in parallel.
        """
        if (drafting := self.refinements) is None:
            raise SettingError("hops are drafted along replayed texts: give Findings.load the model, and one that has a replay")
        wave = DASWave(min(self.meta["rounds"], ROUNDS, 3 * self.meta["depth"]), 1)
        made = hops(drafting, wave, anchors=anchors, task=self.meta["task"], model_name=self.meta["model"], start=self.meta["start"])
        self._tables["hops"] = made
        self.meta["stands_on"] = _stands_on(self._tables, self.meta)
        return made

    @classmethod
    def of(cls, model: Any, tables: Mapping[str, Result], prompts: Iterable[Any], *, new_tokens: int, probed_tokens: int | None = None,
           task: str = "", model_name: str | None = None, depth: int | None = None, start_state: str | None = None, seed: int = 0,
           rounds: int = 24, decoders: Iterable[Decoder] = ()) -> Findings:
        """Findings of tables that were measured already, all with these settings; nothing is measured again.

        prompts: texts or token ids, in the order in which the tables number them; each table may stand on some of them, the replay on
        the first so many. new_tokens: of the replay; probed_tokens: of the texts that all else was read on (default: as many). decoders:
        what is to be compared, noted for whoever plans from them later. rounds, start_state: as for `collect`.

        Raises SettingError for a table of another kind, of a prompt that is not there, or of another start state or depth.
        """
        core = core_of(model)
        depth = core.check_depth(depth)
        ids = [own.tolist() for own in read_prompts(core, prompts, 1, "findings")]
        meta = {"depth": depth, "start_state": start_state, "seed": seed, "model": name_of(core, model_name), "task": task,
                "start": start_label(core, start_state), "prompts": ids, "new_tokens": new_tokens, "rounds": rounds,
                "probed_tokens": new_tokens if probed_tokens is None else probed_tokens, "decoders": [d.label for d in decoders],
                "injects": core.config.injects, "weights": weights_hash(core)}
        for kind, table in tables.items():
            _check_table(kind, table, meta)
        return cls(tables, meta | {"stands_on": _stands_on(tables, meta)}, core)

    @classmethod
    def collect(cls, model: Any, prompts: Iterable[Any], *, new_tokens: int = 48, task: str = "", model_name: str | None = None,
                depth: int | None = None, start_state: str | None = None, seed: int = 0, max_positions: int = 48, rounds: int = 24,
                nulls: Sequence[str] | None = None, progress: bool = True) -> Findings:
        """Run every probe and intervention that a plan uses on the prompts and their own greedy continuations.

        new_tokens: of the continuation. max_positions: anchors per prompt of the interventions. rounds: the most rounds that a DAS-Wave
        may have to be replayed. nulls: of convergence (default: all). start_state: None or "zero", so that it can be saved.
        Raises PromptError, DepthError, ContextError, SettingError, NumericsError. Sources: algorithms.md 2 and 3.
        """
        import interventions
        import probes
        from interventions.controls import CONTROLS
        from probes.runs import candidates_and_runs

        core = core_of(model)
        depth = core.check_depth(depth)
        ids = [own.tolist() for own in read_prompts(core, prompts, 2, "a draft behind one verified token")]
        name = name_of(core, model_name)
        own: dict[str, Any] = {"depth": depth, "start_state": start_state, "seed": seed}
        common = {**own, "task": task, "model_name": name, "progress": False}
        tables: dict[str, Result] = {}
        if not core.why_not_lossless:
            tables["replay"] = replay(core, ids, new_tokens, **common)
            texts = [prompt + text.tokens for prompt, text in zip(ids, tables["replay"].prompts())]
        else:
            from interventions.drafts import greedy_continuation
            from torch import tensor

            texts = [greedy_continuation(core, tensor(prompt), new_tokens, **own).tolist() for prompt in ids]
        drafts = {**common, "new_tokens": new_tokens, "max_positions": max_positions}
        controls = tuple(c for c in CONTROLS if len(ids) > 1 or c != "other_prompt_v")
        steps: dict[str, Callable[[], Sequence[Result]]] = {
            "convergence": lambda: [probes.convergence(core, texts, **common, **({} if nulls is None else {"nulls": nulls}))],
            "depth_lens": lambda: _with_settle(probes.depth_lens(core, texts, **common)),
            "second_candidate": lambda: candidates_and_runs(core, texts, **common),
            "prefix_channels": lambda: [interventions.prefix_channels(core, ids, lags=_lags(ids), controls=controls, **drafts)],
            "depth_grid": lambda: [interventions.depth_grid(core, ids, 1, **drafts)]}
        with tqdm(total=len(steps) + ("replay" in tables), desc=f"findings {name}", unit="probe", disable=not progress) as bar:
            for kind, step in steps.items():
                bar.set_postfix_str(kind)
                tables |= {table.kind: table for table in step()}
                bar.update()
            found = cls.of(core, tables, ids, new_tokens=new_tokens, task=task, model_name=name, rounds=rounds, **own)
            if "replay" in tables:
                bar.set_postfix_str("hops")
                found.trace_hops()
                bar.update()
        return found

    def save(self, folder: str | os.PathLike) -> Path:
        """FOLDER/KIND.parquet for every table, and FOLDER/manifest.json last: a folder without it is not complete.

        Raises RunFolderError, also for a folder that holds something else.
        """
        folder = Path(folder)
        if (folder / _MANIFEST).exists():
            _read_manifest(folder)  # only findings are replaced by findings
            (folder / _MANIFEST).unlink()
        tables = self.tables
        for kind in _KINDS:
            if kind in tables:
                Result.save(tables[kind], folder)
            elif (folder / f"{kind}.parquet").exists():
                (folder / f"{kind}.parquet").unlink()
        facts = manifest(findings=self.meta, tables=list(tables))
        write_text(json.dumps(facts, indent=1, default=str) + "\n", folder / _MANIFEST)
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike, model: Any = None) -> Findings:
        """Read what `save` wrote. model: the same model, to replay further decoders with.

        Raises RunFolderError for a folder that is incomplete, broken, or of another kind, and SettingError for a model of other weights
        (findings that were saved before weights were noted are taken on trust).
        """
        folder = Path(folder)
        facts = _read_manifest(folder)
        noted = facts["findings"].get("weights")
        if model is not None and noted is not None and (own := weights_hash(core_of(model))) != noted:
            name = facts["findings"]["model"]
            raise SettingError(f"{folder} holds findings of {name} with weights {noted}, the model given has weights {own}: give "
                               "the same model in the same dtype, no model to read what was replayed, or collect findings of this one")
        tables = {}
        for kind in facts["tables"]:
            module, name = _KINDS[kind].split(":")
            tables[kind] = getattr(import_module(module), name).load(folder)
        return cls(tables, facts["findings"], model)

    def __repr__(self) -> str:
        held = ", ".join(f"{kind} ({len(table.frame)} rows)" for kind, table in self.tables.items())
        return f"Findings of {self.meta['model']} on {len(self.meta['prompts'])} {self.meta['task'] or 'prompts'}: {held}"

    def _repr_html_(self) -> str:
        """One line, and every table folded away, the depth lens with its figure, for Jupyter."""
        parts = [f"<details><summary>{kind}: {len(table.frame)} rows</summary>{table.frame.head(10).to_html(index=False)}</details>"
                 for kind, table in self.tables.items() if kind != "depth_lens"]
        lens = self.tables["depth_lens"]._repr_html_() if "depth_lens" in self.tables else ""
        prompts = f"{len(self.meta['prompts'])} prompts ({self.meta['task'] or 'own'})"
        return f"<p>Findings of {self.meta['model']} on {prompts}, T = {self.meta['depth']}</p>{lens}{''.join(parts)}"


def _with_settle(lens: DepthLensResult) -> list[Result]:
    return [lens, *([lens.settle] if lens.settle is not None else [])]


def _stands_on(tables: Mapping[str, Result], meta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By table: the numbers of the prompts it was measured on, and how many new tokens followed each at most."""
    return {kind: {"prompts": sorted(int(i) for i in table.frame["prompt"].unique()),
                   "new_tokens": meta["new_tokens"] if kind in _REPLAYED else meta.get("probed_tokens", meta["new_tokens"])}
            for kind, table in tables.items()}


def _check_table(kind: str, table: Result, meta: Mapping[str, Any]) -> None:
    """Refuse what would make one plan of two settings."""
    if kind not in _KINDS or table.kind != kind:
        raise SettingError(f"findings have no table {kind!r} made of {table.kind}; they hold {', '.join(_KINDS)}")
    numbers, count = sorted(int(i) for i in table.frame["prompt"].unique()), len(meta["prompts"])
    if numbers and (numbers[-1] >= count or kind == "replay" and numbers != list(range(len(numbers)))):
        raise SettingError(f"the table {kind} is of the prompts {numbers}, of which there are {count} here (a replay is of the first so "
                           "many): give all prompts, in the order of the tables")
    for column in ("model", "task", "start"):
        other = sorted(set(table.frame[column]) - {meta[column]}) if column in table.frame else []
        if other:
            raise SettingError(f"the table {kind} has rows of {column} {', '.join(map(repr, other))}, these findings are of "
                               f"{meta[column]!r}: give the rows of one {column} only")
    if (own := table.meta.get("depth", meta["depth"])) != meta["depth"]:
        raise SettingError(f"the table {kind} was measured at T = {own}, these findings are at T = {meta['depth']}: measure it again")


def _lags(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Lags that every prompt is long enough for."""
    return tuple(lag for lag in (1, 2, 4, 8) if lag < min(map(len, prompts))) or (1,)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} does not hold complete findings: {_MANIFEST} cannot be read ({error}); "
                             "give the folder that Findings.save wrote") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("findings"), dict):
        wrong = "has no findings in it"
    elif not isinstance(named := facts.get("tables"), list):
        wrong = f"should have a list of tables, found {type(named).__name__}"
    elif unknown := [str(kind) for kind in named if not isinstance(kind, str) or kind not in _KINDS]:
        wrong = f"names the tables {', '.join(unknown)}"
    elif missing := [name for name in _FACTS if name not in facts["findings"]]:
        wrong = f"does not say {', '.join(missing)}"
    else:
        return facts
    raise RunFolderError(f"{folder} holds something else than findings: {_MANIFEST} {wrong}; give the folder that Findings.save wrote")
