"""Random draws for the losslessness ladder: everything that a decode depends on, from one whole number.

    print(case(4711))           what is drawn
    check(case(4711))           decode it, and hold every sequence to autoregressive decoding

A case is the same on every machine, so a certificate names the cases that failed by their numbers.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup
from decoders.reference import Reference, follow
from decoders.sampling import Sampling
from decoders.verify import Verdict, verify_against
from decoders.wavefront import Wavefront
from loopscope.errors import DepthWarning, SettingError
from loopscope.models.looped import LoopedCore
from loopscope.random_models import FAMILIES, make_random_core, settings_of
from loopscope.rows import POLICIES

# From drafts that are nearly always right to drafts that are nearly always wrong, most weight between.
GAINS = (0.0, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.5, 0.5, 0.7, 0.7, 1.0, 1.5)
SAMPLINGS = (Sampling(0.7, top_p=0.9), Sampling(1.3, top_p=0.9), Sampling(0.7), Sampling(1.3, top_k=8), Sampling(1.0, min_p=0.05))
VOCAB = 64
KINDS = ("wfd", "wfd re", "dtv", "dtv deep", "das-wave", "das-wave", "loopspec", "pld", "ar")
_DEEP = 24  # a depth at which random maps are chaotic: rounding grows along the recurrences
_SIZES: dict[str, Any] = {"n_core": 2, "n_prelude": 1, "n_coda": 1, "vocab_size": VOCAB}


@dataclass(frozen=True)
class Case:
    """One draw. eos: which tokens of the first sequence's autoregressive text are declared to end a sequence; stop: the piece
    of its text that does (first letter, letters; a token has three). Both are found by decoding it first.
    """

    number: int
    family: str
    gain: float
    model_seed: int
    decoder: Decoder
    depth: int
    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling | None = None
    start: str | None = None
    prefix: int = 0
    eos: tuple[int, ...] = ()
    stop: tuple[int, int] | None = None


def case(number: int, families: Sequence[str] = FAMILIES, decoders: Sequence[Decoder | str] = KINDS) -> Case:
    """The case of that number: a pure function of it, of the families and of the decoders, where one of KINDS means any settings."""
    draw = random.Random(f"losslessness ladder {number}")
    depth = _DEEP if draw.random() < 0.02 else draw.randint(2, 7)
    decoder = draw.choice(list(decoders))
    if isinstance(decoder, str):
        decoder = schedule(decoder, depth, draw)
    depth = max(depth, _least_depth(decoder))
    family = draw.choice([f for f in families if runs_on(decoder, f)])
    gain, batch = draw.choice(GAINS), draw.choice((1, 1, 2, 3, 4))
    lengths = [draw.choice((1, draw.randint(2, 9), draw.randint(2, 9))) for _ in range(batch)]
    limits = [draw.choice((draw.randint(1, 3), *[draw.randint(4, 12)] * 3, *[draw.randint(12, 24)] * 3)) for _ in range(batch)]
    ends, cut, start = draw.random(), draw.random(), draw.choice((None, None, "zero"))
    return Case(
        number, family, gain, draw.randrange(3), decoder, depth,
        tuple(tuple(draw.randrange(VOCAB) for _ in range(length)) for length in lengths), tuple(limits),
        tuple(draw.randrange(-3, 2**40) for _ in range(batch)), sampling=None if draw.random() < 0.55 else draw.choice(SAMPLINGS),
        start=start if family in STARTS else None, prefix=draw.randint(0, min(lengths)) if family == "hrm_text" else 0,
        eos=tuple(draw.randrange(24) for _ in range(draw.choice((1, 1, 2)))) if ends < 0.35 else (),
        stop=(draw.randrange(60), draw.randint(1, 5)) if cut < 0.12 else None)


STARTS = ("huginn", "raven", "raven_olmo", "parcae")  # families with a start state of their own


def runs_on(decoder: Decoder, family: str) -> bool:
    """Whether a family's models can run a decoder at all: branches need whole prefixes, carried states an injection."""
    if isinstance(decoder, LoopSpec):
        return family != "dory"
    return not (isinstance(decoder, DASWave) and decoder.carry) or model(family, GAINS[0], 0).config.injects


def _least_depth(decoder: Decoder) -> int:
    return max(getattr(decoder, "draft_depth", 1), (getattr(decoder, "second_depth", None) or 0) + 1)


def schedule(kind: str, depth: int, draw: random.Random) -> Decoder:
    """A decoder of one of KINDS with drawn settings, at full depth T."""
    d = draw.randint(1, min(depth, 4))
    if kind == "ar":
        return Autoregressive()
    if kind == "wfd":
        return Wavefront(d)
    if kind == "wfd re":
        return Wavefront(d, redraft=draw.randint(1, 3))
    if kind == "pld":
        return PromptLookup(draw.randint(1, 6), draw.randint(1, 3))
    if kind == "loopspec":
        first = draw.randint(1, max(1, depth - 2))
        second = draw.randint(first + 1, depth - 1) if first + 1 < depth else None
        return LoopSpec(first, second, draw.choice((0.0, 0.0, 0.1)), draw.choice((64, 64, 5)))
    if kind in ("dtv", "dtv deep"):
        return DraftThenVerify(d, draw.randint(1, 6), "aligned" if kind == "dtv" else draw.choice(POLICIES[1:]))
    return DASWave(draw.randint(1, 6), draw.randint(1, 3), capacity=draw.choice((1, 4, 32)), initial_width=draw.randint(1, 3),
                   read=draw.choice(("deep_kv", "deep_kv", *POLICIES)), carry=draw.choice((None, None, False)),
                   growth=draw.choice((0, 1, 1, 2)), stable=draw.choice((None, None, 1, 2)), bonus=draw.random() < 0.7)


@lru_cache(maxsize=256)
def model(family: str, gain: float, seed: int) -> LoopedCore:
    """The random model of a case, in float64, with a tokenizer of three letters a token."""
    sizes = {name: size for name, size in _SIZES.items() if name in settings_of(family)}
    if family == "hrm_text" or seed:  # one looped layer in two of three models: they cost less (hrm_text runs it three times)
        sizes["n_core"] = 1
    core = make_random_core(family, gain=gain, seed=seed, **sizes)
    core.tokenizer = Letters()
    return core


class Letters:
    """Three letters a token, so that a stop string may begin and end inside one."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(f"{chr(97 + i % 3)}{chr(65 + i // 16)}{chr(65 + i % 16)}" for i in ids)


@torch.inference_mode()
def check(drawn: Case) -> list[Verdict]:
    """Decode a case, one verdict for each sequence. Raises SettingError for decoders that are not lossless."""
    if not drawn.decoder.lossless:
        raise SettingError(f"{drawn.decoder.label} is {drawn.decoder.fidelity}: its tokens need not be autoregressive decoding's")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthWarning)  # depths the family was not made for are meant
        core, references, stop = opened(drawn)
        return verify_against(drawn.decoder, core, references, stop, drawn.start, drawn.prefix, drawn.sampling)


def opened(drawn: Case) -> tuple[LoopedCore, list[Reference], str | tuple[()]]:
    """The model of a case with its EOS declared, what each sequence must come to, and the stop string.

    The references are decoded without an end, one sequence at a time, and cut where they should have stopped.
    """
    core = model(drawn.family, drawn.gain, drawn.model_seed)
    references = [follow(core, list(prompt), limit, drawn.depth, seed, (), drawn.start, drawn.prefix, drawn.sampling)
                  for prompt, limit, seed in zip(drawn.prompts, drawn.limits, drawn.seeds, strict=True)]
    said = references[0].new_tokens
    eos = {said[i % len(said)] for i in drawn.eos}
    stop = ""
    if drawn.stop is not None:
        text, (at, length) = str(core.to_text(said)), drawn.stop
        stop = text[at % len(text) :][:length]
    if eos or stop:
        references = [reference.ended(eos, stop) for reference in references]
    return with_eos(core, eos) if eos else core, references, stop or ()


def with_eos(core: LoopedCore, eos) -> LoopedCore:
    """The same weights under a config with other end-of-sequence ids."""
    other = object.__new__(type(core))
    other.__dict__ = dict(core.__dict__)
    other.config = dataclasses.replace(core.config, eos=tuple(sorted(eos)))
    return other
