"""`loopscope probe`, `intervene` and `models`: one study, printed as a small table and saved on request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.folder import run_folder
from loopscope.cli.shared import AlreadyThere, Part, local_device, shared_study
from loopscope.cli.suite import Suite
from loopscope.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from loopscope.models.looped import LoopedCore
    from loopscope.records import Result


_THREADS_PER_CORE = 4  # more than one never helps, but is harmless; tens of thousands end in a segmentation fault


def open_model(name: str, threads: int, device: str | None = None, dtype: str | None = None) -> LoopedCore:
    """The model without hooks: nothing the command line does needs transformer-lens, whose import takes seconds.

    device: "cpu", "cuda" (under torchrun, the card of this process), "cuda:1", or "auto": spread over all cards, for a model larger
    than one.
    Raises SettingError for a number of threads far beyond the machine's cores: torch would take it and crash in the first product.
    """
    most = _THREADS_PER_CORE * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise SettingError(f"threads {threads} is not usable here; expected 1 to {most} ({_THREADS_PER_CORE} for each CPU core)")
    import torch

    import loopscope

    torch.set_num_threads(threads)
    where = {} if device is None else {"device_map": "auto"} if device == "auto" else {"device": local_device(device)}
    return loopscope.load(name, hooked=False, dtype=torch_dtype(dtype), **where)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a --dtype. Raises SettingError for any other word."""
    if name is None:
        return None
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in known:
        raise SettingError(f"dtype {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]


def start_state(name: str) -> str | None:
    if name not in ("keyed", "zero"):
        raise SettingError(f"start {name!r} is unknown; use 'keyed' or 'zero'")
    return "zero" if name == "zero" else None


def read_texts(core: LoopedCore, task: str, count: int, texts: Sequence[str] | Suite | None, seed: int) -> tuple[str, list]:
    """(task label, prompts): those of a suite, the user's own texts, or built-in ones."""
    from loopscope.tiny.prompts import prompts

    if isinstance(texts, Suite):
        return texts.label, texts.tokens(core)
    if texts:
        return "own", list(texts)
    return task, prompts(task, count, seed)


def recorded(texts: Sequence[str] | Suite | None, prompts: list) -> Any:
    """What a manifest says of the prompts: a suite by file and rows, others in full."""
    return texts.facts() if isinstance(texts, Suite) else prompts


def continued(core: LoopedCore, prompts: Iterable[str], tokens: int, seed: int, depth: int | None = None, advance=None) -> list[list[int]]:
    """Each prompt with its own greedy continuation: the text a decoder works on. The start state is the model's own, whatever a
    probe of that text then starts from."""
    from decoders import Autoregressive

    prompts, out = list(prompts), []
    for i, prompt in enumerate(prompts):
        new = Autoregressive().generate(core, prompt, max_new_tokens=tokens, depth=depth, seed=seed).tokens
        out.append(core.prompt_tokens(prompt).tolist() + new)
        if advance is not None:
            advance(i + 1, len(prompts))
    return out


def run_probe(model: str, *, task, count, texts, out, start, depth, new_tokens, seed, threads, device=None, dtype=None, only=None) -> None:
    from loopscope.cli import probing

    names = probing.chosen(only)
    part = Part.of_this_process(out)
    core, state = open_model(model, threads, device, dtype), start_state(start)
    label, prompts = read_texts(core, task, count, texts, seed)
    options = {"task": label, "depth": depth, "start_state": state, "seed": seed}
    if part is not None:
        if names != probing.DEFAULT:
            raise SettingError(f"several processes share {' and '.join(probing.DEFAULT)}; run --only {only} in one process")
        return _probe_part(part, core, prompts, new_tokens, options, recorded(texts, prompts))
    read = continued(core, prompts, new_tokens, seed, depth) if new_tokens else prompts
    results = probing.run(names, core, read, len(prompts), options)
    print(f"{core.source}, {len(prompts)} prompts ({label}), start {start}: cosine to full depth, and what stopping there would say"
          if "convergence" in names else f"{core.source}, {len(prompts)} prompts ({label}), start {start}")
    table = probing.by_depth(results)
    if table is not None:
        print(table.round(3).to_string())
    for heading, rows in probing.largest(results):
        print(heading)
        print_table(rows)
    save(results, out, model=core.source, prompts=recorded(texts, prompts), seed=seed)


def _probe_part(part: Part, core: LoopedCore, prompts: list, new_tokens: int, options: dict[str, Any], said: Any) -> None:
    """The same two probes on this process's prompts."""
    from probes import convergence, depth_lens

    try:
        with shared_study(part, core, prompts, study="probe", model=core.source, new_tokens=new_tokens, **options) as journal:
            read, mine = list(prompts), part.share.of(len(prompts))
            if new_tokens:
                for i, text in zip(mine, continued(core, [prompts[i] for i in mine], new_tokens, options["seed"], options["depth"])):
                    read[i] = text
            results = [journal.run(f, core, read, part.share, **options) for f in (convergence, depth_lens)]
            part.save(results, journal, len(prompts), model=core.source, prompts=said, seed=options["seed"])
    except AlreadyThere:
        part.say_done()


def run_intervene(model: str, *, task, count, texts, out, start, depth, new_tokens, positions, grid, draft_depth, seed, threads,
                  device=None, dtype=None) -> None:
    part = Part.of_this_process(out)
    core, state = open_model(model, threads, device, dtype), start_state(start)
    label, prompts = read_texts(core, task, count, texts, seed)
    from interventions import depth_grid, mature_v_verdict, prefix_channels

    options = {"depth": depth, "start_state": state, "seed": seed, "new_tokens": new_tokens, "max_positions": positions}
    if part is not None:
        return _intervene_part(part, core, prompts, draft_depth if grid else None, {"task": label, **options}, recorded(texts, prompts))
    channels = prefix_channels(core, prompts, task=label, **options)
    effects = channels.effects()
    results: list[Result] = [channels, effects]
    shown = channels.frame[channels.frame.control == "none"]
    print(f"{core.source}, {len(prompts)} prompts ({label}), start {start}: agreement of a draft with the full-depth token")
    print(shown.pivot_table(index=["depth", "lag"], columns="policy", values="agreement").round(3).to_string())
    for verdict in mature_v_verdict(effects):
        print(verdict.sentence)
    if grid:
        results.append(depth_grid(core, prompts, draft_depth, task=label, **options))
        cells = results[-1].frame.pivot_table(index="k_depth", columns="v_depth", values="agreement")
        print(f"draft of depth {draft_depth}; rows: depth of the prefix's keys, columns: of its values")
        print(cells.round(3).to_string())
    save(results, out, model=core.source, prompts=recorded(texts, prompts), seed=seed)


def _intervene_part(part: Part, core: LoopedCore, prompts: list, grid_depth: int | None, options: dict[str, Any], said: Any) -> None:
    """The same drafts on this process's prompts; effects are over all prompts, and so come with the merge."""
    from interventions import depth_grid, prefix_channels

    try:
        with shared_study(part, core, prompts, study="intervene", model=core.source, grid=grid_depth, **options) as journal:
            results = [journal.run(prefix_channels, core, prompts, part.share, **options)]
            if grid_depth is not None:
                results.append(journal.run(depth_grid, core, prompts, part.share, draft_depth=grid_depth, **options))
            part.save(results, journal, len(prompts), model=core.source, prompts=said, seed=options["seed"])
    except AlreadyThere:
        part.say_done()


def save(results: Iterable[Result], out: str | None, **facts) -> None:
    """Tables and figures of a few results in a new folder, if one was asked for."""
    if out is None:
        return
    import json

    from loopscope.records import manifest, write_text

    results = list(results)
    with run_folder(out) as part:
        for result in results:
            result.save(part / "tables")
        draw({result.kind: result.frame for result in results}, part)
        write_text(json.dumps(manifest(**facts), indent=1, default=str) + "\n", part / "manifest.json")
    print(f"saved in {Path(out)}")


def draw(tables: Mapping[str, pd.DataFrame], folder: Path, published: bool = False) -> None:
    """FOLDER/figures/TABLE.* of every table that there is a figure for. published: with the papers' values, where it can carry them."""
    import figures
    from figures.published import KINDS

    for kind, frame in tables.items():
        if kind in figures.kinds() and len(frame):
            drawn = figures.draw(kind, frame, **({"published": True} if published and kind in KINDS else {}))
            figures.save(drawn, frame, folder / "figures", kind)


def list_models() -> None:
    from loopscope.models.loading import SHIPPED, read_json, shipped_models
    from loopscope.models.registry import config_from_dict

    names = shipped_models()
    for name in names:
        c = config_from_dict(read_json(SHIPPED / name / "config.json"))
        size = sum(f.stat().st_size for f in (SHIPPED / name).iterdir()) / 1e6
        print(f"{name:12} {c.family:7} T = {c.depth:2}, {c.n_prelude} + {c.n_core} + {c.n_coda} layers (prelude, looped, coda), "
              f"width {c.d_model}, context {c.context}, {size:.1f} MB")
    if not names:
        print("no model is shipped with this installation")
    print_families()


def print_families() -> None:
    """The families whose checkpoints load, with what the tests checked of them."""
    from textwrap import indent

    from loopscope.support import CHECKS, FILE, read_support

    support = read_support()
    versions = ", ".join(f"{name} {number}" for name, number in support.versions.items())
    print(f"\nfamilies whose checkpoints load, and what the tests checked of each ({versions}; {FILE.name}, written by the test suite)")
    print(indent(str(support), "  "))
    checks = {check for checks in support.families.values() for check in checks}
    print("\n".join(f"  {check:14} {meaning}" for check, meaning in CHECKS.items() if check in checks))


def print_table(frame: pd.DataFrame) -> None:
    print(frame.to_string(index=False, float_format=lambda x: f"{x:.3g}"))
