"""Draft-then-verify: draft a block at depth d, one position after the other, then check it at depth T in parallel."""

from __future__ import annotations

import torch

from decoders.autoregressive import step
from decoders.calls import Steps
from decoders.decoder import Decoder, at_least, check_draft_depth
from decoders.session import DRAFT, TARGET, Session
from loopscope.rows import ALIGNED, Chain, Draft, ReadPolicy


class DraftThenVerify(Decoder):
    """Blocks of `block` drafts at depth `draft_depth`.

    read="aligned": drafts are the target's own early recurrences, so verification continues from their states and
    K/V (the baseline of Wavefront Decoding, arXiv 2609.23033). read="deep_v", "deep_k", "deep_kv": drafts read the
    verified prefix at full depth ("Mature-Spec", DAS, arXiv 2609.34538); their states are not target states, so
    verification starts afresh. Blocks shrink to K = min(block, remaining - 1), and nothing is drafted behind an EOS.
    """

    def __init__(self, draft_depth: int, block: int, read: str = "aligned") -> None:
        self.draft_depth = at_least("draft_depth", draft_depth)
        self.block = at_least("block", block)
        ReadPolicy.named(read, 1)  # raises for an unknown name; the depth is not known yet
        self.read = read

    @property
    def label(self) -> str:
        return f"DtV d={self.draft_depth} K={self.block}" + ("" if self.read == "aligned" else f" {self.read}")

    def _check(self, core, depth):
        check_draft_depth(self.draft_depth, depth)

    def _decode(self, session: Session) -> Steps:
        policy = ReadPolicy.named(self.read, session.depth)
        while not session.finished:
            size = min(self.block, session.remaining - 1)
            if size == 0:
                yield from step(session)
            else:
                yield from self._block(session, size, policy)

    def _block(self, session: Session, size: int, policy: ReadPolicy) -> Steps:
        anchor = len(session.tokens) - 1
        drafts, xs, states = yield from self._draft(session, anchor, size, policy)
        count, done = len(xs), self.draft_depth if policy == ALIGNED else 0
        x = torch.cat(xs, dim=1)
        rows = Chain(anchor, count, session.depth)
        state = torch.cat(states, dim=1) if done else session.start(x, rows)
        for r in range(done + 1, session.depth + 1):
            rows = Chain(anchor, count, r)
            state = yield session.recur(state, x, rows)
            session.ran(rows)
        proposals = [drafts[i : i + 1] for i in range(count)]
        targets = yield session.read(state, rows, TARGET, proposals)
        session.settle(drafts, targets)

    def _draft(self, session: Session, anchor: int, size: int, policy: ReadPolicy) -> Steps:
        """Up to `size` drafts, and x and state of every row to verify: the anchor's and the drafts' own."""
        drafts, xs, states = [], [], []
        token = session.tokens[-1]
        for i in range(size + 1):
            position = anchor + i
            x = yield session.embed([token], Chain(position, 1))
            xs.append(x)
            if policy == ALIGNED or i < size:
                state = session.start(x, Chain(position, 1))
                for r in range(1, self.draft_depth + 1):
                    rows = Chain(position, 1, r) if policy == ALIGNED else Draft(anchor, position, r)
                    state = yield session.recur(state, x, rows, policy, TARGET if policy == ALIGNED else DRAFT)
                    session.ran(rows)
                states.append(state)
            if i == size:
                break
            token = (yield session.read(state, Chain(position, 1, self.draft_depth), DRAFT))[0]
            drafts.append(token)
            session.event(position + 1, self.draft_depth, "draft", token)
            if token in session.eos:
                break
        return drafts, xs, states
