"""`loopscope verify`: the losslessness ladder, and its certificate."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.folder import run_folder
from loopscope.cli.progress import Stages
from loopscope.cli.study import open_model
from loopscope.errors import LoopscopeError, RunFolderError, SettingError

if TYPE_CHECKING:
    from decoders import Decoder
    from decoders.certificate import Certificate

_Job = Generator[list[dict[str, Any]], None, None]  # the records of one case, or of one decoder, at a time
FULL, SOME = 5000, 300  # generations on random models
_PER_SEED = 1_000_000  # cases are numbered from seed times this
_PROMPTS, _NEW_TOKENS = {False: 1, True: 4}, {False: 24, True: 64}  # of each built-in task, by --full

# On random models a name without settings means any settings.
_KINDS = {"AR": ("ar",), "WFD": ("wfd", "wfd re"), "DtV": ("dtv", "dtv deep"), "DtV deep reads": ("dtv deep",), "DAS-Wave": ("das-wave",),
          "LoopSpec": ("loopspec",), "PLD": ("pld",)}


def run_verify(model: str | None, names: list[str] | None, *, full: bool, seed: int, case: int | None, workers: int, out: str | None,
               threads: int) -> int:
    """Print the certificate and save it; 0 if it passed, 1 if not, 130 if it was interrupted."""
    from decoders.certificate import Certificate
    from decoders.ladder import KINDS
    from decoders.named import decoder
    from decoders.rungs import kind_of

    chosen = [decoder(name) for name in names or ()]  # a wrong name is said at once
    _check(chosen, workers, out)
    pool = [kind for name, d in zip(names or (), chosen) for kind in (_KINDS[kind_of(d)] if len(name.split()) == 1 else (d,))] or KINDS
    if case is not None:
        if model is not None:
            raise SettingError("--case reruns a case on the random model that it names; leave out --model")
        return _one_case(case, pool)
    # What runs is what was on disk when it began.
    facts = _facts(seed=seed, full=full, model=model, decoders=[d.label for d in chosen], workers=workers)
    records: list[dict[str, Any]] = []
    complete, begin = False, time.monotonic()
    with Stages([1.0]) as stages:
        job = _on_model(model, chosen, full, seed, threads, stages) if model else _on_random_models(pool, full, seed, workers, stages)
        try:
            for some in job:
                records += some
            complete = True
        except KeyboardInterrupt:
            job.close()
    certificate = Certificate.of(records, {**facts, "complete": complete, "seconds": round(time.monotonic() - begin, 1)})
    print(certificate.text())
    print(_scope(certificate, model))
    if out is not None:
        _save(certificate, out)
    return 130 if not complete else 0 if certificate.passed else 1


def _scope(certificate: Certificate, model: str | None) -> str:
    """What was held to plain decoding, by label, and what this certificate does not speak of."""
    labels = sorted(set(certificate.frame["schedule"]))
    shown = ", ".join(labels[:12]) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")
    if model is None:
        left = "trained weights, GPUs and compiled or static decoding (loopscope verify --model MODEL; loopscope gpu-check)"
    else:
        left = ("sampling, stop texts, EOS at chosen places, other limits, depths, seeds and settings of these decoders, which are drawn "
                "on random models (loopscope verify without --model); prompts longer than these; GPUs (loopscope gpu-check)")
    return f"decoders: {shown or 'none'}\nnot tried: {left}"


def _check(chosen: list[Decoder], workers: int, out: str | None) -> None:
    """What can be wrong is said before minutes are spent."""
    if not 1 <= workers <= 4 * (os.cpu_count() or 1):
        raise SettingError(f"--workers {workers} is not usable here; expected 1 to {4 * (os.cpu_count() or 1)}")
    for d in chosen:
        if not d.lossless:
            raise SettingError(f"{d.label} is not lossless: it need not give the tokens of plain decoding, so nothing is to certify; "
                               "loopscope bench counts how many of them it does give")
    if out is not None:
        path = Path(out).expanduser()
        if os.path.lexists(path):
            raise RunFolderError(f"{out} exists; choose another --out")
        above = next(p for p in path.absolute().parents if p.exists())  # whatever is missing in between will be made
        if not above.is_dir() or not os.access(above, os.W_OK) or len(path.name.encode()) > 200:
            why = "is not writable" if above.is_dir() else "is a file"
            raise RunFolderError(f"{out} cannot be written: {above} {why}, or the name is too long; choose another --out")


def _on_random_models(pool: Sequence[Decoder | str], full: bool, seed: int, workers: int, stages: Stages) -> _Job:
    from itertools import count

    import torch

    from decoders.ladder import case
    from decoders.rungs import random_records

    torch.set_num_threads(1)
    wanted, numbers, drawn = FULL if full else SOME, [], 0
    for number in count(seed * _PER_SEED):
        if drawn >= wanted:
            break
        numbers.append(number)
        drawn += len(case(number, decoders=pool).prompts)
    with stages.stage(f"{drawn} generations on random models of all families"):
        for done, records in enumerate(random_records(numbers, pool, workers), start=1):
            stages.advance(done, len(numbers))
            if not stages.terminal and done * 10 // len(numbers) > (done - 1) * 10 // len(numbers):
                print(f"{done} of {len(numbers)} cases", file=sys.stderr, flush=True)  # a long run's log says how far it is
            yield records


def _on_model(name: str, chosen: list[Decoder], full: bool, seed: int, threads: int, stages: Stages) -> _Job:
    from decoders.rungs import LEVELS, model_records, schedules_for

    import loopscope

    core = open_model(name, threads)
    decoders = chosen or schedules_for(core, core.config.depth)
    prompts = _prompts(core, _PROMPTS[full], seed)
    with stages.stage(f"{len(decoders)} decoders on {name} in float64, float32 and bfloat16"):
        def load(dtype):
            return loopscope.load(name, hooked=False, dtype=dtype).core

        jobs = model_records(load, prompts, decoders, _NEW_TOKENS[full], seed=seed)
        for done, records in enumerate(jobs, start=1):
            stages.advance(done, len(decoders) * len(LEVELS))
            yield records


def _prompts(core, count: int, seed: int) -> list:
    """Built-in prompts of both tasks; random tokens where the model came without a tokenizer."""
    if core.tokenizer is None:
        draw = random.Random(f"prompts to verify {seed}")
        return [[draw.randrange(core.config.vocab_size) for _ in range(draw.randint(1, 24))] for _ in range(2 * count)]
    from loopscope.tiny.prompts import prompts

    return [*prompts("maths", count, seed), *prompts("code", count, seed)]


def _one_case(number: int, pool: Sequence[Decoder | str]) -> int:
    """A case of a certificate again: what is drawn, and what comes of it."""
    import torch

    from decoders.ladder import case, check

    torch.set_num_threads(1)
    drawn = case(number, decoders=pool)
    print(drawn)
    try:
        verdicts = check(drawn)
    except LoopscopeError as error:  # what is refused here is no mistake of the user's
        print(f"{type(error).__name__}: {error}")
        return 1
    for verdict in verdicts:
        print(verdict)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def _facts(**facts: Any) -> dict[str, Any]:
    from loopscope.records import manifest

    return manifest(**facts)


def _save(certificate: Certificate, out: str) -> None:
    """FOLDER/certificate.json and .parquet; or FILE.json and FILE.parquet beside it."""
    from loopscope.records import write_table, write_text

    path = Path(out).expanduser()
    text = json.dumps(certificate.facts(), indent=1, default=str) + "\n"
    if path.suffix == ".json":
        write_table(certificate.frame, path.with_suffix(".parquet"), certificate.meta)
        write_text(text, path)
    else:
        with run_folder(out) as part:
            certificate.save(part)
            write_text(text, part / "certificate.json")
    print(f"saved in {path}", file=sys.stderr)
