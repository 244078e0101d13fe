"""LoopSpec (arXiv 2609.17184): a wavefront whose lanes may propose twice, on a tree of branches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decoders.calls import Steps
from decoders.decoder import Decoder, at_least, check_draft_depth
from decoders.session import DRAFT, SECOND, TARGET, Session
from loopscope.errors import SettingError
from loopscope.rows import At, Chain, Rows, Tree, Wave


_MOST_LANES = 4096


@dataclass(eq=False)
class _Lane:
    """One branch's row: its K/V lie in `cell`, which is its position unless a sibling was there first."""

    position: int
    token: int
    parent: _Lane | None
    cell: int = -1
    depth: int = 0
    drawn: list[int] = field(default_factory=list)  # tokens drafted for the position behind it: one, or two
    proposed: list[int] = field(default_factory=list)  # those of them that were run, or that end the text


class LoopSpec(Decoder):
    """A lane reaching `draft_depth` (d1) proposes its top-1, as in a wavefront. Reaching `second_depth` (d2) it reads again; another
    top-1 is proposed beside the first, and both branches run on. At T the lane's own token keeps one of them, or neither.

    gate: propose a second token only where the model gives it at least this probability. lanes: the most rows in flight; a
    proposal that would exceed it is not made. Without a second proposal (second_depth=None) this is Wavefront(draft_depth).
    Only what is in flight beside the main branch costs a gather of the prefix; a tree that is a chain runs as a wave.
    """

    def __init__(self, draft_depth: int, second_depth: int | None, gate: float = 0.0, lanes: int = 128) -> None:
        self.draft_depth = at_least("draft_depth", draft_depth)
        self.second_depth = None if second_depth is None else at_least("second_depth", second_depth)
        if second_depth is not None and second_depth <= draft_depth:
            raise SettingError(f"second_depth must be deeper than draft_depth {draft_depth}, got {second_depth}")
        if isinstance(gate, bool) or not isinstance(gate, (int, float)) or not 0 <= gate <= 1:
            raise SettingError(f"gate must be a probability from 0 to 1, got {gate!r}")
        self.gate, self.lanes = float(gate), at_least("lanes", lanes)
        if lanes > _MOST_LANES:
            raise SettingError(f"lanes must be at most {_MOST_LANES}, got {lanes}: each is a cell of the cache at every depth")

    @property
    def label(self) -> str:
        second = "" if self.second_depth is None else f" d2={self.second_depth}"
        gate = f" gate={self.gate:g}" if self.gate else ""
        return f"LoopSpec d1={self.draft_depth}{second}{gate}" + ("" if self.lanes == 128 else f" lanes={self.lanes}")

    def spare(self, depth):
        return self.lanes

    def _check(self, core, depth):
        check_draft_depth(self.draft_depth, depth)
        if self.second_depth is not None and self.second_depth >= depth:
            raise SettingError(f"second_depth {self.second_depth} must be below the target's {depth} recurrences")
        if getattr(core.config, "window", 0):
            raise SettingError(f"branches cannot run on a model with sliding windows, as this {core.family} has; use Wavefront")

    def _decode(self, session: Session) -> Steps:
        full = session.depth
        front = len(session.tokens) - 1
        lanes: list[_Lane] = []  # the root first, then by position; one state row each, in this order
        born = [_Lane(front, session.tokens[-1], None)]
        state = x = torch.empty(0)
        while not session.finished:
            if born:
                self._settle_cells(session, lanes, born)
                rows = self._rows(lanes, born, front, embedding=True)
                new_x = yield session.embed([lane.token for lane in born], rows)
                new = session.start(new_x, rows)
                order = sorted(range(len(lanes) + len(born)), key=lambda i: (*lanes, *born)[i].position)
                state, x = (torch.cat((old, own), 1)[:, order] if lanes else own for old, own in ((state, new), (x, new_x)))
                lanes = [[*lanes, *born][i] for i in order]
            for lane in lanes:
                lane.depth += 1
            rows = self._rows(lanes, lanes, front)
            state = yield session.recur(state, x, rows)
            session.ran(rows)

            root, born = lanes[0], []
            verify = root.depth == full
            reads = [(i, lane, self._role(lane, session)) for i, lane in enumerate(lanes)]
            reads = [r for r in reads if r[2]]
            if not reads:
                continue
            picked = [i for i, _, _ in reads]
            request = session.read(state[:, picked], self._rows(lanes, [lane for _, lane, _ in reads], front, reading=True),
                                   [role for _, _, role in reads], [root.drawn], [id(lane) for _, lane, _ in reads], bool(self.gate))
            tokens, weights = (yield request), [1.0] * len(reads)
            if self.gate:
                likely = request.logits.double().softmax(-1).gather(-1, tokens[:, None])[:, 0]
                both = session.to_host(torch.cat((tokens.double(), likely)))  # one wait for tokens and weights
                tokens, weights = [int(t) for t in both[: len(reads)]], both[len(reads) :]
            if verify:
                target = tokens[0]
                session.cache.commit(front + 1)
                if root.proposed:
                    right = target in root.proposed
                    session.judge(right, front + 1, target if right else root.proposed[0])
                session.commit(target)
                front += 1
                kept = next((lane for lane in lanes if lane.parent is root and lane.token == target), None)
                if kept is None:  # neither branch, or none that was run: the target's token starts anew
                    lanes, born = [], [_Lane(front, target, None)]
                    continue
                alive = [i for i, lane in enumerate(lanes) if _descends(lane, kept)]
                lanes, state, x = [lanes[i] for i in alive], state[:, alive], x[:, alive]
                kept.parent = None
                session.chooser.keep({id(lane) for lane in lanes})
                if kept.cell != front:
                    session.cache.move(kept.cell, front)
                    kept.cell = front
            for (_, lane, role), token, weight in zip(reads, tokens, weights):
                if role != TARGET and lane in lanes:
                    self._propose(session, lanes, born, lane, role, token, weight)

    def _role(self, lane: _Lane, session: Session) -> str | None:
        """What a lane is read for at this tick."""
        if lane.depth == session.depth:
            return TARGET
        if lane.position >= session.last_input:  # its successor could never be an input
            return None
        if lane.depth == self.draft_depth:
            return DRAFT
        return SECOND if lane.depth == self.second_depth else None

    def _propose(self, session: Session, lanes: list[_Lane], born: list[_Lane], lane: _Lane, role: str, token: int, weight: float) -> None:
        # Rejection sampling must test whatever was drawn, run or not: to leave out draws by their value would bias what is committed.
        lane.drawn.append(token)
        if token in lane.proposed or (role == SECOND and weight < self.gate):
            return
        ends = token in session.eos  # nothing is spawned behind a drafted EOS: if the target agrees, it commits the EOS itself
        if not ends and len(lanes) + len(born) >= self.lanes:
            return
        lane.proposed.append(token)
        session.event(lane.position + 1, lane.depth, "draft", token)
        if not ends:
            born.append(_Lane(lane.position + 1, token, lane))

    def _settle_cells(self, session: Session, lanes: list[_Lane], born: list[_Lane]) -> None:
        """A cell for every new lane: its position's own, or a spare one where a sibling branch is there."""
        taken = {lane.cell for lane in lanes}
        for lane in born:
            free = (c for c in (lane.position, *range(session.cache.capacity, session.cache.cells)) if c not in taken)
            lane.cell = next(free)
            taken.add(lane.cell)

    def _rows(self, lanes: list[_Lane], subset: list[_Lane], front: int, embedding: bool = False, reading: bool = False) -> Rows:
        """Rows of some lanes: those of a wave where all lanes in flight form a chain, branches otherwise."""
        if all(lane.cell == lane.position for lane in (*lanes, *subset)):
            at = tuple(lane.position for lane in subset)
            if len(at) == 1:
                return Chain(at[0], 1, max(subset[0].depth, 1))
            return At(at) if reading else Wave(front, tuple(lane.depth for lane in subset))
        depths = tuple(1 if embedding else lane.depth for lane in subset)
        return Tree(tuple(lane.position for lane in subset), tuple(lane.cell for lane in subset),
                    tuple(_ancestors(lane) for lane in subset), depths, front)


def _ancestors(lane: _Lane) -> tuple[int, ...]:
    cells, above = [], lane
    while above is not None:
        cells.append(above.cell)
        above = above.parent  # type: ignore[assignment]
    return tuple(reversed(cells))


def _descends(lane: _Lane, root: _Lane) -> bool:
    above: _Lane | None = lane
    while above is not None and above is not root:
        above = above.parent
    return above is root
