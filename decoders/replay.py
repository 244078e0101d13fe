"""What every aligned decoder would do on a text, from one teacher-forced pass: calls, widths and accepts of all settings at once.

    table = replay(model, prompts, 64)                     # AR output, then one pass over it (probes/replay.py)
    predict_from_replay(table, [Wavefront(1), DraftThenVerify(2, 8), Wavefront(1, redraft=1), LoopSpec(1, 2)])

A draft behind right predecessors has the teacher-forced state of its depth, and only such drafts are ever judged, so calls and
accepts follow exactly. Where the coda attends (Huginn, Raven, Parcae, Dory) a draft also sees what its predecessors' own readouts
left in the coda's K/V. What they left is emulated: a lane in flight shows the readout it had last, at the depth its decoder last
read it, made in turn behind predecessors as they were then; a verified one shows its full-depth readout. Who is in flight follows
from earlier accepts, so the drafts are read again until the wave that they imply is the wave they were read in. Each round settles
one more lane at least, so it ends, and the result is the decoder's own. Source: docs/algorithms.md, 3 (Exact replay).

Greedy decoding only. Every outcome says what in it is exact (decoders/replay_counts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from decoders.autoregressive import Autoregressive
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.loopspec import LoopSpec
from decoders.replay_counts import Branching, History, Outcome, Text, block_counts, blocks, most_lanes, rereading, starts, twice, wave
from decoders.replay_tree import capped_tree
from decoders.wavefront import Wavefront
from loopscope.errors import SettingError
from loopscope.records import Result
from probes.inputs import read_prompts
from probes.replay import Pass, ReplayResult, replay_table

if TYPE_CHECKING:
    from decoders.carried import Refinements
    from loopscope.models.looped import LoopedCore

_NO_REPLAY = "no replay: its drafts, or its tokens, are not those of the target's own recurrences"
_BEHIND_VERIFIED = "its drafts are those behind verified predecessors: tables from disk have no states to read others from"


@dataclass(frozen=True, eq=False)
class ReplayPrediction(Result):
    """One row per prompt and decoder. calls_per_token: block calls per token after the prefill's; mean_width: rows per block call.

    exact: recur_calls, proposed and accepted are what the decoder will count; rows_exact: rows, prelude_calls and readout_calls too;
    note: why not. A decoder that cannot be replayed has nan throughout.
    """

    kind = "replay_prediction"
    columns = ("model", "task", "prompt", "decoder", "tokens", "recur_calls", "prelude_calls", "readout_calls", "rows", "proposed",
               "accepted", "calls_per_token", "alpha", "mean_width", "exact", "rows_exact", "note")


@torch.inference_mode()
def replay(model: Any, prompts: Iterable[Any], max_new_tokens: int = 64, *, task: str = "", model_name: str | None = None,
           depth: int | None = None, start_state: str | Tensor | None = None, seed: int = 0, prefix: int = 0,
           progress: bool = True) -> ReplayResult:
    """Decode every prompt autoregressively and record the text at every depth. Options and errors as for `Decoder.generate`."""
    ids = read_prompts(model.core, prompts, 1, "a replay")
    same: dict[str, Any] = {"depth": depth, "start_state": start_state, "seed": seed, "prefix": prefix}
    texts = [Autoregressive().generate(model, own, max_new_tokens, **same).tokens for own in ids]
    return replay_table(model, ids, texts, limit=max_new_tokens, task=task, model_name=model_name, progress=progress, **same)


def predict_from_replay(table: ReplayResult, decoders: Sequence[Decoder], refinements: Refinements | None = None) -> ReplayPrediction:
    """What each decoder will count on each prompt of the table.

    refinements: drafts of the same texts, for decoders whose drafts are not the target's own early readings, and for LoopSpec where its
    cap binds.
    """
    import pandas as pd

    nan, rows = float("nan"), []
    for index, ((prompt, part), text) in enumerate(zip(table.frame.groupby("prompt"), table.prompts())):
        name, task = part.model.iloc[0], part.task.iloc[0]
        for decoder in decoders:
            fixed = (name, task, prompt, decoder.label, len(text.tokens))
            got = replayed(text, decoder)
            if refinements is not None and (got is None or not got.exact):
                got = (refinements.outcome if got is None else refinements.tried)(index, decoder) or got
            if got is None:
                rows.append((*fixed, *[nan] * 9, False, False, _NO_REPLAY))
                continue
            rows.append((*fixed, got.recur, got.prelude, got.readout, got.rows, got.proposed, got.accepted,
                         got.recur / text.lanes if text.lanes else nan, got.accepted / got.proposed if got.proposed else nan,
                         got.rows / got.recur if got.recur else nan, got.exact, got.rows_exact, got.note))
    return ReplayPrediction(pd.DataFrame(rows, columns=list(ReplayPrediction.columns)), dict(table.meta))


def replayed_accepts(core: LoopedCore, prompt: Any, tokens: Sequence[int], decoder: Decoder, *, limit: int | None = None,
                     depth: int | None = None, seed: int = 0, start_state: str | Tensor | None = None, prefix: int = 0) -> Outcome | None:
    """What `decoder` must count when it generates `tokens` (greedy) from `prompt`; None where it cannot be replayed.

    `accepts` of the outcome says for new token i (from 1; 0 is the prefill's) whether its draft was right, of those that are judged.
    limit: the max_new_tokens asked for; default: as many as there are.
    """
    table = replay_table(core, [prompt], [tokens], limit=limit, depth=depth, seed=seed, start_state=start_state, prefix=prefix,
                         progress=False)
    return replayed(table.passes[0], decoder)


@torch.inference_mode()
def replayed(text: Pass, decoder: Decoder) -> Outcome | None:
    """What one decoder does on one text; None for one that reads its drafts otherwise. Raises SettingError for depths beyond T."""
    own, full = Text(text.tokens[1:], text.limit, text.eos), text.depth
    if not decoder.lossless:
        return None
    if isinstance(decoder, Autoregressive):
        return block_counts([], Text(own.truth, own.limit, own.eos), full, full, 0)
    if isinstance(decoder, DraftThenVerify):
        if decoder.read != "aligned":
            return None
        _check(decoder.draft_depth, full)
        histories, settled = _settled(text, own, [decoder.draft_depth], lambda h: _chain_behind(h, own, decoder.block))
        return _marked(block_counts([h[0] for h in histories], own, full, decoder.draft_depth, decoder.block), settled)
    if isinstance(decoder, (Wavefront, LoopSpec)):
        _check(decoder.draft_depth, full)
        depths, children, gate, most = _wave_settings(decoder, full)
        histories, settled = _settled(text, own, depths, lambda h: _wave_behind(starts(h, own, full, children), depths, full), gate)
        if most is not None and most_lanes(histories, own, full, depths, children) > most:
            note = f"more than {most} lanes may be asked for, and which are then refused depends on what wrong ones propose"
            return _marked(capped_tree(histories, own, full, depths, most, note), settled)
        return _marked(wave(histories, own, full, depths, children), settled)
    return None


def _check(draft_depth: int, full: int) -> None:
    if draft_depth > full:
        raise SettingError(f"draft_depth {draft_depth} is deeper than the {full} recurrences of this replay")


def _wave_settings(decoder: Wavefront | LoopSpec, full: int) -> tuple[list[int], Branching, float, int | None]:
    """(depths at which a lane drafts, what it spawns, least probability of a second proposal, most lanes)."""
    d = decoder.draft_depth
    if isinstance(decoder, LoopSpec):
        depths = [r for r in (d, decoder.second_depth) if r is not None and r < full]
        return depths, twice(depths, full), decoder.gate, decoder.lanes
    depths = list(range(d, full, full if decoder.redraft is None else decoder.redraft))
    return depths, rereading(depths, full), 0.0, None


def _marked(outcome: Outcome, settled: bool) -> Outcome:
    if settled:
        return outcome
    note = "; ".join(filter(None, (_BEHIND_VERIFIED, outcome.note)))
    return Outcome(**{**vars(outcome), "exact": False, "rows_exact": False, "note": note})


# Row i * reads + k is the k-th read of lane i. Pairs of rows: one, and another that is in flight before it, as it was last read.
InFlight = tuple[np.ndarray, np.ndarray]


def _settled(text: Pass, own: Text, depths: Sequence[int],
             in_flight: Callable[[list[History]], InFlight], gate: float = 0.0) -> tuple[list[History], bool]:
    """Drafts of every lane at `depths`, and whether they are the decoder's own."""
    lanes = max(min(text.lanes, own.drafting), 0)
    at = torch.tensor(depths, dtype=torch.long) - 1
    drafts, probability = text.drafts[at, :lanes].T, text.probability[at, :lanes].T
    histories = _gated(drafts, probability, gate)
    if not text.attends or not lanes or not depths:
        return histories, True
    if text.live is None:
        return histories, False
    reads = len(depths)
    lane, depth = np.repeat(np.arange(lanes), reads), np.tile(depths, lanes)
    seen: InFlight | None = None
    while True:
        rows, others = in_flight(histories)
        rows, others = rows[rows < lanes * reads], others[rows < lanes * reads]
        if seen is not None and np.array_equal(rows, seen[0]) and np.array_equal(others, seen[1]):
            return histories, True
        seen = rows, others
        ancestors = np.eye(lanes * reads, dtype=bool)
        ancestors[rows, others] = True
        verified = lane.copy()
        np.minimum.at(verified, rows, others // reads)
        made = text.read(lane.tolist(), depth.tolist(), verified.tolist(), torch.from_numpy(ancestors))
        token, weight = (part.cpu().view(lanes, reads) for part in made)
        histories = _gated(token, weight, gate)


def _gated(drafts: Tensor, probability: Tensor, gate: float) -> list[History]:
    """[lanes, reads] -> a history per lane; a later draft below the gate proposes nothing, as if it repeated the first."""
    if gate:
        weak = probability < gate
        weak[:, :1] = False
        drafts = torch.where(weak, drafts[:, :1], drafts)
    return drafts.tolist()


def _wave_behind(born: Sequence[int], depths: Sequence[int], full: int) -> InFlight:
    """In a wave whose lanes start after ticks `born`."""
    start, reads, lanes = np.array(born), np.array(depths), np.arange(len(born))[:, None, None]
    before = lanes - np.arange(1, full + 1)  # [lanes, 1, full]: the lanes that may be in flight
    age = start[lanes] + reads[:, None] - start[np.maximum(before, 0)]
    last = np.searchsorted(reads, age, side="right") - 1
    rows, others = lanes * len(reads) + np.arange(len(reads))[:, None], before * len(reads) + last
    flying = (before >= 0) & (age < full)
    return np.broadcast_to(rows, age.shape)[flying], np.broadcast_to(others, age.shape)[flying]


def _chain_behind(histories: Sequence[History], own: Text, size: int) -> InFlight:
    """The same for draft-then-verify, which reads a lane once: the lanes of the block before it."""
    pairs = [(i, q) for block in blocks([h[0] for h in histories], own, size)
             for i in range(block.anchor, min(block.anchor + block.accepted + 1, len(histories))) for q in range(block.anchor, i)]
    rows, others = np.array(pairs, dtype=int).reshape(-1, 2).T
    return rows, others
