"""Static decoding: the whole of a decoder's turn as one function of tensors, with acceptance, token choice and rollback on the device.

    decoder.generate(core, prompt, static=True)

A generator decoder (decoders/calls.py) asks the host what to do after every readout. Here a turn (a token of AR, d ticks of a wave,
a block of DAS-Wave) runs from its first call to its acceptance without the host: what was committed, which lanes go on and where
they stand are tensors, which the next turn finds where this one left them. The host gets one small tensor per turn, from which it
keeps the books (tokens, counts, trace): exactly those of the generator. It may read it a turn late (`lag`): the device needs no
answer, and a turn that ran beyond the end of the text has written only behind the committed prefix; `session.ahead` says how many
such calls there were. A turn is captured as a CUDA graph on CUDA and runs eagerly elsewhere (decoders/graphs.py): the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decoders.graphs import Captured, Eager, runner_for
from loopscope.errors import SettingError
from loopscope.models.looped import LoopedCore
from loopscope.rows import Chain, Rows
from loopscope.static_rows import Static

if TYPE_CHECKING:
    from decoders.decoder import Decoder
    from decoders.session import Session
    from loopscope.cache import DepthCache


class Turn:
    """What all static decoders share: cache, text in flight, start states, and the mail to the host.

    at, tok, live [lanes]: position and token of every lane, and whether there is one. end: the last position whose output counts.
    """

    def __init__(self, core: LoopedCore, cache: DepthCache, depth: int, lanes: int, mail: int, runner: Eager | Captured) -> None:
        self.core, self.cache, self.depth, self.runner = core, cache, depth, runner
        self.scratch = cache.cells - 1
        device = cache.device
        self.at = torch.zeros(lanes, dtype=torch.long, device=device)
        self.tok = torch.zeros(lanes, dtype=torch.long, device=device)
        self.live = torch.zeros(lanes, dtype=torch.bool, device=device)
        self.end, self.first = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.eos = torch.tensor(sorted(core.config.eos), dtype=torch.long, device=device)
        self.mail = torch.zeros(mail, dtype=torch.long, device=device)
        shape = (1, cache.capacity, core.config.d_model) if core.has_start_state else (1, 0, 0)
        self.starts = torch.zeros(shape, dtype=cache.dtype, device=device)
        self.table = core.rotary_table  # held: a model may make a longer one, and what was captured reads this
        self._boxes: list[tuple[Tensor, Any]] = []
        self.coins: tuple[Tensor, ...] | None = None

    def open(self, session: Session) -> None:
        """Begin behind a prefilled prompt, at its first new token."""
        position, core = len(session.tokens) - 1, self.core
        self.at.fill_(position)
        self.tok.fill_(session.tokens[-1])
        self.live.zero_()
        self.live[-1:] = True
        self.end.fill_(session.last_input)
        self.first.fill_(position)
        ahead = session.last_input + 1 - position
        if core.has_start_state:
            like = self.starts[:, :ahead]
            like.copy_(LoopedCore.start(core, like, Chain(position, ahead), seed=session.seed, start_state=session.start_state))

    # ---- rows and calls: by numbers where the host knows them, by tensors where the turn is captured -----------

    def rows(self, at: Tensor, live: Tensor, depths: Sequence[int], start: int | None, reach: int) -> Rows | Static:
        """Consecutive rows at one depth or a wave of them; start: where they stand, if the host knows."""
        if start is None:
            return Static.of(at, live, self.scratch, reach, tuple(depths))
        return Chain(start, len(depths), depths[0])

    def begin(self, x: Tensor, at: Tensor) -> Tensor:
        """Start states of the rows of x [1, n, width] at `at` [n]."""
        if not self.core.has_start_state:
            return self.core.start(x)
        return self.core.carrying(self.starts.index_select(1, (at - self.first).clamp(0, self.starts.shape[1] - 1)), x)

    def choose(self, state: Tensor, rows: Any, at: Tensor, drafts: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Tokens [n] and whether their logits are NaN [n]. at [n]: the rows' positions; drafts: which of them draft, for coins."""
        best, tokens = self.core.read(state, rows, self.cache)[0].max(-1)
        if self.coins is not None:  # decoders/forced.py: the readout is real, what it chose is not used
            right, drafted = (table[(at + 1).clamp(max=len(table) - 1)] for table in self.coins)  # spare rows stand anywhere
            tokens = drafted if all(drafts) else right if not any(drafts) else torch.cat(
                [(drafted if draft else right)[i : i + 1] for i, draft in enumerate(drafts)])
        return tokens, best.isnan()

    def toss(self, tables: tuple[Tensor, Tensor] | None) -> None:
        """Take over tokens by position, for targets and for drafts; None: tokens are the logits' own."""
        if tables is None:
            self.coins = None
            return
        if self.coins is None:
            self.coins = tuple(t.new_zeros(self.cache.cells + 1) for t in tables)
        for mine, theirs in zip(self.coins, tables):
            n = min(len(mine), len(theirs))
            mine[:n].copy_(theirs[:n])

    # ---- mail ---------------------------------------------------------------------------------------------------

    def post(self, slot: int) -> tuple[Tensor, Any]:
        """Send the turn's mail to the host, without waiting. slot: which of the boxes in use."""
        if self.mail.device.type != "cuda":
            return self.mail if self.runner.knows else self.mail.clone(), None  # an eager turn waits for its mail to be read
        while len(self._boxes) <= slot:
            self._boxes.append((torch.empty(self.mail.shape, dtype=torch.long, pin_memory=True), torch.cuda.Event()))
        host, event = self._boxes[slot]
        host.copy_(self.mail, non_blocking=True)
        event.record()
        return host, event

    @staticmethod
    def open_mail(box: tuple[Tensor, Any]) -> list[int]:
        """What was posted: the one place where the host waits."""
        host, event = box
        if event is not None:
            event.synchronize()
        return host.tolist()


def why_not_static(decoder: Decoder, session: Session) -> str:
    """What keeps a decode from being static; "" if nothing does."""
    if session.tap is not None:
        return "hooks look at every call as it is made, and a captured call is not made again"
    if not session._greedy and getattr(session.chooser, "tables", None) is None:
        return "sampling draws its tokens on the host's terms"
    if any(module._forward_hooks or module._forward_pre_hooks for module in session.core.modules()):
        return "its modules have torch hooks, which a captured call would not run"
    if session.core.placement:
        return "the model's blocks lie on several devices"
    return decoder.why_not_static(session)


_kept: WeakKeyDictionary[LoopedCore, tuple[Any, Turn]] = WeakKeyDictionary()


def release(core: LoopedCore) -> None:
    """Let go of what the last captured decode of a model left for the next one: its graphs, its K/V cache and their memory."""
    _kept.pop(core, None)


def run_static(decoder: Decoder, session: Session, prefilled: Any, runner: Eager | Captured | None = None, lag: int | None = None) -> None:
    """Decode a session to its end. prefilled: runs its prefill. runner: default by device; lag: turns the host may be behind.

    A captured turn belongs to its cache, so the last one of a model is kept and lent again to a decode of the same kind.
    Raises SettingError where the decode cannot be static.
    """
    if why := why_not_static(decoder, session):
        raise SettingError(f"{decoder.label} cannot decode this statically: {why}; leave static out")
    core = session.core
    runner = runner_for(session.cache.device) if runner is None else runner
    lag = (0 if runner.knows or not decoder.runs_behind else 1) if lag is None else lag
    tables = getattr(session.chooser, "tables", None)
    if runner.knows:
        turn = decoder.static_turn(session, session.cache, runner)
    else:
        capacity = min(max(256, 1 << (session.cache.capacity - 1).bit_length()), core.config.context)
        weights = tuple((t.data_ptr(), t.dtype, t.device) for t in (*core.parameters(), *core.buffers()))
        key = (repr(decoder), decoder.slots, session.depth, capacity, weights, core.config.eos,
               type(runner), tables is None)
        kept = _kept.get(core)
        if kept is None or kept[0] != key:
            _kept.pop(core, None)  # its memory first
            cache = core.make_cache(capacity, session.depth, slots=decoder.slots, spare=1)
            _kept[core] = key, decoder.static_turn(session, cache, runner)
        turn = _kept[core][1]
        session.cache = turn.cache
        session.cache.commit(0)
    turn.toss(tables)
    prefilled()
    if not session.finished:
        turn.open(session)
        turn.decode(session, lag)  # type: ignore[attr-defined]
