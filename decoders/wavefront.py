"""Wavefront Decoding (arXiv 2609.23033): positions at different depths, d recurrences apart, share one block call."""

from __future__ import annotations

import torch

from decoders.generation import DRAFT, TARGET, Decoder, Session, at_least, check_draft_depth
from loopscope.rows import At, Chain, Wave


class Wavefront(Decoder):
    """Every lane's state at depth `draft_depth` drafts its successor; at depth T it judges that draft.

    A right draft keeps running, so committing costs nothing; a wrong one drops every lane behind it. With
    draft_depth = T this is autoregressive decoding. Nothing is spawned behind a drafted EOS or beyond the limit.
    """

    def __init__(self, draft_depth: int) -> None:
        self.draft_depth = at_least("draft_depth", draft_depth)

    @property
    def label(self) -> str:
        return f"WFD d={self.draft_depth}"

    def _check(self, core, depth):
        check_draft_depth(self.draft_depth, depth)

    def _decode(self, session: Session) -> None:
        d, full = self.draft_depth, session.depth
        lanes: list[int] = []  # token of each lane, front first; lane i sits at position `front + i`
        depths: list[int] = []
        front = len(session.tokens) - 1
        pending: int | None = session.tokens[-1]  # token about to become a lane
        state = x = None
        while not session.finished:
            if pending is not None:
                rows = Chain(front + len(lanes), 1)
                new_x = session.embed([pending], rows)
                new_state = session.start(new_x, rows)
                x = torch.cat((x, new_x), 1) if lanes else new_x
                state = torch.cat((state, new_state), 1) if lanes else new_state
                lanes.append(pending)
                depths.append(0)
                pending = None
            depths = [r + 1 for r in depths]
            rows = Wave(front, tuple(depths))
            state = session.recur(state, x, rows)
            session.ran(rows)

            verify = depths[0] == full
            # The newest lane is the only one that can be at d; its successor must be an input that can still matter.
            newest = front + len(lanes) - 1
            draft = depths[-1] == d < full and newest < session.last_input
            if not (verify or draft):
                continue
            target, pending = self._read(session, state, front, newest, verify, draft)
            if draft:
                session.event(newest + 1, d, "draft", pending)
                if pending in session.eos:
                    pending = None  # remembered by no lane: if the target agrees, it commits the EOS itself
            if not verify:
                continue

            session.cache.commit(front + 1)
            successor = lanes[1] if len(lanes) > 1 else None
            if successor is not None:
                session.judge(successor == target, front + 1, successor)
            session.commit(target)
            front += 1
            if successor == target:
                lanes, depths, state, x = lanes[1:], depths[1:], state[:, 1:], x[:, 1:]
            else:
                # The correction, or a token no lane was waiting for, starts the wave anew; this tick's draft is void.
                lanes, depths, pending = [], [], target

    def _read(self, session: Session, state, front: int, newest: int, verify: bool, draft: bool):
        """One readout of the verify row and the draft row -> (target token or None, draft token or None)."""
        if verify and draft:
            target, token = session.read(state[:, :: state.shape[1] - 1], At((front, newest)), (TARGET, DRAFT)).tolist()
            return target, token
        position, picked = (front, state[:, :1]) if verify else (newest, state[:, -1:])
        token = int(session.read(picked, Chain(position, 1), TARGET if verify else DRAFT))
        return (token, None) if verify else (None, token)
