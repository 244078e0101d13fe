"""DAS-Wave replayed: its own rounds from the anchors it would visit in a known text, judged by the text, without verification.

A refinement of J rounds holds those of every smaller J, and where it starts from depends on the text alone. So the guesses from one
anchor serve every number of rounds up to theirs (ask for the most rounds first), and the blocks that a decoder would make follow from
them: calls and accepts are its own. What
no product of agreements says is in there: a guess becomes right only after its input has, and states are carried from round to round
(docs/algorithms.md, 2.5 and 4). Costs no recurrence at full depth beyond one pass over the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from decoders.calls import advance
from decoders.counting import das_wave_counts
from decoders.das_wave import DASWave
from decoders.replay_counts import Outcome
from decoders.session import Session
from loopscope.errors import SettingError
from loopscope.rows import ReadPolicy
from probes.replay import ReplayResult

_MOST = 32  # active positions, and the published capacity


class _Kind(NamedTuple):
    """What two decoders must share for one refinement to serve both."""

    updates: int
    read: str
    carry: bool | None
    initial_width: int
    growth: int


class Refinements:
    """Blocks refined from anchors of replayed texts, made when asked for and kept.

    table: decoders.replay.replay of `prompts`. rounds: the most a decoder may have. Raises SettingError where prompts and texts do
    not fit each other, and what decoding raises.
    """

    def __init__(self, model: Any, prompts: Sequence[Any], table: ReplayResult, rounds: int = 24, start_state=None, seed: int = 0) -> None:
        self.core, self.texts, self.rounds = model.core, table.prompts(), rounds
        if len(self.texts) != len(prompts):
            raise SettingError(f"the replay has {len(self.texts)} texts and there are {len(prompts)} prompts; replay the same prompts")
        self._ids = [self.core.prompt_tokens(p).tolist() + t.tokens for p, t in zip(prompts, self.texts)]
        self._options = (start_state, seed)
        self._sessions: dict[int, tuple[Session, dict[str, torch.Tensor]]] = {}
        self._made: dict[tuple[int, _Kind], dict[int, list[list[int]]]] = {}

    @torch.inference_mode()
    def outcome(self, index: int, decoder: DASWave) -> Outcome | None:
        """What `decoder` does on text `index`: recur, proposed and accepted are what it would count; None beyond these rounds.

        rows, preludes and readouts are exact where no drafted end of text cuts a block short.
        """
        if decoder.rounds > self.rounds or decoder.stable is not None or not decoder.bonus or decoder.capacity > _MOST:
            return None
        text = self.texts[index]
        truth, accepted, proposed, at = text.tokens, [], 0, 1
        while at < len(truth):
            most = min(decoder.capacity, text.limit - at - 1)
            if most == 0:
                at += 1
                continue
            width = decoder.width(decoder.rounds - 1, most)
            guesses = self._refined(index, text.prompt_length + at - 1, decoder)[decoder.rounds - 1][:width]
            right = next((i for i, (guess, token) in enumerate(zip(guesses, truth[at:])) if guess != token), min(width, len(truth) - at))
            ended = at + right >= len(truth)  # the text ends among the accepted
            proposed += right + (right < width and not ended)
            accepted.append(right)
            at += right + 1
        counts = das_wave_counts(accepted, len(truth), text.depth, decoder.rounds, decoder.updates, decoder.capacity, decoder.initial_width,
                                 growth=decoder.growth, limit=text.limit)
        exact = self.core.config.injects or decoder.carry is False  # frozen rows leave calls out once all are frozen
        cut = len(truth) < text.limit
        return Outcome(counts.recur, counts.prelude, counts.readout, counts.rows, proposed, sum(accepted), accepted, {},
                       _widths(decoder, accepted, len(truth), text.limit, text.depth), exact, exact and not cut,
                       "" if exact and not cut else "frozen rows, or an end of text, may leave calls or rows out")

    def _refined(self, index: int, anchor: int, decoder: DASWave) -> list[list[int]]:
        """The guesses after every round from one anchor."""
        kind = _Kind(decoder.updates, decoder.read, decoder.carry, decoder.initial_width, decoder.growth)
        made = self._made.setdefault((index, kind), {})
        if len(made.get(anchor, ())) < decoder.rounds:  # no more rounds than are asked for: few rounds start from many anchors
            session, whole = self._session(index)
            session.tokens, session.cache.length = self._ids[index][: anchor + 1], anchor
            injects = session.core.config.injects
            carry = injects if decoder.carry is None else decoder.carry
            deepest = DASWave(decoder.rounds, kind.updates, _MOST, kind.initial_width, kind.read, kind.carry, kind.growth)
            most, policy = min(_MOST, session.cache.capacity - anchor), ReadPolicy.named(kind.read, session.depth)
            history: list[list[int]] = []
            steps = deepest._refine(session, anchor, most, policy, carry, decoder.carry is None and not carry, history)
            for _ in advance(session, steps):
                pass
            session.cache.length = session.cache.capacity
            for name, kept in session.cache.materialised().items():  # what the drafts wrote there is no part of the text
                kept[..., anchor : anchor + _MOST, :] = whole[name][..., anchor : anchor + _MOST, :]
            made[anchor] = history
        return made[anchor]

    def _session(self, index: int) -> tuple[Session, dict[str, torch.Tensor]]:
        """A session whose cache holds the whole text at every depth, and a copy of what it holds."""
        if index not in self._sessions:
            self._sessions.clear()  # one text's cache at a time
            start_state, seed = self._options
            ids = self._ids[index]
            spare = min(_MOST, self.core.config.context - len(ids)) + 1
            session = Session(self.core, ids, spare, self.texts[index].depth, seed, (), start_state)
            for _ in advance(session, session.prefill()):
                pass
            session.cache.length = session.cache.capacity
            self._sessions[index] = session, {name: t.clone() for name, t in session.cache.materialised().items()}
        return self._sessions[index]


def _widths(decoder: DASWave, accepted: Sequence[int], tokens: int, limit: int, depth: int) -> dict[int, int]:
    """Block calls by rows per call."""
    widths: Counter[int] = Counter()
    at, blocks = 1, iter(accepted)
    while at < tokens:
        most = min(decoder.capacity, limit - at - 1)
        if most == 0:
            widths[1] += depth
            at += 1
            continue
        for j in range(decoder.rounds):
            widths[decoder.width(j, most)] += decoder.updates
        widths[decoder.width(decoder.rounds - 1, most) + 1] += depth
        at += next(blocks) + 1
    return dict(widths)
