"""DAS-Wave (Depth-Asynchronous Self-Speculation, arXiv 2609.34538): a block of guesses refined together, then verified.

Active positions join one by one; each round re-embeds the current guesses, advances all active states k recurrences
while the verified prefix is read at full depth, and reads out the next guesses. States are carried from round to
round, which needs input injection: a revised guess reaches a carried state only through x.
"""

from __future__ import annotations

import torch

from decoders.autoregressive import step, verify_block
from decoders.calls import Steps
from decoders.decoder import Decoder, at_least
from decoders.session import DRAFT, GUESS, Session
from loopscope.errors import SettingError
from loopscope.rows import At, Chain, Forest, ReadPolicy


class DASWave(Decoder):
    """rounds J, updates k (recurrences per round), capacity gamma, initial_width W_init, growth (positions that join per round).

    read: where the verified prefix is read ("deep_kv" is the paper's). Under a policy that leaves a channel aligned, a
    row reads it at its own number of recurrences, at most T. carry: None carries states where the model injects; without
    injection a state restarts when its guess changes and freezes at depth T (unpublished variant). carry=False restarts
    every state every round; carry=True on a model without injection raises SettingError. stable: stop refining early, after
    so many rounds in a row that changed no guess (those of positions that have just joined aside). The block is verified from
    fresh target states, with one more row than guesses, so a fully right block also commits a bonus token (bonus=False: as in
    the paper, without it).
    """

    def __init__(self, rounds: int, updates: int, capacity: int = 32, initial_width: int = 2, read: str = "deep_kv",
                 carry: bool | None = None, growth: int = 1, stable: int | None = None, bonus: bool = True) -> None:
        self.rounds, self.updates = at_least("rounds", rounds), at_least("updates", updates)
        self.capacity, self.initial_width = at_least("capacity", capacity), at_least("initial_width", initial_width)
        self.growth, self.stable = at_least("growth", growth, 0), stable if stable is None else at_least("stable", stable)
        ReadPolicy.named(read, 1)  # raises for an unknown name; the depth is not known yet
        if carry not in (None, True, False) or bonus not in (True, False):
            raise SettingError(f"carry is None, True or False and bonus True or False, got {carry!r} and {bonus!r}")
        self.read, self.carry, self.bonus = read, carry, bonus

    @property
    def label(self) -> str:
        extra = "" if self.carry is None else f" carry={'on' if self.carry else 'off'}"
        if (self.capacity, self.initial_width) != (32, 2):
            extra += f" gamma={self.capacity} W={self.initial_width}"
        if self.growth != 1:
            extra += f" growth={self.growth}"
        if self.stable is not None:
            extra += f" stable={self.stable}"
        if not self.bonus:
            extra += " bonus=off"
        return f"DAS-Wave J={self.rounds} k={self.updates} {self.read}{extra}"

    def _check(self, core, depth):
        if self.carry and not core.config.injects:
            raise SettingError(f"carry=True needs a model that injects its embedding at every recurrence, and {core.family} does "
                               "not; use carry=None (restart when the guess changes, freeze at full depth) or False")

    def why_not_static(self, session):
        if self.read != "deep_kv":
            return "its active rows read the prefix at depths of their own"
        if self.stable is not None:
            return "whether it stops early depends on what the host reads"
        if self.carry is None and not session.core.config.injects:
            return f"{session.core.family} has no injection, so which of its rows restart depends on what the host reads"
        return ""

    def static_turn(self, session, cache, runner):
        from decoders.static_blocks import StaticBlocks

        return StaticBlocks(session, cache, self, runner)

    def _decode(self, session: Session) -> Steps:
        policy = ReadPolicy.named(self.read, session.depth)
        carry = session.core.config.injects if self.carry is None else self.carry
        freeze = self.carry is None and not carry
        while not session.finished:
            most = min(self.capacity, session.remaining - 1)
            if most == 0:
                yield from step(session)
                continue
            anchor = len(session.tokens) - 1
            guesses = yield from self._refine(session, anchor, most, policy, carry, freeze)
            yield from verify_block(session, guesses, self.bonus)

    def width(self, round_index: int, most: int) -> int:
        """Active positions W in round j (from 0)."""
        return min(most, self.initial_width + self.growth * round_index)

    def _refine(self, session: Session, anchor: int, most: int, policy: ReadPolicy, carry: bool, freeze: bool,
                history: list[list[int]] | None = None) -> Steps:
        """Up to J rounds from the anchor -> guesses y_1..y_W, cut behind the first EOS. history: gets the guesses of every round."""
        first = session.tokens[-1]
        # Guesses stay on the device until the last round, unless something on the host depends on what they are.
        looks = freeze or self.stable is not None or history is not None
        tokens = torch.tensor([[first]], device=session.core.device)  # z_0.., z_0 the anchor
        known, embedded = [first], []  # the same on the host, where it looks, and what was embedded last
        state, counts, calm = None, [], 0
        for j in range(self.rounds):
            width, before = self.width(j, most), known
            if tokens.shape[1] < width:  # a joining position's first guess repeats the anchor, unless one was seeded
                tokens = torch.cat((tokens, tokens.new_full((1, width - tokens.shape[1]), first)), 1)
            tokens, rows = tokens[:, :width], Chain(anchor, width)
            now = [*known, *[first] * width][:width]
            x = yield session.embed(tokens, rows, DRAFT)
            fresh = session.start(x, rows)
            if state is None or not (carry or freeze):
                state, counts = fresh, [0] * width
            else:
                old = state.shape[1]
                state, counts = torch.cat((state, fresh[:, old:]), 1), counts + [0] * (width - old)
                changed = [i for i in range(old) if now[i] != embedded[i]] if freeze else []
                if changed:
                    state[:, changed] = fresh[:, changed]
                    counts = [0 if i in changed else r for i, r in enumerate(counts)]
            embedded = now
            for _ in range(self.updates):
                state, counts = yield from self._advance(session, state, x, anchor, counts, policy, freeze)
            waits = looks or j == self.rounds - 1
            # A shifted readout: the last guess seeds the next position.
            following = yield session.read(state, Chain(anchor, width), GUESS, on_device=not waits)
            if not waits:
                tokens = torch.cat((tokens[:, :1], following[None]), 1)
                continue
            known = [first, *following]
            if j < self.rounds - 1:
                tokens = torch.tensor([known], device=session.core.device)
            if history is not None:
                history.append(list(following))
            if self.stable is not None:
                calm = calm + 1 if j and known[: len(before)] == before[: width + 1] else 0
                if calm >= self.stable:
                    break
        session.rounds.append(j + 1)
        guesses = known[1:]
        for i, token in enumerate(guesses):
            session.event(anchor + 1 + i, counts[i], "draft", token)
        ends = [i for i, token in enumerate(guesses) if token in session.eos]
        return guesses[: ends[0] + 1] if ends else guesses

    def _advance(self, session: Session, state, x, anchor: int, counts: list[int], policy: ReadPolicy, freeze: bool) -> Steps:
        """One recurrence of the active rows; a frozen row keeps its state, and the K/V it last wrote stay readable."""
        width = len(counts)
        running = [i for i in range(width) if counts[i] < session.depth] if freeze else list(range(width))
        if not running:
            return state, counts
        after = [r + (i in running) for i, r in enumerate(counts)] if freeze else [r + 1 for r in counts]
        deep = policy.k is not None and policy.v is not None
        if deep and len(running) == width:
            rows = Chain(anchor, width, after[0])
            state = yield session.recur(state, x, rows, policy, DRAFT)
        elif deep:
            rows = At(tuple(anchor + i for i in running), session.depth)
            new = yield session.recur(state[:, running], x[:, running], rows, policy, DRAFT)
            state = state.index_copy(1, torch.tensor(running, device=state.device), new)
        else:
            own = tuple(min(r, session.depth) for r in after)
            new = yield session.recur(state, x, _together(anchor, own, state.device), policy, DRAFT)
            keep = torch.tensor([i in running for i in range(width)], device=state.device)[None, :, None]
            state = torch.where(keep, new, state)
        session.tick += 1
        for i in running:
            session.event(anchor + i, after[i], "run")
        return state, after


def _together(anchor: int, depths: tuple[int, ...], device) -> Forest:
    """Active rows that read the prefix at their own depths, and each other's current K/V."""
    n = len(depths)
    at = torch.arange(anchor, anchor + n, device=device)
    ancestors = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return Forest(at, torch.full((n,), anchor, device=device), ancestors, depths, anchor)
