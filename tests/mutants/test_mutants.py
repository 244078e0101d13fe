"""Each rule that losslessness rests on, broken on purpose: the ladder must notice. A surviving mutant is a hole in the tests."""

from __future__ import annotations

import pytest
import torch

import decoders.das_wave
import decoders.draft_then_verify
import decoders.loopspec
import decoders.sampling
import decoders.verify
import decoders.wavefront
from decoders import DASWave, DraftThenVerify, LoopSpec, Sampling, Wavefront
from decoders.calls import Read
from decoders.ladder import Case, check
from decoders.sampling import SharedNoise
from decoders.session import Session
from loopscope.attention import ChainPlan
from loopscope.attention_mixed import WavePlan
from loopscope.cache import DepthCache, LayerCache
from loopscope.errors import LoopscopeError
from loopscope.merged import CacheGroup
from loopscope.models.looped import LoopedCore
from loopscope.rows import ALIGNED, At, Chain, ReadPolicy, Tree

WFD, DTV, DEEP, DAS = Wavefront(1), DraftThenVerify(1, 4), DraftThenVerify(1, 4, "deep_kv"), DASWave(5, 1)
REDRAFT, SPEC = Wavefront(1, redraft=1), LoopSpec(1, 3)


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
        before = [LayerCache((k.clone(), v.clone())) for k, v in cache.coda]
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
    def read(self, state, rows=None, cache=None, tap=None, keep=None):
        logits = original(self, state, rows, cache, tap, keep).round(decimals=0)
        return logits - 1e-3 * torch.arange(logits.shape[-1], 0, -1) * (rows.count > 1)
    mp.setattr(LoopedCore, "read", read)


def runs_two_recurrences_for_one(mp):
    """DAS-Wave refines twice as much as was asked for: nobody but the calls says so."""
    def advance(self, session, state, x, anchor, counts, policy, freeze):
        for _ in range(2):
            state = yield session.recur(state, x, Chain(anchor, len(counts)), policy)
        return state, counts
    mp.setattr(decoders.das_wave.DASWave, "_advance", advance)


def carry_is_dropped(mp):
    """DAS-Wave restarts its states every round although it should carry them: the tokens stay right, the drafts do not."""
    original = decoders.das_wave.DASWave._refine
    mp.setattr(decoders.das_wave.DASWave, "_refine", lambda self, session, anchor, most, policy, carry, freeze: original(
        self, session, anchor, most, policy, False, freeze))


def policy_depth_off_by_one(mp):
    """Drafts read the prefix at depth T - 1 in place of T: the tokens stay right, the drafts do not."""
    class Shallower(ReadPolicy):
        @classmethod
        def named(cls, name, depth):
            return ReadPolicy.named(name, max(depth - 1, 1))
    for module in (decoders.das_wave, decoders.draft_then_verify):
        mp.setattr(module, "ReadPolicy", Shallower)


def reads_a_deep_prefix_while_verifying(mp):
    """Verification uses the draft's read policy."""
    original = Session.recur
    def recur(self, state, x, rows, policy=ALIGNED, role="target"):
        verifying = isinstance(rows, Chain) and rows.count > 1 and rows.start > 0
        return original(self, state, x, rows, ReadPolicy(self.depth, self.depth) if verifying else policy, role)
    mp.setattr(Session, "recur", recur)


def eos_is_ignored(mp):
    """An EOS, inside an accepted block or not, does not end a sequence."""
    original = Session.commit
    def commit(self, token):
        eos, self.eos = self.eos, frozenset()
        goes_on = original(self, token)
        self.eos = eos
        return goes_on
    mp.setattr(Session, "commit", commit)


def drafts_run_on_behind_an_eos(mp):
    """A block holds drafts behind an EOS, and is committed to its end."""
    a_stop_inside_an_accepted_block_is_ignored(mp)
    original = Session.read
    def read(self, *arguments, **options):
        self.eos = frozenset()
        return original(self, *arguments, **options)
    mp.setattr(Session, "read", read)


def noise_is_keyed_by_the_call(mp):
    """Shared noise depends on a row's place in its call, not on its position."""
    original = decoders.sampling.gumbel
    mp.setattr(decoders.sampling, "gumbel", lambda seed, positions, like, stream: original(seed, range(len(positions)), like, stream))


def drafts_have_noise_of_their_own(mp):
    """Drafts are chosen with other noise than the target: nothing is wrong, but nothing is accepted either."""
    mp.setattr(SharedNoise, "guess", lambda self, logits, positions, keys: self.draft(logits, [p + 1 for p in positions], keys))


def a_sequence_reads_its_neighbours_cache(mp):
    """In a batch, the core layers of one sequence attend to another's K/V."""
    original = CacheGroup.__init__
    def init(self, members):
        original(self, members)
        self.core = [pairs[1:] + pairs[:1] for pairs in self.core]
    mp.setattr(CacheGroup, "__init__", init)


def a_batch_shares_one_seed(mp):
    """Every sequence of a batch is decoded under the first one's seed."""
    original = decoders.verify.Decoder._open
    seeds = []
    def open_(self, model, prompt, limit, depth=None, seed=0, *rest, index=0, **options):
        seeds[index:] = [seed] if not index else seeds[:1]
        return original(self, model, prompt, limit, depth, seeds[0] if index else seed, *rest, index=index, **options)
    mp.setattr(decoders.verify.Decoder, "_open", open_)


def a_redraft_keeps_the_old_successors(mp):
    """What ran on a draft that has changed since stays in the wave."""
    original = decoders.wavefront._Lanes.keep
    mp.setattr(decoders.wavefront._Lanes, "keep", lambda self, start, end: original(self, start, end) if start else None)


def a_redraft_is_not_noticed(mp):
    """Lanes are read again and nothing comes of it."""
    original = decoders.wavefront.Wavefront._read
    def read(self, session, lanes, verify, drafting):
        target, drafts = yield from original(self, session, lanes, verify, drafting)
        return target, [token if lanes.guesses[i] is None else lanes.guesses[i] for i, token in zip(drafting, drafts)]
    mp.setattr(decoders.wavefront.Wavefront, "_read", read)


def a_second_proposal_is_not_verified(mp):
    """Where the first proposal was wrong the second one is taken for right."""
    original = Session.choose
    def choose(self, logits, read):
        tokens = original(self, logits, read)
        if read.drafts and len(read.drafts[0]) == 2 and int(tokens[0]) not in read.drafts[0]:
            tokens[0] = read.drafts[0][1]
        return tokens
    mp.setattr(Session, "choose", choose)


def a_branch_reads_its_siblings(mp):
    """A row of a tree also reads the rows of other branches before it."""
    def tree(at, cells, ancestors, depths, prefix):
        seen = tuple(tuple(dict.fromkeys((*[c for c, q in zip(cells, at) if q < p], *own))) for p, own in zip(at, ancestors))
        return Tree(at, cells, seen, depths, prefix)
    mp.setattr(decoders.loopspec, "Tree", tree)


def a_kept_branch_leaves_its_cells_behind(mp):
    """The second branch wins, and its K/V are not moved to where the prefix is read."""
    mp.setattr(DepthCache, "move", lambda self, source, target: None)


MUTANTS = [
    (commits_the_draft, DTV), (keeps_lanes_after_a_reject, WFD), (commits_beyond_what_was_verified, WFD), (wave_slot_off_by_one, WFD),
    (draft_states_leak_into_the_target, DEEP), (draft_keys_leak_into_the_prefix, DAS), (stale_coda, DTV), (stale_coda, WFD),
    (start_state_depends_on_the_call, DEEP), (a_stop_inside_an_accepted_block_is_ignored, DTV), (ties_go_to_the_highest_index, DTV),
    (runs_two_recurrences_for_one, DAS), (carry_is_dropped, DAS), (policy_depth_off_by_one, DAS), (policy_depth_off_by_one, DEEP),
    (reads_a_deep_prefix_while_verifying, DTV), (eos_is_ignored, DTV), (eos_is_ignored, WFD), (drafts_run_on_behind_an_eos, DTV),
    (noise_is_keyed_by_the_call, DTV), (drafts_have_noise_of_their_own, DAS), (a_sequence_reads_its_neighbours_cache, WFD),
    (a_batch_shares_one_seed, DTV), (a_redraft_keeps_the_old_successors, REDRAFT), (a_redraft_is_not_noticed, REDRAFT),
    (a_second_proposal_is_not_verified, SPEC), (a_branch_reads_its_siblings, SPEC), (a_kept_branch_leaves_its_cells_behind, SPEC),
]
# What a mutant needs beyond one greedy sequence without an end.
NEEDS = {
    a_stop_inside_an_accepted_block_is_ignored: {"stop": (20, 2)}, eos_is_ignored: {"eos": (6,)},
    drafts_run_on_behind_an_eos: {"eos": (6,)}, a_redraft_is_not_noticed: {"family": "ouro"},
    noise_is_keyed_by_the_call: {"sampling": Sampling(1.3, top_p=0.9)}, drafts_have_noise_of_their_own: {"sampling": Sampling(1.3)},
    a_sequence_reads_its_neighbours_cache: {"batch": 2}, a_batch_shares_one_seed: {"batch": 2},
}


def draws(decoder, batch: int = 1, family: str = "huginn", **changes) -> list[Case]:
    """A few fixed cases, from high acceptance to almost none."""
    prompts, limits = ((1, 2, 3, 4), (5, 6))[:batch], (16, 11)[:batch]
    return [Case(-1, family, gain, seed, decoder, 5, prompts, limits, (0, 1)[:batch], **changes)
            for seed, gain in ((0, 0.1), (1, 0.3), (2, 1.5))]


def survives(decoder, **changes) -> bool:
    """Whether the ladder passes on every one of the draws."""
    try:
        return all(verdict.ok for case in draws(decoder, **changes) for verdict in check(case))
    except (LoopscopeError, ValueError, LookupError, RuntimeError):  # not TypeError or AttributeError: then the mutant itself is broken
        return False


@pytest.mark.parametrize("changes", [{}, {"stop": (20, 2)}, {"eos": (6,)}, {"sampling": Sampling(1.3, top_p=0.9)}, {"batch": 2}],
                         ids=lambda changes: next(iter(changes), "plain"))
def test_the_unbroken_decoders_pass(changes):
    for decoder in {DTV, WFD, DEEP, DAS, REDRAFT, SPEC}:
        assert survives(decoder, **changes), decoder


def test_the_draws_accept_and_reject_under_every_decoder():
    for decoder in {DTV, WFD, DEEP, DAS, REDRAFT, SPEC}:
        rates = [v.generation.alpha for case in draws(decoder) for v in check(case)]
        assert min(rates) < 0.6 and max(rates) > 0.9, decoder


@pytest.mark.parametrize("mutant, decoder", MUTANTS, ids=lambda x: getattr(x, "__name__", None) or repr(x))
def test_a_broken_rule_is_noticed(mutant, decoder, monkeypatch):
    mutant(monkeypatch)
    assert not survives(decoder, **NEEDS.get(mutant, {})), mutant.__doc__
