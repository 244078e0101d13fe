"""Each rule that losslessness rests on, broken on purpose: the ladder must notice. A surviving mutant is a hole in the tests."""

from __future__ import annotations

import pytest
import torch

import decoders.das_wave
import decoders.draft_then_verify
from decoders import DASWave, DraftThenVerify, Wavefront
from decoders.calls import Read
from decoders.session import Session
from decoders.verify import verify_generation
from loopscope.attention import ChainPlan, WavePlan
from loopscope.cache import DepthCache
from loopscope.models.looped import LoopedCore
from loopscope.random_models import make_random_core
from loopscope.rows import ALIGNED, At, Chain, ReadPolicy

WFD, DTV, DEEP, DAS = Wavefront(1), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"), DASWave(5, 1)


def commits_the_draft(mp):
    """A rejected draft is committed all the same."""
    def settle(self, drafts, targets):
        for draft in drafts:
            self.judge(True, len(self.tokens), draft)
            if not self.commit(draft):
                break
        else:
            self.commit(targets[-1])
        self.cache.commit(len(self.tokens) - 1)
    mp.setattr(Session, "settle", settle)


def keeps_lanes_after_a_reject(mp):
    """A lane behind a wrong draft survives."""
    original = Session.judge
    def judge(self, right, position, draft):
        original(self, right, position, draft)
        self.wrong = draft
    mp.setattr(Session, "judge", judge)
    commit = Session.commit
    mp.setattr(Session, "commit", lambda self, token: commit(self, getattr(self, "wrong", token)))


def commits_beyond_what_was_verified(mp):
    """Materialising one position too many: the cache is not rolled back."""
    original = DepthCache.commit
    mp.setattr(DepthCache, "commit", lambda self, length: original(self, min(length + 1, self.capacity)))


def wave_slot_off_by_one(mp):
    """A wave's rows read the slot next to their own."""
    original = WavePlan.__init__
    def init(self, cache, rows):
        original(self, cache, rows)
        shift = 1 if self.last + 1 < cache.depth else -1
        self.first, self.last = self.first + shift, self.last + shift
        if self.slots is not None:
            self.slots = self.slots + shift
    mp.setattr(WavePlan, "__init__", init)


def draft_states_leak_into_the_target(mp):
    """Deep-read drafts are verified from their own states instead of fresh ones."""
    original = decoders.draft_then_verify.DraftThenVerify._block
    def block(self, session, size, policy):
        start = session.core.start
        session.start = lambda x, rows: start(x, rows, seed=session.seed) + 0.5 * (rows.count > 1)
        return original(self, session, size, policy)
    mp.setattr(decoders.draft_then_verify.DraftThenVerify, "_block", block)


def draft_keys_leak_into_the_prefix(mp):
    """Draft K/V are written one position into the verified prefix."""
    original = ChainPlan.attend
    def attend(self, cached, q, k, v, pattern=None):
        z = original(self, cached, q, k, v, pattern)
        if self.count > 1 and self.start > 0 and self.k_slot == 0:
            cached[0][:, self.k_slot, :, self.start - 1] += 0.1
        return z
    mp.setattr(ChainPlan, "attend", attend)


def stale_coda(mp):
    """The verify row does not write its coda K/V at full depth: the draft's shallow ones stay."""
    original = Read.run
    def run(self):
        if not (isinstance(self.rows, At) or self.rows.count > 1):
            return original(self)
        cache = self.session.cache
        before = [(k.clone(), v.clone()) for k, v in cache.coda]
        tokens = original(self)
        cache.coda = before
        return tokens
    mp.setattr(Read, "run", run)


def start_state_depends_on_the_call(mp):
    """s_0 is keyed by the offset inside the call, not by the position."""
    original = LoopedCore.start
    mp.setattr(LoopedCore, "start", lambda self, x, rows=None, **options: original(self, x, Chain(0, x.shape[1]), **options))


def a_stop_inside_an_accepted_block_is_ignored(mp):
    """A block is committed to its end, whatever is in it."""
    def settle(self, drafts, targets):
        for i, target in enumerate(targets):
            if i < len(drafts):
                self.judge(drafts[i] == target, len(self.tokens), drafts[i])
            self.commit(target)
            if i >= len(drafts) or drafts[i] != target:
                break
        self.cache.commit(len(self.tokens) - 1)
    mp.setattr(Session, "settle", settle)


def ties_go_to_the_highest_index(mp):
    """Decoders other than AR break ties the other way."""
    original = LoopedCore.read
    def read(self, state, rows=None, cache=None, tap=None):
        logits = original(self, state, rows, cache, tap).round(decimals=0)
        return logits - 1e-3 * torch.arange(logits.shape[-1], 0, -1) * (rows.count > 1)
    mp.setattr(LoopedCore, "read", read)


def carry_is_dropped(mp):
    """DAS-Wave restarts its states every round although it should carry them: slower, and the calls say so."""
    def advance(self, session, state, x, anchor, counts, policy, freeze):
        for _ in range(2):
            state = yield session.recur(state, x, Chain(anchor, len(counts)), policy)
        return state, counts
    mp.setattr(decoders.das_wave.DASWave, "_advance", advance)


def reads_a_deep_prefix_while_verifying(mp):
    """Verification uses the draft's read policy."""
    original = Session.recur
    def recur(self, state, x, rows, policy=ALIGNED, role="target"):
        verifying = isinstance(rows, Chain) and rows.count > 1 and rows.start > 0
        return original(self, state, x, rows, ReadPolicy(self.depth, self.depth) if verifying else policy, role)
    mp.setattr(Session, "recur", recur)


MUTANTS = [
    (commits_the_draft, DTV), (keeps_lanes_after_a_reject, WFD), (commits_beyond_what_was_verified, WFD), (wave_slot_off_by_one, WFD),
    (draft_states_leak_into_the_target, DEEP), (draft_keys_leak_into_the_prefix, DAS), (stale_coda, DTV), (stale_coda, WFD),
    (start_state_depends_on_the_call, DEEP), (a_stop_inside_an_accepted_block_is_ignored, DTV), (ties_go_to_the_highest_index, DTV),
    (carry_is_dropped, DAS), (reads_a_deep_prefix_while_verifying, DTV),
]


class Letters:
    """A tokenizer of one letter per id, so that stop strings can be written down."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(0x4E00 + i) for i in ids)


def random_model(seed: int, gain: float):
    core = make_random_core("huginn", gain=gain, seed=seed, n_core=2)
    core.tokenizer = Letters()
    return core


def survives(decoder, stop=()) -> bool:
    """Whether the ladder passes on every one of a few fixed draws, from high acceptance to almost none."""
    try:
        return all(verify_generation(decoder, random_model(seed, gain), [1, 2, 3, 4], 24, 5, stop=stop).ok
                   for seed, gain in ((0, 0.05), (1, 0.1), (2, 1.0)))
    except Exception:
        return False


def stop_inside_an_accepted_block() -> str:
    """A text that is complete at an accepted draft behind which its block goes on."""
    got = DTV.generate(random_model(0, 0.05), [1, 2, 3, 4], 24, 5)
    ticks = [e.tick for e in got.trace if e.event == "commit"]
    for i in range(2, len(ticks) - 1):
        if ticks[i] == ticks[i + 1] and got.text.index(got.text[i]) == i:
            return got.text[i]
    raise AssertionError("no such token: the draw must accept more")


@pytest.mark.parametrize("decoder", [WFD, DTV, DEEP, DAS], ids=repr)
def test_the_unbroken_decoders_pass(decoder):
    assert survives(decoder) and survives(decoder, stop_inside_an_accepted_block())


@pytest.mark.parametrize("mutant, decoder", MUTANTS, ids=lambda x: getattr(x, "__name__", None) or repr(x))
def test_a_broken_rule_is_noticed(mutant, decoder, monkeypatch):
    stop = stop_inside_an_accepted_block() if mutant is a_stop_inside_an_accepted_block_is_ignored else ()
    mutant(monkeypatch)
    assert not survives(decoder, stop), mutant.__doc__
