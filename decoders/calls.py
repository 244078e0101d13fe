"""The three calls that a decoder makes, as requests: decoders yield them, a driver runs them and sends back what they gave.

    x = yield session.embed(tokens, rows)            prelude
    state = yield session.recur(state, x, rows)      one recurrence
    tokens = yield session.read(state, rows)         readout, and a token chosen for every row: the host waits here, and only here

`advance` runs one sequence. `advance_together` runs many at once: whatever their decoders are doing, recurrences that wait
at the same time become one block call over the rows of all of them. A decoder is written for one sequence and knows nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from loopscope.merged import CacheGroup
from loopscope.rows import Merged, ReadPolicy, Rows

if TYPE_CHECKING:
    from decoders.session import Role, Session


@dataclass(slots=True)
class Embed:
    """tokens [1, n] -> x [1, n, d_model]."""

    session: Session
    rows: Rows
    role: Role
    tokens: Tensor

    def run(self) -> Tensor:
        s = self.session
        return s.core.embed(self.tokens, self.rows, s.cache, s.tap_as(self.role))


@dataclass(slots=True)
class Recur:
    """state, x [1, n, d_model] -> state [1, n, d_model]."""

    session: Session
    rows: Rows
    role: Role
    state: Tensor
    x: Tensor
    policy: ReadPolicy

    def run(self) -> Tensor:
        s = self.session
        return s.core.recur(self.state, self.x, self.rows, s.cache, self.policy, s.tap_as(self.role))


@dataclass(slots=True)
class Read:
    """state [1, n, d_model] -> n token ids, on the host unless `on_device`. last: of the last so many rows only."""

    session: Session
    rows: Rows
    role: Role
    state: Tensor
    drafts: Sequence[Sequence[int]]
    keys: Sequence[Any] | None
    on_device: bool = False
    last: int | None = None
    logits: Tensor | None = None  # [n, vocab], once it has run

    @property
    def count(self) -> int:
        """Rows whose tokens are wanted."""
        return self.rows.count if self.last is None else self.last

    def kept(self, offset: int = 0) -> Tensor:
        """Their places in a call whose first `offset` rows are others'."""
        end = offset + self.rows.count
        return torch.arange(end - self.count, end, device=self.state.device)

    def run(self) -> list[int] | Tensor:
        s = self.session
        tap = s.tap_as(self.role)
        keep = None if self.last is None or tap is not None else self.kept()  # hooks see every row
        logits = s.core.read(self.state, self.rows, s.cache, tap, keep)[0]
        self.logits = logits[len(logits) - self.count :]
        tokens = s.choose(self.logits, self)
        return tokens if self.on_device else s.to_host(tokens)


Request = Union[Embed, Recur, Read]
Steps = Generator[Request, Any, None]


def advance(session: Session, steps: Steps, watch: Callable[[Request], None] | None = None) -> Iterator[None]:
    """Run one sequence to its end; yields whenever tokens have been committed. watch: told of every call once it has run."""
    answer, seen = None, len(session.tokens)
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            break
        if len(session.tokens) != seen:
            seen = len(session.tokens)
            yield
        answer = request.run()
        _count(request)  # only now: a stream may be left, or asked for its counts, while a request waits
        if watch is not None:
            watch(request)
    yield


def advance_together(sessions: Sequence[Session], steps: Sequence[Steps]) -> Counter:
    """Run many sequences to their ends; the calls that were made for all of them: "recur", "prelude", "readout", "rows".

    Readouts and preludes go first, so that every sequence still running meets the others in the next recurrence.
    """
    made: Counter = Counter()
    waiting: dict[int, Request] = {}
    groups: dict[tuple[int, ...], CacheGroup] = {}

    def send(i: int, answer: Any) -> None:
        try:
            waiting[i] = steps[i].send(answer)
        except StopIteration:
            waiting.pop(i, None)

    for i in range(len(steps)):
        send(i, None)
    while waiting:
        kind = next(k for k in (Read, Embed, Recur) if any(type(r) is k for r in waiting.values()))
        found = [i for i in sorted(waiting) if type(waiting[i]) is kind]
        requests = [waiting[i] for i in found]
        made[_COUNTED[kind]] += 1
        if kind is Recur:
            made["rows"] += sum(r.rows.count for r in requests)
        answers = _run_together(requests, found, groups)
        for request in requests:
            _count(request)
        for i, answer in zip(found, answers):
            send(i, answer)
    return made


_COUNTED = {Embed: "prelude", Recur: "recur", Read: "readout"}


def _count(request: Request) -> None:
    """Add a call that was made to its sequence's own counts."""
    counts = request.session.counts
    counts[_COUNTED[type(request)]] += 1
    if type(request) is Recur:
        counts["rows"] += request.rows.count


def _run_together(requests: list, found: list[int], groups: dict[tuple[int, ...], CacheGroup]) -> Sequence[Any]:
    """Run requests of one kind in one call; what each of them gave."""
    first = requests[0].session
    if len(requests) == 1 and first.tap is None:
        return [requests[0].run()]
    core, counts = first.core, [r.rows.count for r in requests]
    rows = Merged(tuple(r.rows for r in requests), tuple(r.session.index for r in requests))
    key = tuple(found)
    if key not in groups:
        groups.clear()  # sequences only ever leave: an old group would keep their caches alive
        groups[key] = CacheGroup([r.session.cache for r in requests])
    cache = groups[key]
    roles = [role for r in requests for role in ([r.role] * r.rows.count if isinstance(r.role, str) else r.role)]
    tap = first.tap_as(roles)
    if type(requests[0]) is Embed:
        return core.embed(torch.cat([r.tokens for r in requests], 1), rows, cache, tap).split(counts, 1)
    states = torch.cat([r.state for r in requests], 1)
    if type(requests[0]) is Recur:
        xs = torch.cat([r.x for r in requests], 1)
        return core.recur(states, xs, rows, cache, tuple(r.policy for r in requests), tap).split(counts, 1)
    if tap is None and any(r.last is not None for r in requests):
        keep = torch.cat([r.kept(sum(counts[:i])) for i, r in enumerate(requests)])
        logits = core.read(states, rows, cache, None, keep)[0].split([r.count for r in requests])
    else:
        logits = core.read(states, rows, cache, tap)[0].split(counts)
    for r, own in zip(requests, logits):
        r.logits = own[len(own) - r.count :]
    answers: list = [r.session.choose(r.logits, r) for r in requests]
    waited = [i for i, r in enumerate(requests) if not r.on_device]
    if waited:
        read = first.to_host_together([requests[i].session for i in waited], [answers[i] for i in waited])
        for i, tokens in zip(waited, read):
            answers[i] = tokens
    return answers
