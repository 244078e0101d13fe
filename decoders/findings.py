"""Findings: everything that the probes and interventions say of a model on some prompts, as one object that a plan is made of.

    found = Findings.collect(model, prompts, task="maths")
    plan = decoders.plan(found, calibrate(model))
    found.save("runs/findings")                   # parquet tables and one manifest
    Findings.load("runs/findings", model)         # without the model: what was replayed so far, and formulae for the rest

Prompts are kept apart in every table, so that intervals can be drawn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from decoders.carried import Refinements
from decoders.decoder import Decoder
from decoders.outcomes import OutcomesResult
from decoders.replay import replay, replayed
from decoders.replay_counts import Outcome
from loopscope.errors import RunFolderError, SettingError
from loopscope.fingerprint import weights_hash
from loopscope.records import Result, manifest, write_text
from probes.inputs import core_of, name_of, read_prompts, start_label
from probes.replay import replay_table

# table -> where its class is
_KINDS = {"convergence": "probes.settling:ConvergenceResult", "depth_lens": "probes.lens:DepthLensResult",
          "settle": "probes.lens:SettleResult", "second_candidate": "probes.candidates:SecondCandidateResult",
          "agreement_runs": "probes.runs:AgreementRunsResult", "prefix_channels": "interventions.prefix:PrefixChannelsResult",
          "depth_grid": "interventions.grid:DepthGridResult", "replay": "probes.replay:ReplayResult", "hops": "decoders.hops:HopsResult",
          "outcomes": "decoders.outcomes:OutcomesResult"}
_MANIFEST = "manifest.json"
_FACTS = ("depth", "start_state", "seed", "model", "task", "prompts", "new_tokens", "rounds")  # without which nothing can be replayed


class Findings:
    """Tables by name (`tables`), and what decoders do on the replayed texts (`outcome`).

    Tables: convergence, depth_lens, settle, second_candidate, agreement_runs, prefix_channels (four read policies by depth and lag),
    depth_grid, replay and hops (carried refinement); the last two are missing for a model that cannot be decoded in parallel at all.
    """

    def __init__(self, tables: Mapping[str, Result], meta: Mapping[str, Any], model: Any = None) -> None:
        self._tables, self.meta = dict(tables), dict(meta)
        stored = self._tables.pop("outcomes", None)
        self._outcomes: dict[tuple[int, str], Outcome] = {} if stored is None else stored.by_text()
        self._core = None if model is None else core_of(model)
        self._refinements: Refinements | None = None
        if self._core is not None and "replay" in self._tables and not self._tables["replay"].passes:
            texts = [text.tokens for text in self._tables["replay"].prompts()]
            self._tables["replay"] = replay_table(self._core, self.meta["prompts"], texts, limit=self.meta["new_tokens"],
                                                  task=self.meta["task"], model_name=self.meta["model"], progress=False, **self._options)

    @property
    def tables(self) -> dict[str, Result]:
        """The tables by name; "outcomes" holds what decoders were replayed so far."""
        return self._tables | ({"outcomes": self._outcomes_table()} if self._outcomes else {})

    @property
    def _options(self) -> dict[str, Any]:
        return {name: self.meta[name] for name in ("depth", "start_state", "seed")}

    def outcome(self, index: int, decoder: Decoder) -> Outcome | None:
        """What `decoder` does on replayed text `index` (decoders.replay_counts.Outcome).

        None where it cannot be replayed, or was not before the findings were saved and they were loaded without the model.
        """
        key = index, decoder.label
        if key not in self._outcomes and self._core is not None and "replay" in self._tables:
            if self._refinements is None:
                self._refinements = Refinements(self._core, self.meta["prompts"], self._tables["replay"], self.meta["rounds"],
                                                self.meta["start_state"], self.meta["seed"])
            made = self._refinements.outcome(index, decoder)
            made = made or replayed(self._tables["replay"].prompts()[index], decoder)
            if made is not None:
                self._outcomes[key] = made
        return self._outcomes.get(key)

    def _outcomes_table(self) -> OutcomesResult:
        return OutcomesResult.of(self._outcomes, self.meta["model"], self.meta["task"])

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
        from decoders.hops import ROUNDS, hops
        from interventions.controls import CONTROLS

        core = core_of(model)
        depth = core.check_depth(depth)
        ids = [own.tolist() for own in read_prompts(core, prompts, 2, "a draft behind one verified token")]
        name, start = name_of(core, model_name), start_label(core, start_state)
        own: dict[str, Any] = {"depth": depth, "start_state": start_state, "seed": seed}
        common = {**own, "task": task, "model_name": name, "progress": False}
        meta = {**own, "model": name, "task": task, "start": start, "prompts": ids, "new_tokens": new_tokens, "rounds": rounds,
                "injects": core.config.injects, "weights": weights_hash(core)}
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
        steps: dict[str, Callable[[], Result]] = {
            "convergence": lambda: probes.convergence(core, texts, **common, **({} if nulls is None else {"nulls": nulls})),
            "depth_lens": lambda: probes.depth_lens(core, texts, **common),
            "second_candidate": lambda: probes.second_candidate(core, texts, **common),
            "agreement_runs": lambda: probes.agreement_runs(core, texts, **common),
            "prefix_channels": lambda: interventions.prefix_channels(core, ids, lags=_lags(ids), controls=controls, **drafts),
            "depth_grid": lambda: interventions.depth_grid(core, ids, 1, **drafts)}
        with tqdm(total=len(steps) + ("replay" in tables), desc=f"findings {name}", unit="probe", disable=not progress) as bar:
            for kind, step in steps.items():
                bar.set_postfix_str(kind)
                tables[kind] = step()
                bar.update()
            if (lens := tables["depth_lens"]).settle is not None:  # type: ignore[attr-defined]
                tables["settle"] = lens.settle  # type: ignore[attr-defined]
            found = cls(tables, meta, core)
            if "replay" in tables:
                bar.set_postfix_str("hops")
                from decoders.das_wave import DASWave

                found._refinements = Refinements(core, ids, tables["replay"], rounds, start_state, seed)
                wave = DASWave(min(rounds, ROUNDS, 3 * depth), 1)
                found._tables["hops"] = hops(found._refinements, wave, task=task, model_name=name, start=start)
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
