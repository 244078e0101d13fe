"""Wavefront Decoding (arXiv 2609.23033): positions at different depths, d recurrences apart, share one block call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoders.calls import Steps
from decoders.decoder import Decoder, at_least, check_draft_depth
from decoders.generation import APPROXIMATE
from decoders.session import DRAFT, TARGET, Session
from loopscope.rows import At, Chain, Wave


@dataclass
class _Lanes:
    """The positions in flight, front first: lane i stands at position front + i, its token drafted by lane i - 1."""

    front: int
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    guesses: list[int | None] = field(default_factory=list)  # what each lane last drafted for the position behind it
    state: Tensor | None = None
    x: Tensor | None = None

    def join(self, token: int, state: Tensor, x: Tensor) -> None:
        self.state = state if self.state is None or not self.tokens else torch.cat((self.state, state), 1)
        self.x = x if self.x is None or not self.tokens else torch.cat((self.x, x), 1)
        self.tokens.append(token)
        self.depths.append(0)
        self.guesses.append(None)

    def keep(self, start: int, end: int) -> None:
        """Only lanes start..end-1 go on."""
        self.front += start
        for name in ("tokens", "depths", "guesses"):
            setattr(self, name, getattr(self, name)[start:end])
        self.state, self.x = self.state[:, start:end], self.x[:, start:end]  # type: ignore[index]


class Wavefront(Decoder):
    """Every lane's state at depth `draft_depth` drafts its successor; at depth T it judges that draft.

    A right draft keeps running, so committing costs nothing; a wrong one drops every lane behind it. With
    draft_depth = T this is autoregressive decoding. Nothing is spawned behind a drafted EOS or beyond the limit.

    redraft: read every lane again each `redraft` recurrences after the first draft (unpublished; docs/algorithms.md, 2.4). As soon
    as its draft changes, the lanes behind it are dropped and restart from the new token: a wrong draft costs what it takes to
    notice, not all of T, for one readout row per lane and re-reading. slots: let the core's depths share so many K/V slots, which
    is approximate (section 5 of the paper); the reference is Autoregressive with as many.
    """

    def __init__(self, draft_depth: int, redraft: int | None = None, slots: int | None = None) -> None:
        self.draft_depth = at_least("draft_depth", draft_depth)
        self.redraft = None if redraft is None else at_least("redraft", redraft)
        self.slots = None if slots is None else at_least("slots", slots)
        if slots is not None:
            self.fidelity = APPROXIMATE

    @property
    def label(self) -> str:
        extra = "" if self.redraft is None else f" re={self.redraft}"
        return f"WFD d={self.draft_depth}{extra}" + ("" if self.slots is None else f" s={self.slots} (approximate)")

    def _check(self, core, depth):
        check_draft_depth(self.draft_depth, depth)

    def _drafts_at(self, depth: int, full: int) -> bool:
        """Whether a lane of this depth is read as a draft."""
        if depth >= full or depth < self.draft_depth:
            return False
        return depth == self.draft_depth or (self.redraft is not None and (depth - self.draft_depth) % self.redraft == 0)

    def _decode(self, session: Session) -> Steps:
        full = session.depth
        lanes = _Lanes(front=len(session.tokens) - 1)
        pending: int | None = session.tokens[-1]  # token about to become a lane
        while not session.finished:
            if pending is not None:
                rows = Chain(lanes.front + len(lanes.tokens), 1)
                x = yield session.embed([pending], rows)
                lanes.join(pending, session.start(x, rows), x)
                pending = None
            lanes.depths = [r + 1 for r in lanes.depths]
            wave = Wave(lanes.front, tuple(lanes.depths))
            lanes.state = yield session.recur(lanes.state, lanes.x, wave)
            session.ran(wave)

            verify = lanes.depths[0] == full
            # A draft must be of an input that can still matter.
            drafting = [i for i, r in enumerate(lanes.depths) if self._drafts_at(r, full) and lanes.front + i < session.last_input]
            if not (verify or drafting):
                continue
            target, drafts = yield from self._read(session, lanes, verify, drafting)
            for i, token in zip(drafting, drafts):
                if token != lanes.guesses[i]:
                    session.event(lanes.front + i + 1, lanes.depths[i], "draft", token)
            shift = 0
            if verify:
                guess = lanes.guesses[0]
                session.cache.commit(lanes.front + 1)
                if guess is not None:
                    session.judge(guess == target, lanes.front + 1, guess)
                session.commit(target)
                if guess != target or len(lanes.tokens) == 1:
                    # The correction, or a token no lane was waiting for, starts the wave anew; this tick's drafts are void.
                    lanes, pending = _Lanes(lanes.front + 1), target
                    continue
                lanes.keep(1, len(lanes.tokens))
                shift = 1
            for i, token in zip((i - shift for i in drafting), drafts):
                if token != lanes.guesses[i]:  # drafted for the first time, or anew: what ran on the old draft is void
                    lanes.keep(0, i + 1)
                    lanes.guesses[i] = token
                    # Behind a drafted EOS nothing is spawned: if the target agrees, it commits the EOS itself.
                    pending = None if token in session.eos else token
                    break

    def _read(self, session: Session, lanes: _Lanes, verify: bool, drafting: list[int]) -> Steps:
        """One readout of the verify row and the draft rows -> (target token or None, draft tokens)."""
        picked = [0, *drafting] if verify else drafting
        at = [lanes.front + i for i in picked]
        rows = Chain(at[0], 1) if len(at) == 1 else At(tuple(at))
        step = picked[1] - picked[0] if len(picked) > 1 else 1
        even = range(picked[0], picked[-1] + 1, step)
        state = lanes.state[:, even.start : even.stop : step] if picked == list(even) else lanes.state[:, picked]  # type: ignore[index]
        if not verify:
            return None, (yield session.read(state, rows, DRAFT)).tolist()
        roles = TARGET if len(at) == 1 else [TARGET] + [DRAFT] * len(drafting)
        guess = lanes.guesses[0]
        target, *drafts = (yield session.read(state, rows, roles, [[] if guess is None else [guess]])).tolist()
        return target, drafts
