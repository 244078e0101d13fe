"""Autoregressive decoding: T recurrences, one prelude and one readout per token. The reference for all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoders.calls import Steps
from decoders.decoder import Decoder, at_least
from decoders.generation import APPROXIMATE, LOSSLESS, LOSSY
from decoders.session import TARGET, Session
from loopscope.errors import SettingError
from loopscope.exits import ExitRule, exit_rule
from loopscope.rows import Chain


class Autoregressive(Decoder):
    """One token at a time, through the same cache and the same calls as every other decoder.

    slots: let the core's depths share so many K/V slots (cross-recurrence KV sharing; Wavefront Decoding, arXiv 2609.23033):
    depth r writes and reads slot r mod s, the last write wins. Approximate; the reference for a Wavefront with as many slots.
    exit: a rule of loopscope.exits, or its name with a threshold ("gate:0.5"): a token leaves the loop where the rule says so, and
    what it last wrote is what deeper readers find. Lossy; the reference for a Wavefront with the same rule.
    """

    one_by_one = True

    def __init__(self, slots: int | None = None, exit: str | ExitRule | None = None) -> None:
        self.slots = None if slots is None else at_least("slots", slots)
        self.exit = None if exit is None else exit_rule(exit)
        self.fidelity, self._note = fidelity_of(self.slots, self.exit)

    @property
    def label(self) -> str:
        return f"AR{self._note}"

    def _check(self, core, depth):
        if self.exit is not None:
            self.exit.check(core)

    runs_behind = True

    def why_not_static(self, session):
        return "an exit rule asks the host after every recurrence" if self.exit is not None else ""

    def static_turn(self, session, cache, runner):
        from decoders.static_wave import StaticWave

        return StaticWave(session, cache, session.depth, runner)

    def _decode(self, session: Session) -> Steps:
        while not session.finished:
            yield from (step(session) if self.exit is None else self._exiting_step(session, self.exit))

    def _exiting_step(self, session: Session, rule: ExitRule) -> Steps:
        """As `step`, but only until the rule stops the token."""
        position = len(session.tokens) - 1
        rows = Chain(position, 1)
        x = yield session.embed(session.tokens[-1:], rows)
        state = session.start(x, rows)
        memory = rule.begin(session.core, 1, 1)
        for r in range(1, session.depth + 1):
            rows, before = Chain(position, 1, r), state
            state = yield session.recur(state, x, rows)
            session.ran(rows)
            if rule.reads:
                request = session.read(state, rows, on_device=True)
                token = yield request
            stop, memory = rule.update(memory, state, before, request.logits[None] if rule.reads else None, session.core)
            # The host must know whether to go on: with the token, where the rule has read one, so that it waits once.
            stops, *tokens = session.to_host(torch.cat((stop.view(1).long(), token)) if rule.reads else stop.view(1))
            if stops:
                break
        if not rule.reads:
            tokens = yield session.read(state, rows)
        if r < session.depth:
            session.cache.fill_deeper([position], r)
        session.cache.commit(position + 1)
        session.commit(tokens[0])


def fidelity_of(slots: int | None, rule: ExitRule | None) -> tuple[str, str]:
    """What such settings cost in fidelity, and how labels say so. Raises SettingError for both at once."""
    if slots is not None and rule is not None:
        raise SettingError("slots and exit are two ways to leave out work, and are not studied together; choose one")
    if rule is not None:
        return LOSSY, f" exit={rule.name}:{rule.threshold:g} (lossy)"
    return (APPROXIMATE, f" s={slots} (approximate)") if slots is not None else (LOSSLESS, "")


def step(session: Session) -> Steps:
    """Run the newest committed token at full depth, commit its successor."""
    position = len(session.tokens) - 1
    x = yield session.embed(session.tokens[-1:], Chain(position, 1))
    state = session.start(x, Chain(position, 1))
    for r in range(1, session.depth + 1):
        rows = Chain(position, 1, r)
        state = yield session.recur(state, x, rows)
        session.ran(rows)
    tokens = yield session.read(state, Chain(position, 1, session.depth))
    session.cache.commit(position + 1)
    session.commit(tokens[0])


def verify_block(session: Session, drafts: Sequence[int], bonus: bool = True) -> Steps:
    """Run the newest committed token and the drafts behind it from fresh target states at full depth, and settle them.

    bonus: also run the last draft, whose own output is one more token where all are right. Behind an EOS nothing is run.
    """
    anchor, inputs = len(session.tokens) - 1, [session.tokens[-1], *drafts]
    if inputs[-1] in session.eos or not bonus:
        inputs.pop()  # its own output could never be committed, or is not asked for
    rows = Chain(anchor, len(inputs))
    x = yield session.embed(inputs, rows)
    state = session.start(x, rows)
    for r in range(1, session.depth + 1):
        rows = Chain(anchor, len(inputs), r)
        state = yield session.recur(state, x, rows)
        session.ran(rows)
    proposals = [list(drafts[i : i + 1]) for i in range(len(inputs))]
    session.settle(drafts, (yield session.read(state, rows, TARGET, proposals)))
