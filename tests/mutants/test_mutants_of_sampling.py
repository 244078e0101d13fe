"""The rules that rejection sampling rests on, broken on purpose: the distribution of tokens must notice.

Leviathan, Kalman and Matias, arXiv 2211.17192: a draft x ~ q is accepted with probability min(1, p(x) / q(x)), and (p - q)+ takes its
place otherwise. Each check draws many independent tokens in one call and compares them with the target's law (chi-square, fixed seed).
"""

from __future__ import annotations

import pytest
import torch

import decoders.sampling
from decoders import Sampling
from decoders.sampling import Rejection

N, VOCAB = 20_000, 6
UNLIKELY = 1e-3
FIRST, SECOND, TARGET = (1.5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3))


def p_value(proposals: str) -> float:
    """Of the target's tokens, where they were proposed by one draft, by two, or by a guess that is certain."""
    from scipy.stats import chisquare

    sampler, at = Rejection(Sampling(0.8, method="rejection"), 3), list(range(N))
    first, second, target = (logits.expand(N, -1) for logits in (FIRST, SECOND, TARGET))
    if proposals == "a guess":
        drafts = [[t] for t in sampler.guess(first, at, at).tolist()]
    else:
        drafts = [[t] for t in sampler.draft(first, at, at).tolist()]
        if proposals == "two drafts":
            drafts = [[*one, two] for one, two in zip(drafts, sampler.second(second, at, at).tolist())]
    tokens = sampler.target(target, at, drafts, at)
    law = (TARGET[0] / 0.8).softmax(-1)
    return chisquare(torch.bincount(tokens, minlength=VOCAB).numpy(), (law * N).numpy()).pvalue


def residual_replaced_by_p(mp):
    """What takes the place of a rejected draft is drawn from p, not from (p - q)+."""
    mp.setattr(decoders.sampling, "_residual", lambda p, q: p)


def q_forgotten(mp):
    """A draft is accepted with probability p(x), whatever it was drawn from."""
    mp.setattr(Rejection, "_law", lambda self, key, rank, token, like: torch.ones_like(like[0]))


def the_second_is_judged_by_the_first_law(mp):
    """A second proposal is taken for one drawn as the first was."""
    original = Rejection._law
    mp.setattr(Rejection, "_law", lambda self, key, rank, token, like: original(self, key, 0, token, like))


def the_second_is_judged_by_p(mp):
    """A second proposal meets the whole target law, although a first one was rejected before it."""
    def residual(p, q, original=decoders.sampling._residual, seen=[]):
        seen.append(1)
        return p if len(seen) == 2 else original(p, q)  # the call between the two proposals
    mp.setattr(decoders.sampling, "_residual", residual)


def both_proposals_meet_one_coin(mp):
    """The second proposal is tested with the number that the first one failed."""
    original = decoders.sampling.keyed_uniform
    accept = decoders.sampling._ACCEPT
    mp.setattr(decoders.sampling, "keyed_uniform", lambda seed, sequence, positions, width, stream=0, device="cpu": original(
        seed, sequence, positions, width, min(stream, accept), device))


def a_draft_and_its_replacement_share_noise(mp):
    """The replacement of a rejected draft is drawn with the noise that drew the draft."""
    mp.setattr(decoders.sampling, "_TARGET", decoders.sampling._DRAFT)


def a_certain_guess_keeps_an_old_law(mp):
    """A guess is judged as if it had been drawn."""
    def law(self, key, rank, token, like):
        return (FIRST[0] / 0.8).softmax(-1)
    mp.setattr(Rejection, "_law", law)


MUTANTS = [(residual_replaced_by_p, "one draft"), (residual_replaced_by_p, "a guess"), (q_forgotten, "one draft"),
           (the_second_is_judged_by_the_first_law, "two drafts"), (the_second_is_judged_by_p, "two drafts"),
           (both_proposals_meet_one_coin, "two drafts"), (a_draft_and_its_replacement_share_noise, "one draft"),
           (a_certain_guess_keeps_an_old_law, "a guess")]


@pytest.mark.parametrize("proposals", ["one draft", "two drafts", "a guess"])
def test_the_unbroken_sampler_has_the_targets_law(proposals):
    assert p_value(proposals) > UNLIKELY


@pytest.mark.parametrize("mutant, proposals", MUTANTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_rule_shows_in_the_distribution(mutant, proposals, monkeypatch):
    mutant(monkeypatch)
    assert p_value(proposals) < UNLIKELY / 1000, mutant.__doc__
