"""A wavefront (and AR, a wave of one lane) whose turns run on the device: d recurrences, one readout, one acceptance (static.py).

Where d divides T every lane stands at a multiple of d between turns, so lane classes 0, d, 2d, .. T - d are fixed rows of fixed
buffers, front first, and a turn moves every lane one row up. A reject empties the rows and puts the target's token into the last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from decoders.calls import advance
from decoders.graphs import Captured, Eager
from decoders.session import Session
from decoders.static import Turn
from loopscope.cache import DepthCache
from loopscope.rows import At, Chain, Wave


@dataclass
class _Books:
    """The wave as the host knows it, from what it has read: the generator's own bookkeeping (decoders/wavefront.py)."""

    front: int
    tokens: list[int] = field(default_factory=list)
    low: int = 0  # turns that the youngest lane has run
    guess: int | None = None  # what the youngest lane drafted, where no lane was spawned behind it
    pending: int | None = None

    @property
    def young(self) -> int:
        """The last position that a lane stands at."""
        return self.front + len(self.tokens) - 1 + (self.pending is not None)


class StaticWave(Turn):
    """draft_depth divides depth; equal to it: autoregressive decoding."""

    alone = False  # never spawn a lane behind another (padded_autoregressive)

    def __init__(self, session: Session, cache: DepthCache, draft_depth: int, runner: Eager | Captured) -> None:
        self.step, self.lanes = draft_depth, session.depth // draft_depth
        super().__init__(session.core, cache, session.depth, self.lanes, 4, runner)
        x = self.core.embed(self.tok[:1, None])  # what travels with a row is the family's affair
        state = self.core.start(x)
        self.x, self.state = (t.new_zeros(1, self.lanes, t.shape[-1]) for t in (x, state))

    def turn(self, count: int, low: int, spawn: bool, reads: tuple[bool, bool], front: int | None, reach: int) -> None:
        """d recurrences of `count` lanes, the youngest of which has run `low` turns, and what follows from their readout.

        spawn: the last row's token is embedded first. reads: the front's target, the youngest's draft. front: its position.
        """
        core, cache, last, d = self.core, self.cache, self.lanes - 1, self.step
        a, b = self.lanes - low - count, self.lanes - low
        known = front is not None
        at, live = self.at[a:b], self.live[a:b]
        if spawn:
            own = self.rows(self.at[last:], self.live[last:], (1,), front + count - 1 if known else None, reach)
            self.x[:, last:] = core.embed(self.tok[None, last:], own, cache)
            self.state[:, last:] = self.begin(self.x[:, last:], self.at[last:])
        state, x = self.state[:, a:b], self.x[:, a:b]
        shared: Any = None if known else self.rows(at, live, (1,) * count, None, reach)
        for k in range(1, d + 1):
            depths = tuple((low + count - 1 - i) * d + k for i in range(count))
            state = core.recur(state, x, Wave(front, depths) if known else shared.at_depths(depths), cache)
        if any(reads):
            picked = [i for i, wanted in zip((0, count - 1), reads) if wanted]
            if known:
                rows: Any = Chain(front + picked[0], 1) if len(picked) == 1 else At(tuple(front + i for i in picked))
            else:
                rows = shared.part(picked)
            stride = max(picked[-1] - picked[0], 1)
            part = slice(picked[0], picked[-1] + 1, stride)
            tokens, bad = self.choose(state[:, part], rows, at[part], [draft for draft, wanted in zip((False, True), reads) if wanted])
            begin, stop = (0 if reads[0] else 1), (2 if reads[1] else 1)
            self.mail[begin:stop] = tokens
            self.mail[2 + begin : 2 + stop] = bad
        self._accept(reads)
        self._move_up(state, a, b)

    def _accept(self, reads: tuple[bool, bool]) -> None:
        """Commit, keep or drop lanes, and place the next one: all on the device."""
        at, tok, live, target, draft = self.at, self.tok, self.live, self.mail[:1], self.mail[1:2]
        # Nothing is drafted of an input that cannot matter, and nothing is spawned behind a drafted EOS.
        drafts = reads[1] and not self.alone
        young = live[-1:] & (at[-1:] < self.end) & ~torch.isin(draft, self.eos) if drafts else live.new_zeros(1)
        where, token = at[-1:] + 1, draft
        kept = live[1:]
        if reads[0]:
            restart = live[:1]
            if self.lanes > 1:
                restart = restart & ~(live[1:2] & (tok[1:2] == target))
                kept = kept & ~restart
            where = torch.where(restart, at[:1] + 1, where)
            token = torch.where(restart, target, token)
            young = torch.where(restart, where <= self.end, young)
        if self.lanes > 1:
            where, token, young = torch.cat((at[1:], where)), torch.cat((tok[1:], token)), torch.cat((kept, young))
        at.copy_(where)
        tok.copy_(token)
        live.copy_(young)

    def _move_up(self, state: torch.Tensor, a: int, b: int) -> None:
        """Every lane's state and x one row up; the front's, if it is done, go."""
        if self.lanes == 1:
            return
        first = max(a - 1, 0)
        self.state[:, first : b - 1] = state[:, first + 1 - a :]
        self.x[:, first : b - 1] = self.x[:, first + 1 : b].clone()

    # ---- the host's side ------------------------------------------------------------------------------------------

    def decode(self, session: Session, lag: int) -> None:
        books = _Books(len(session.tokens) - 1, pending=session.tokens[-1])
        sent: deque = deque()
        turns = 0
        while not session.finished:
            self._launch(session, books, len(sent))
            sent.append(self.post(turns % (lag + 1)))
            turns += 1
            if len(sent) > lag:
                self._settle(session, books, sent.popleft())
        session.ahead += len(sent) * self.step

    def _launch(self, session: Session, books: _Books, unread: int) -> None:
        """Run the next turn. unread: turns whose mail has not been read, each of which may have added a lane."""
        spawn = books.pending is not None
        count, low = len(books.tokens) + spawn, 0 if spawn else books.low
        if self.runner.knows:
            reads = low + count == self.lanes, low == 0 and self.step < self.depth and books.young < session.last_input
            self.turn(count, low, spawn, reads, books.front, books.young + 1)
            return
        count = self.runner.rows(min(low + count + unread, self.lanes), self.lanes)
        reach = self.runner.reach(min(books.young + unread, session.last_input) + 1, self.cache.capacity)
        reads = count == self.lanes, self.step < self.depth
        self.runner.run((count, reach), lambda: self.turn(count, 0, True, reads, None, reach))

    def _settle(self, session: Session, books: _Books, box: tuple[torch.Tensor, Any]) -> None:
        """What a turn came to, written down as the generator does."""
        d, full = self.step, self.depth
        if books.pending is not None:
            books.tokens.append(books.pending)
            books.pending, books.guess, books.low = None, None, 0
            session.counts["prelude"] += 1
        count, low = len(books.tokens), books.low
        for k in range(1, d + 1):
            session.ran(Wave(books.front, tuple((low + count - 1 - i) * d + k for i in range(count))))
        session.counts["recur"] += d
        session.counts["rows"] += d * count
        books.low += 1
        ready = (low + count) * d == full
        drafting = low == 0 and d < full and books.young < session.last_input
        session.counts["readout"] += ready or drafting
        if not (ready or drafting):
            return  # nothing to read
        target, draft, *bad = self.open_mail(box)
        for wanted, nan, place in ((ready, bad[0], 0), (drafting, bad[1], count - 1)):
            if wanted and nan:
                session.refuse_nan(books.front + place)
        if drafting:
            session.event(books.young + 1, d, "draft", draft)
        if ready:
            guess = books.tokens[1] if count > 1 else books.guess
            session.cache.commit(books.front + 1)
            if guess is not None:
                session.judge(guess == target, books.front + 1, guess)
            session.commit(target)
            if guess != target or count == 1:
                books.front, books.tokens, books.pending, drafting = books.front + 1, [], target, False
            else:
                books.front, books.tokens = books.front + 1, books.tokens[1:]
        if drafting:
            books.guess = draft
            books.pending = None if draft in session.eos else draft



class Filled(Captured):
    """Every turn has all lanes and one reach, filled up with rows that do nothing, and runs as ever: calls of one shape throughout."""

    def rows(self, count: int, most: int) -> int:
        return most

    def run(self, key, phase):
        phase()


def padded_autoregressive(session: Session, draft_depth: int) -> list[int]:
    """Plain decoding in calls of a wave's shape: one live lane at a time among T / d, the others filled up. Gives the new tokens.

    Rung L3 (docs/algorithms.md, 2.7): a wave run with `Filled` makes calls of this very shape, so in bfloat16, where a row's rounding
    depends on how many rows a call has, both must give the same tokens.
    """
    cache = session.cache = session.core.make_cache(session.cache.capacity, session.depth, spare=1)
    runner = Filled(cache.capacity)
    wave = StaticWave(session, cache, draft_depth, runner)
    wave.alone = True
    deque(advance(session, session.prefill()), maxlen=0)
    wave.open(session)
    while not session.finished:
        for _ in range(wave.lanes):
            wave.turn(wave.lanes, 0, True, (True, True), None, cache.capacity)
        session.commit(int(wave.mail[0]))
    return session.new_tokens
