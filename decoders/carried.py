"""Decoders whose drafts are not the target's own early readings, replayed from the drafts they would make along a known text.

DAS-Wave: its own rounds from the anchors it would visit, judged by the text, without verification. A refinement of J rounds holds those
of every smaller J, and where it starts from depends on the text alone. So the guesses from one anchor serve every number of rounds up to
theirs (ask for the most rounds first), and the blocks that a decoder would make follow from them: calls and accepts are its own. What
no product of agreements says is in there: a guess becomes right only after its input has, and states are carried from round to round
(docs/algorithms.md, 2.5 and 4). Draft-then-verify on a foreign read policy: decoders/foreign.py. Prompt lookup: the text says it all.
Costs no recurrence at full depth beyond one pass over the text. LoopSpec whose cap on lanes binds is not foretold by any pass over the
text, since which proposals a full tree refuses is for lanes behind wrong drafts to say: there `tried` decodes, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from decoders.calls import Recur, Request, advance
from decoders.counting import das_wave_counts
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.foreign import Chains
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup, lookup
from decoders.replay_counts import Outcome, Text, block_counts, ordered
from decoders.session import Session
from decoders.tally import observed
from loopscope.errors import SettingError
from loopscope.rows import ReadPolicy
from probes.replay import ReplayResult

_MOST = 32  # active positions, and the published capacity
_HELD_BYTES = 2**30  # of texts' caches that are kept open


class _Kind(NamedTuple):
    """What two decoders must share for one refinement to serve both. most: active positions, where rows that froze matter."""

    updates: int
    read: str
    carry: bool | None
    initial_width: int
    growth: int
    most: int


class _Round(NamedTuple):
    """One round of a refinement: its guesses, and the rows of each block call that it took."""

    guesses: list[int]
    rows: tuple[int, ...]


class _Rounds(list):
    """What DAS-Wave tells of its rounds, and what its calls tell of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[int] = []

    def append(self, guesses: list[int]) -> None:
        super().append(_Round(guesses, tuple(self._rows)))
        self._rows.clear()

    def watch(self, request: Request) -> None:
        """A call that has run; the readout that ends a round comes before its guesses."""
        if type(request) is Recur:
            self._rows.append(request.rows.count)


class _Whole:
    """A session whose cache holds a whole text at every depth, and a copy of what it holds."""

    def __init__(self, core: Any, ids: list[int], depth: int, start_state: Any, seed: int, prefix: int) -> None:
        spare = min(_MOST, core.config.context - len(ids)) + 1
        self.session = Session(core, ids, spare, depth, seed, (), start_state, prefix)
        for _ in advance(self.session, self.session.prefill()):
            pass
        self.session.cache.length = self.session.cache.capacity
        self.kept = {name: t.clone() for name, t in self.session.cache.materialised().items()}
        self.bytes = 2 * sum(t.nbytes for t in self.kept.values())

    def restore(self, anchor: int) -> None:
        """Undo what drafts wrote from `anchor` on: it is no part of the text."""
        self.session.cache.length = self.session.cache.capacity
        for name, now in self.session.cache.materialised().items():
            now[..., anchor : anchor + _MOST, :] = self.kept[name][..., anchor : anchor + _MOST, :]


class Refinements:
    """Drafts and blocks from anchors of replayed texts, made when asked for and kept.

    table: decoders.replay.replay of `prompts`. rounds: the most that a DAS-Wave may have. start_state, seed, prefix: as for decoding.
    Of long texts or large models one text's cache is held at a time, so ask text by text.

    Raises SettingError where prompts and texts do not fit each other, and what decoding raises.
    """

    def __init__(self, model: Any, prompts: Sequence[Any], table: ReplayResult, rounds: int = 24, start_state=None, seed: int = 0,
                 prefix: int = 0) -> None:
        self.core, self.texts, self.rounds = model.core, table.prompts(), rounds
        if len(self.texts) != len(prompts):
            raise SettingError(f"the replay has {len(self.texts)} texts and there are {len(prompts)} prompts; replay the same prompts")
        self._ids = [self.core.prompt_tokens(p).tolist() + t.tokens for p, t in zip(prompts, self.texts)]
        self._options = (start_state, seed, prefix)
        self._open: dict[int, _Whole] = {}
        self._chains: dict[int, Chains] = {}
        self._made: dict[tuple[int, _Kind], dict[int, list[_Round]]] = {}
        self._tried: dict[tuple[int, str], Outcome | None] = {}

    @torch.inference_mode()
    def outcome(self, index: int, decoder: Decoder) -> Outcome | None:
        """What `decoder` does on text `index`, as decoders.replay_counts.Outcome says; None for a decoder that this does not replay:
        an aligned one (decoders.replay), one that is not lossless, and DAS-Wave with more rounds or a larger block than is kept here.
        """
        text = self.texts[index]
        if isinstance(decoder, DraftThenVerify) and decoder.read != "aligned":
            return self._sequential(index, text, decoder)
        if isinstance(decoder, PromptLookup):
            return self._copied(index, text, decoder)
        if isinstance(decoder, DASWave) and decoder.rounds <= self.rounds and decoder.capacity <= _MOST:
            return self._refining(index, text, decoder)
        return None

    def tried(self, index: int, decoder: Decoder) -> Outcome | None:
        """What a LoopSpec does on text `index`, by decoding with it: for one whose replay is inexact.

        None for any other decoder, and where it gave another text, as rounding can make it do on a near-tie.
        """
        if not isinstance(decoder, LoopSpec):
            return None
        key = index, decoder.label
        if key not in self._tried:
            text, (start_state, seed, prefix) = self.texts[index], self._options
            prompt = self._ids[index][: text.prompt_length]
            session = decoder._open(self.core, prompt, text.limit, text.depth, seed, (), start_state, prefix)
            made = observed(decoder, session)
            self._tried[key] = made if session.new_tokens == text.tokens else None
        return self._tried[key]

    def _sequential(self, index: int, text: Any, decoder: DraftThenVerify) -> Outcome:
        own = Text(text.tokens[1:], text.limit, text.eos)

        def drafts(anchor: int, most: int) -> list[int]:
            if index not in self._chains:
                self._chains[index] = Chains(self._whole(index).session, self._ids[index], text.prompt_length)
            return self._chains[index].drafts(decoder.read, decoder.draft_depth, anchor, most)

        return block_counts(drafts, own, text.depth, decoder.draft_depth, decoder.block, reuse=False)

    def _copied(self, index: int, text: Any, decoder: PromptLookup) -> Outcome:
        ids, first = self._ids[index], text.prompt_length
        proposed = 0
        checks: Counter[int] = Counter()  # by rows
        accepted, at = [], 1
        while at < len(text.tokens):
            drafts = lookup(ids[: first + at], decoder.ngram, min(decoder.block, text.limit - at - 1))
            ends = next((i for i, token in enumerate(drafts) if token in text.eos), None)
            drafts = drafts if ends is None else drafts[: ends + 1]
            verified = len(drafts) + (ends is None)
            right = next((i for i, (a, b) in enumerate(zip(drafts, text.tokens[at:])) if a != b), min(len(drafts), len(text.tokens) - at))
            judged = right + (right < len(drafts) and at + right < len(text.tokens))
            proposed += judged
            if judged:
                accepted.append(right)
            checks[verified] += 1
            at += min(right + 1, verified)
        widths, once = ordered(_times(checks, text.depth)), ordered(checks)
        return Outcome(sum(widths.values()), checks.total(), checks.total(), sum(w * n for w, n in widths.items()), proposed, sum(accepted),
                       accepted, {}, widths, fresh=once, embedded=once, read=once, checks=checks.total())

    def _refining(self, index: int, text: Any, decoder: DASWave) -> Outcome:
        truth, at, proposed = text.tokens, 1, 0
        accepted: list[int] = []
        runs: list[int] = []  # of the blocks of which a guess was judged: a text that ends at a block's first token judges none
        rounds: list[int] = []
        cuts: list[int | None] = []
        widths, rounds_of, checks = Counter(), Counter(), Counter()  # by rows: refining calls, rounds, verifications
        spared = [0, 0]  # calls and rows that frozen states leave out
        while at < len(truth):
            most = min(decoder.capacity, text.limit - at - 1)
            if most == 0:
                checks[1] += 1
                at += 1
                continue
            history = self._refined(index, text.prompt_length + at - 1, most, decoder)
            j = _stop(decoder, [r.guesses for r in history], most, truth[at - 1])
            guesses = history[j - 1].guesses[: decoder.width(j - 1, most)]
            ends = next((i + 1 for i, token in enumerate(guesses) if token in text.eos), None)
            guesses = guesses[:ends]
            right = next((i for i, (guess, token) in enumerate(zip(guesses, truth[at:])) if guess != token), min(len(guesses),
                                                                                                                 len(truth) - at))
            judged = right + (right < len(guesses) and at + right < len(truth))
            proposed += judged
            runs += [right] * bool(judged)
            accepted.append(right)
            rounds.append(j)
            cuts.append(ends)
            full = [decoder.width(i, most) for i in range(j)]
            rounds_of.update(full)
            if self._freezes(decoder):
                run = [n for r in history[:j] for n in r.rows]
                spared[0] += j * decoder.updates - len(run)
                spared[1] += decoder.updates * sum(full) - sum(run)
                widths.update(run)
            else:
                widths.update(full * decoder.updates)
            verified = full[-1] + decoder.bonus if ends is None else ends
            checks[verified] += 1
            at += min(right + 1, verified)
        once = ordered(rounds_of + checks)
        counts = das_wave_counts(accepted, len(truth), text.depth, rounds, decoder.updates, decoder.capacity, decoder.initial_width,
                                 decoder.growth, decoder.bonus, text.limit, cuts)
        return Outcome(counts.recur - spared[0], counts.prelude, counts.readout, counts.rows - spared[1], proposed, sum(accepted), runs,
                       {}, ordered(widths + _times(checks, text.depth)), fresh=ordered(widths + checks), embedded=once, read=once,
                       checks=checks.total(), unread=0 if self._looks(decoder) else sum(rounds) - len(rounds))

    def rounds_from(self, index: int, place: int, decoder: DASWave) -> list[list[int]]:
        """The guesses of every round that `decoder` would make behind new token `place` (from 1 on: its block guesses from there on)."""
        text = self.texts[index]
        most = min(decoder.capacity, _MOST, max(text.limit - place - 1, 1))
        history = self._refined(index, text.prompt_length + place - 1, most, decoder)
        return [r.guesses[: decoder.width(j, most)] for j, r in enumerate(history)]

    def _looks(self, decoder: DASWave) -> bool:
        """Whether it reads its guesses after every round, and not only after the last."""
        return self._freezes(decoder) or decoder.stable is not None

    def _freezes(self, decoder: DASWave) -> bool:
        return decoder.carry is None and not self.core.config.injects

    def _refined(self, index: int, anchor: int, most: int, decoder: DASWave) -> list[_Round]:
        """The rounds from one anchor, at least as many as the decoder has."""
        frozen = self._freezes(decoder)
        kind = _Kind(decoder.updates, decoder.read, decoder.carry, decoder.initial_width, decoder.growth, most if frozen else _MOST)
        made = self._made.setdefault((index, kind), {})
        if len(made.get(anchor, ())) < decoder.rounds:  # no more rounds than are asked for: few rounds start from many anchors
            whole = self._whole(index)
            session = whole.session
            session.tokens, session.cache.length = self._ids[index][: anchor + 1], anchor
            injects = session.core.config.injects
            carry = injects if decoder.carry is None else decoder.carry
            deepest = DASWave(decoder.rounds, kind.updates, _MOST, kind.initial_width, kind.read, kind.carry, kind.growth)
            policy, history = ReadPolicy.named(kind.read, session.depth), _Rounds()
            steps = deepest._refine(session, anchor, min(kind.most, session.cache.capacity - anchor), policy, carry, frozen, history)
            for _ in advance(session, steps, history.watch):
                pass
            whole.restore(anchor)
            session.tokens = self._ids[index]
            made[anchor] = history
        return made[anchor]

    def _whole(self, index: int) -> _Whole:
        if index not in self._open:
            if sum(whole.bytes for whole in self._open.values()) * (len(self._open) + 1) > _HELD_BYTES * max(len(self._open), 1):
                self._open.clear()
                self._chains.clear()
            self._open[index] = _Whole(self.core, self._ids[index], self.texts[index].depth, *self._options)
        return self._open[index]


def _times(counts: Counter, n: int) -> Counter:
    return Counter({key: n * count for key, count in counts.items()})


def _stop(decoder: DASWave, guesses: Sequence[Sequence[int]], most: int, first: int) -> int:
    """After how many rounds the decoder stops refining: all of them, or where its guesses have been stable for long enough."""
    calm = 0
    before = [first]
    for j in range(decoder.rounds):
        width = decoder.width(j, most)
        now = [first, *guesses[j][:width]]
        calm = calm + 1 if j and now[: len(before)] == before[: width + 1] else 0
        if decoder.stable is not None and calm >= decoder.stable:
            return j + 1
        before = now
    return decoder.rounds
