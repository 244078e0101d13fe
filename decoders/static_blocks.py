"""DAS-Wave's block as one turn on the device: J rounds of guesses, their verification, and how much of it stands (static.py).

A block's shape is fixed: the width of round j, and one row more to verify. What varies is data: where it stands, how many
positions are left before the limit, and which guess is an EOS, behind which nothing may be committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decoders.graphs import Captured, Eager
from decoders.session import Session
from decoders.static import Turn
from loopscope.cache import DepthCache
from loopscope.rows import Chain, ReadPolicy

if TYPE_CHECKING:
    from decoders.das_wave import DASWave


class StaticBlocks(Turn):
    """The mail: guesses, targets, and which of either came from NaN."""

    def __init__(self, session: Session, cache: DepthCache, decoder: DASWave, runner: Eager | Captured) -> None:
        self.decoder = decoder
        self.carry = session.core.config.injects if decoder.carry is None else decoder.carry
        self.policy = ReadPolicy.named(decoder.read, session.depth)
        self.most = decoder.width(decoder.rounds - 1, decoder.capacity)
        super().__init__(session.core, cache, session.depth, 1, 4 * (self.most + 1), runner)
        self.ahead = torch.arange(self.most + 1, device=cache.device)

    def turn(self, most: int, anchor: int | None, reach: int) -> None:
        """A block of at most `most` guesses; 0: a plain step."""
        decoder, widest = self.decoder, self.decoder.width(self.decoder.rounds - 1, most)
        guesses, bad_guesses = self._refine(most, anchor, reach) if most else (self.tok[:0], self.live[:0])
        inputs = torch.cat((self.tok, guesses))
        count = widest + 1 if decoder.bonus or not most else widest
        inputs = inputs[:count]
        # A row behind an EOS, or whose output lies beyond the limit, is not part of the block.
        at = self.at + self.ahead[:count]
        ended = torch.isin(inputs, self.eos)
        ended[:1].zero_()
        within = at <= self.end if decoder.bonus or not most else at < self.end
        valid = (ended.cumsum(0) == 0) & within
        valid[:1].fill_(True)
        rows = self.rows(at, valid, (1,) * count, anchor, reach)
        x = self.core.embed(inputs[None], rows, self.cache)
        state = self.begin(x, at)
        for r in range(1, self.depth + 1):
            state = self.core.recur(state, x, self._at_depth(rows, r), self.cache)
        targets, bad = self.choose(state, rows, at, [False])
        self._accept(guesses, targets, valid)
        w = self.most + 1
        for i, part in enumerate((guesses, targets, bad_guesses, bad)):
            self.mail[i * w : i * w + len(part)] = part

    def _refine(self, most: int, anchor: int | None, reach: int) -> tuple[Tensor, Tensor]:
        """J rounds from the anchor: guesses [W], and whether any of a row's logits were NaN [W] (decoders/das_wave.py)."""
        core, decoder = self.core, self.decoder
        tokens, state, bad = self.tok, None, self.live[:0]
        for j in range(decoder.rounds):
            width = decoder.width(j, most)
            if len(tokens) < width:  # a joining position's first guess repeats the anchor, unless one was seeded
                tokens = torch.cat((tokens, self.tok.expand(width - len(tokens))))
            tokens, at = tokens[:width], self.at + self.ahead[:width]
            rows = self.rows(at, at < self.end, (self.depth,) * width, anchor, reach)
            x = core.embed(tokens[None], rows, self.cache)
            fresh = self.begin(x, at)
            state = fresh if state is None or not self.carry else torch.cat((state, fresh[:, state.shape[1] :]), 1)
            for _ in range(decoder.updates):
                state = core.recur(state, x, rows, self.cache, self.policy)
            following, nan = self.choose(state, rows, at, [True])
            tokens = torch.cat((self.tok, following))  # shifted: the last one seeds the next position
            bad = torch.cat((bad | nan[: len(bad)], nan[len(bad) :]))
        return tokens[1:], bad

    def _at_depth(self, rows: Any, depth: int) -> Any:
        return rows.at_depth(depth) if isinstance(rows, Chain) else rows.at_depths((depth,) * rows.count)

    def _accept(self, guesses: Tensor, targets: Tensor, valid: Tensor) -> None:
        """Guesses stand up to the first that is wrong; one more token is the target's own, if a row gave it."""
        judged = min(len(guesses), len(targets))
        right = (guesses[:judged] == targets[:judged]).cumprod(0).sum(0, keepdim=True)
        gained = torch.minimum(right + 1, valid.sum(0, keepdim=True))
        self.at.add_(gained)
        self.tok.copy_(targets.index_select(0, gained - 1))

    # ---- the host's side ------------------------------------------------------------------------------------------

    def decode(self, session: Session, lag: int) -> None:
        """lag is not used: how long a block is depends on what the last one came to, and it waits once in J k + T calls."""
        while not session.finished:
            anchor, most = len(session.tokens) - 1, min(self.decoder.capacity, session.remaining - 1)
            if self.runner.knows:
                self.turn(most, anchor, session.last_input + 1)
            else:
                bucket = self.decoder.capacity if most else 0
                reach = self.runner.reach(min(anchor + self.most, session.last_input) + 1, self.cache.capacity)
                self.runner.run((bucket, reach), lambda: self.turn(bucket, None, reach))
            self._settle(session, anchor, most, self.open_mail(self.post(0)))

    def _settle(self, session: Session, anchor: int, most: int, mail: list[int]) -> None:
        decoder, w = self.decoder, self.most + 1
        guesses, targets, bad_guesses, bad = (mail[i * w : (i + 1) * w] for i in range(4))
        widths = [decoder.width(j, most) for j in range(decoder.rounds)] if most else []
        guesses = guesses[: widths[-1]] if most else []
        if any(bad_guesses[: len(guesses)]):
            session.refuse_nan(anchor + bad_guesses.index(1))
        self._write_down(session, anchor, widths, guesses)
        ends = [i for i, token in enumerate(guesses) if token in session.eos]
        drafts = guesses[: ends[0] + 1] if ends else guesses
        count = len(drafts) if drafts and (ends or not decoder.bonus) else len(drafts) + 1
        session.counts["prelude"] += 1
        session.counts["readout"] += 1
        for r in range(1, self.depth + 1):
            session.ran(Chain(anchor, count, r))
        session.counts["recur"] += self.depth
        session.counts["rows"] += self.depth * count
        if any(bad[:count]):
            session.refuse_nan(anchor + bad.index(1))
        if most:
            session.settle(drafts, targets[:count])
        else:
            session.cache.commit(anchor + 1)
            session.commit(targets[0])

    def _write_down(self, session: Session, anchor: int, widths: list[int], guesses: list[int]) -> None:
        """The rounds' calls and guesses in the session's books."""
        runs: list[int] = []  # recurrences that each row's state has had
        for width in widths:
            runs = runs + [0] * (width - len(runs)) if self.carry else [0] * width
            for _ in range(self.decoder.updates):
                runs = [r + 1 for r in runs]
                session.tick += 1
                for i, r in enumerate(runs):
                    session.event(anchor + i, r, "run")
            session.counts["recur"] += self.decoder.updates
            session.counts["rows"] += self.decoder.updates * width
            session.counts["prelude"] += 1
            session.counts["readout"] += 1
        if widths:
            session.rounds.append(len(widths))
        for i, token in enumerate(guesses):
            session.event(anchor + 1 + i, runs[i], "draft", token)
