"""The calls a generation should have cost: from its own trace, and from the reference's early readings alone."""

from __future__ import annotations

from collections.abc import Sequence

from decoders.autoregressive import Autoregressive
from decoders.counting import (
    Block,
    Counts,
    autoregressive_counts,
    block_counts,
    das_wave_counts,
    draft_then_verify_counts,
    path_calls,
    wave_counts,
)
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.generation import Generation
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup
from decoders.reference import Reference
from decoders.session import Session
from decoders.wavefront import Wavefront


def predicted_counts(decoder: Decoder, generation: Generation, session: Session) -> tuple[Counts | None, bool]:
    """(calls predicted from what was drafted and committed, whether that is only an upper bound)."""
    tokens, depth, trace = generation.tokens, generation.depth, generation.trace
    n = len(tokens)
    if isinstance(decoder, Autoregressive):
        return autoregressive_counts(n, depth), False
    if isinstance(decoder, Wavefront):
        changes = {(e.tick, e.position - generation.prompt_length): e.token for e in trace if e.event == "draft"}
        return wave_counts(changes, tokens, depth, decoder.draft_depth, decoder.redraft, session.limit, session.eos), False
    if isinstance(decoder, LoopSpec):
        if decoder.second_depth is not None:
            return None, False  # rows and readouts depend on the whole tree; its calls are held to its committed branch
        changes = {(e.tick, e.position - generation.prompt_length): e.token for e in trace if e.event == "draft"}
        return wave_counts(changes, tokens, depth, decoder.draft_depth, None, session.limit, session.eos), False
    blocks = blocks_of(generation, session)
    if isinstance(decoder, DraftThenVerify):
        return block_counts(blocks, n, depth, decoder.draft_depth, decoder.read == "aligned"), False
    if isinstance(decoder, PromptLookup):
        return block_counts(blocks, n, depth, 0, reuse=False), False
    if isinstance(decoder, DASWave):
        most = das_wave_counts([b.accepted for b in blocks], n, depth, session.rounds, decoder.updates, decoder.capacity,
                               decoder.initial_width, decoder.growth, decoder.bonus, session.limit,
                               [b.drafts if b.ends else None for b in blocks])
        return most, decoder.carry is None and not session.core.config.injects
    return None, False


def blocks_of(generation: Generation, session: Session) -> list[Block]:
    """The blocks of a decoder that verifies blocks, from its trace: drafts behind an EOS among them are never judged."""
    blocks: list[Block] = []
    drafted: list[int] = []
    accepted, gained, judged = 0, 0, None  # judged: at which tick the block was
    for event in [*generation.trace, None]:
        if event is None or event.event == "draft":
            if drafted and (event is None or judged is not None):
                ends = next((i for i, token in enumerate(drafted) if token in session.eos), None)
                rounds = session.rounds[len(blocks)] if session.rounds else 0
                blocks.append(Block(len(drafted) if ends is None else ends + 1, ends is not None, accepted, rounds, gained))
                drafted, accepted, gained = [], 0, 0
            judged = None
            if event is not None:
                drafted.append(event.token)
        elif event.event in ("accept", "reject"):
            judged = event.tick
            accepted += event.event == "accept"
        elif event.event == "commit" and event.tick == judged:
            gained += 1
    return blocks


def forced_calls(decoder: Decoder, session: Session, reference: Reference) -> int | None:
    """recur calls after prefill by one teacher-forced pass, for decoders whose drafts are the target's own early readings.

    Exact replay (docs/algorithms.md, section 3): a draft made behind right predecessors has exactly the teacher-forced logits of its
    depth. None where that is not exact: a readout with attention, a foreign read policy, a gate or a cap on branches.
    """
    if reference.readings is None:
        return None
    new, depth = session.new_tokens, session.depth
    readings = reference.readings.tolist()  # [r - 1][i]: what depth r says new token i is

    def at(r: int, i: int) -> int:
        """What the lane of input i reads at depth r."""
        return readings[r - 1][i + 1]

    inputs = range(len(new) - 1)
    if isinstance(decoder, Wavefront) or (isinstance(decoder, LoopSpec) and not decoder.gate and decoder.lanes >= 64):
        settled = [_settled(decoder, [at(r, i) for r in range(1, depth)], new[i + 1], i + 2 < session.limit) for i in inputs]
        return path_calls(settled, depth)
    if isinstance(decoder, DraftThenVerify) and decoder.read == "aligned" and not session.eos and len(new) == session.limit:
        accepts = [at(decoder.draft_depth, i) == new[i + 1] for i in inputs]  # a wrong draft of an EOS would cut a block
        return draft_then_verify_counts(accepts, len(new), depth, decoder.draft_depth, decoder.block).recur
    return None


def traced_calls(decoder: LoopSpec, generation: Generation) -> int:
    """recur calls of a wave with second proposals, along the committed branch: where each of its lanes made the right proposal."""
    drafted = {(e.tick, e.position, e.depth, e.token) for e in generation.trace if e.event == "draft"}
    first, depth, tokens = generation.prompt_length, generation.depth, generation.tokens
    settled: list[int | None] = []
    born = 0
    for i in range(len(tokens) - 1):
        made = [r for r in (decoder.draft_depth, decoder.second_depth)
                if r is not None and (born + r, first + i + 1, r, tokens[i + 1]) in drafted]
        settled.append(made[0] if made else None)
        born += made[0] if made else depth
    return path_calls(settled, depth)


def _settled(decoder: Wavefront | LoopSpec, readings: Sequence[int], target: int, drafts: bool) -> int | None:
    """At which depth a lane last drafted what was committed behind it. readings: what depths 1..T-1 say."""
    d, depth = decoder.draft_depth, len(readings) + 1
    if d >= depth or not drafts:
        return None
    if isinstance(decoder, LoopSpec):
        proposals = [d] + ([decoder.second_depth] if decoder.second_depth is not None else [])
        return next((r for r in proposals if readings[r - 1] == target), None)
    at, token = d, readings[d - 1]
    if decoder.redraft:
        for r in range(d + decoder.redraft, depth, decoder.redraft):
            if readings[r - 1] != token:
                at, token = r, readings[r - 1]
    return at if token == target else None
