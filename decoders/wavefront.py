"""Wavefront Decoding (arXiv 2609.23033): positions at different depths, d recurrences apart, share one block call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoders.autoregressive import fidelity_of
from decoders.calls import Steps
from decoders.decoder import Decoder, at_least, check_draft_depth
from decoders.session import DRAFT, TARGET, Session
from loopscope.errors import SettingError
from loopscope.exits import ExitRule, exit_rule
from loopscope.rows import At, Chain, Rows, Tree, Wave


@dataclass
class _Lanes:
    """The positions in flight, front first: lane i stands at position front + i, its token drafted by lane i - 1."""

    front: int
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    guesses: list[int | None] = field(default_factory=list)  # what each lane last drafted for the position behind it
    stopped: list[bool] = field(default_factory=list)  # left the loop early, and waits to be the front
    tensors: dict[str, Tensor] = field(default_factory=dict)  # state, x and what an exit rule remembers: [1, lanes, ...]

    def join(self, token: int, **tensors: Tensor) -> None:
        self.tensors = {name: torch.cat((self.tensors[name], t), 1) if self.tokens else t for name, t in tensors.items()}
        self.tokens.append(token)
        self.depths.append(0)
        self.guesses.append(None)
        self.stopped.append(False)

    def keep(self, start: int, end: int) -> None:
        """Only lanes start..end-1 go on."""
        if (start, end) == (0, len(self.tokens)):
            return
        self.front += start
        for name in ("tokens", "depths", "guesses", "stopped"):
            setattr(self, name, getattr(self, name)[start:end])
        self.tensors = {name: t[:, start:end] for name, t in self.tensors.items()}


class Wavefront(Decoder):
    """Every lane's state at depth `draft_depth` drafts its successor; at depth T it judges that draft.

    A right draft keeps running, so committing costs nothing; a wrong one drops every lane behind it. With
    draft_depth = T this is autoregressive decoding. Nothing is spawned behind a drafted EOS or beyond the limit.

    redraft: read every lane again each `redraft` recurrences after the first draft (unpublished; docs/algorithms.md, 2.4). As soon
    as its draft changes, the lanes behind it are dropped and restart from the new token: a wrong draft costs what it takes to
    notice, not all of T, for one readout row per lane and re-reading. slots: let the core's depths share so many K/V slots, which
    is approximate (section 5 of the paper). exit: a rule of loopscope.exits that needs no logits, or its name with a threshold
    ("gate:0.5"): a lane that stops leaves its last K/V to deeper readers and waits to be the front, which is lossy. The reference
    of both is Autoregressive with the same setting.
    """

    def __init__(self, draft_depth: int, redraft: int | None = None, slots: int | None = None, exit: str | ExitRule | None = None) -> None:
        self.draft_depth = at_least("draft_depth", draft_depth)
        self.redraft = None if redraft is None else at_least("redraft", redraft)
        self.slots = None if slots is None else at_least("slots", slots)
        self.exit = None if exit is None else exit_rule(exit)
        if self.exit is not None and self.exit.reads:
            raise SettingError(f"the exit rule {self.exit.name!r} needs every lane's logits at every depth; in a wave use one that reads "
                               "states only, such as 'state-change' or 'gate', or decode with Autoregressive(exit=...)")
        self.fidelity, self._note = fidelity_of(self.slots, self.exit)

    @property
    def label(self) -> str:
        return f"WFD d={self.draft_depth}" + ("" if self.redraft is None else f" re={self.redraft}") + self._note

    def _check(self, core, depth):
        check_draft_depth(self.draft_depth, depth)
        if self.exit is not None:
            self.exit.check(core)
            if getattr(core.config, "window", 0):
                raise SettingError(f"lanes that stop early cannot run on a model with sliding windows, as this {core.family} has")

    runs_behind = True

    def why_not_static(self, session):
        if self.redraft is not None or self.slots is not None or self.exit is not None:
            return "redraft, slots and exit leave its lanes at uneven depths"
        return f"draft_depth {self.draft_depth} does not divide {session.depth} recurrences" if session.depth % self.draft_depth else ""

    def static_turn(self, session, cache, runner):
        from decoders.static_wave import StaticWave

        return StaticWave(session, cache, self.draft_depth, runner)

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
                tensors = {"state": session.start(x, rows), "x": x}
                if self.exit is not None:
                    tensors["memory"] = self.exit.begin(session.core, 1, 1)
                lanes.join(pending, **tensors)
                pending = None
            left = yield from self._tick(session, lanes)

            ready = next((i for i, r in enumerate(lanes.depths) if r < full and not lanes.stopped[i]), len(lanes.tokens))
            drafting = [i for i, r in enumerate(lanes.depths)
                        if i >= ready and lanes.front + i < session.last_input  # a draft must be of an input that can still matter
                        and (self._drafts_at(r, full) and not lanes.stopped[i] or i in left)]
            if not (ready or drafting):
                continue
            targets, drafts = yield from self._read(session, lanes, ready, drafting)
            for i, token in zip(drafting, drafts):
                if token != lanes.guesses[i]:
                    session.event(lanes.front + i + 1, lanes.depths[i], "draft", token)
            for target in targets:
                guess = lanes.guesses[0]
                session.cache.commit(lanes.front + 1)
                if guess is not None:
                    session.judge(guess == target, lanes.front + 1, guess)
                session.commit(target)
                if guess != target or len(lanes.tokens) == 1:
                    # The correction, or a token no lane was waiting for, starts the wave anew; this tick's drafts are void.
                    lanes, pending, drafting = _Lanes(lanes.front + 1), target, []
                    break
                lanes.keep(1, len(lanes.tokens))
                if session.finished:
                    break
            for i, token in zip((i - len(targets) for i in drafting), drafts):
                if token != lanes.guesses[i]:  # drafted for the first time, or anew: what ran on the old draft is void
                    lanes.keep(0, i + 1)
                    lanes.guesses[i] = token
                    # Behind a drafted EOS nothing is spawned: if the target agrees, it commits the EOS itself.
                    pending = None if token in session.eos else token
                    break

    def _tick(self, session: Session, lanes: _Lanes) -> Steps:
        """One recurrence of the lanes that run; the places of those that stop here, before full depth."""
        state, x = lanes.tensors["state"], lanes.tensors["x"]
        lanes.depths = [r + (not s) for r, s in zip(lanes.depths, lanes.stopped)]
        if not any(lanes.stopped):
            rows: Rows = Wave(lanes.front, tuple(lanes.depths))
            lanes.tensors["state"] = yield session.recur(state, x, rows)
            session.ran(rows)
            if self.exit is None:
                return ()
            running = list(range(len(lanes.tokens)))
        else:
            running = [i for i, s in enumerate(lanes.stopped) if not s]
            at = tuple(lanes.front + i for i in running)
            rows = Tree(at, at, tuple(tuple(range(lanes.front, p + 1)) for p in at), tuple(lanes.depths[i] for i in running), lanes.front)
            new = yield session.recur(state[:, running], x[:, running], rows)
            session.ran(rows)
            lanes.tensors["state"] = state.index_copy(1, torch.tensor(running, device=state.device), new)
        return self._stop(session, lanes, running, state)

    def _stop(self, session: Session, lanes: _Lanes, running: list[int], before: Tensor) -> list[int]:
        """Ask the exit rule about the lanes that ran, and leave the K/V of those it stops to deeper readers."""
        memory, now = lanes.tensors["memory"], lanes.tensors["state"]
        stop, new = self.exit.update(memory[:, running], now[:, running], before[:, running], None, session.core)  # type: ignore[union-attr]
        lanes.tensors["memory"] = memory.index_copy(1, torch.tensor(running, device=memory.device), new)
        left = [i for i, leaves in zip(running, stop[0].tolist()) if leaves and lanes.depths[i] < session.depth]
        for i in left:
            lanes.stopped[i] = True
            session.cache.fill_deeper([lanes.front + i], lanes.depths[i])
        return left

    def _read(self, session: Session, lanes: _Lanes, ready: int, drafting: list[int]) -> Steps:
        """One readout of the lanes at the front that are done and of the draft rows -> (target tokens, draft tokens)."""
        picked = [*range(ready), *drafting]
        at, state = [lanes.front + i for i in picked], lanes.tensors["state"]
        rows = Chain(at[0], 1) if len(at) == 1 else At(tuple(at))
        step = picked[1] - picked[0] if len(picked) > 1 else 1
        even = range(picked[0], picked[-1] + 1, step)
        state = state[:, even.start : even.stop : step] if picked == list(even) else state[:, picked]
        roles = [TARGET] * ready + [DRAFT] * len(drafting)
        guesses = [[] if guess is None else [guess] for guess in lanes.guesses[:ready]]
        tokens = yield session.read(state, rows, roles[0] if len(at) == 1 else roles, guesses)
        return tokens[:ready], tokens[ready:]
