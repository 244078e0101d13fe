"""Second candidates and runs of agreement, against counts made by hand from the logits of each depth."""

import pytest
import torch

from loopscope.rows import Chain
from probes import agreement_runs, depth_lens, second_candidate
from probes.runs import candidates_and_runs, run_lengths

PROMPTS = [list(range(20, 44)), list(range(5, 20))]


@torch.inference_mode()
def logits_by_depth(core, ids):
    """[depth, n, vocab], the whole sequence read out at each depth."""
    rows = Chain(0, len(ids))
    x = core.embed(torch.tensor([ids]), rows)
    state, out = core.start(x, rows), []
    for r in range(1, core.config.depth + 1):
        state = core.recur(state, x, rows.at_depth(r))
        out.append(core.read(state, rows.at_depth(r))[0])
    return torch.stack(out)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_first_and_second_are_the_ranks_of_the_full_depth_token(family, random_core, tmp_path):
    core = random_core(family, gain=0.2, n_core=1, vocab_size=48, seed=1)
    result = second_candidate(core, PROMPTS, task="t", progress=False)
    seen = 0
    for prompt, ids in enumerate(PROMPTS):
        logits = logits_by_depth(core, ids)
        target = logits[-1].argmax(-1)
        rank = (logits > logits.gather(-1, target.expand(len(logits), -1)[..., None])).sum(-1)
        own = result.frame[result.frame.prompt == prompt].set_index("depth")
        for r in range(1, core.config.depth + 1):
            assert own["first"][r] == pytest.approx((rank[r - 1] == 0).double().mean().item())
            assert own["second"][r] == pytest.approx((rank[r - 1] == 1).double().mean().item())
            assert own.n_positions[r] == len(ids)
        seen += own["second"].sum()
        assert own["first"][core.config.depth] == 1 and own["second"][core.config.depth] == 0
    assert seen > 0, "no second candidate was ever right, so nothing was tested"
    lens = depth_lens(core, PROMPTS, progress=False).frame
    assert result.frame["first"].tolist() == pytest.approx(lens.agreement.tolist())
    assert second_candidate(core, PROMPTS, task="t", progress=False).frame.equals(type(result).load(result.save(tmp_path).parent).frame)


def test_equal_logits_leave_the_runner_up_another_token():
    """On ties the top token is the lowest id, as everywhere; the runner-up must not be that token again."""
    from probes.candidates import top_tokens

    class Flat:
        config = type("C", (), {"depth": 1})

    import probes.candidates as module

    class Recording:
        def __init__(self, *args, **settings):
            self.logits = torch.zeros(3, 5)

        def states(self):
            return torch.zeros(1, 3, 2)

    core, real = Flat(), module.Recording
    core.embed = core.as_tokens = lambda ids: ids
    module.Recording = Recording
    try:
        best = top_tokens(core, torch.tensor([1, 2, 3]), 2, depth=1, start_state=None, seed=0)
    finally:
        module.Recording = real
    assert (best[..., 0] == 0).all() and (best[..., 1] != 0).all()


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_runs_lie_between_disagreements_and_hold_every_position(family, random_core):
    core = random_core(family, gain=0.2, n_core=1, vocab_size=48, seed=1)
    frame = agreement_runs(core, PROMPTS, progress=False).frame
    for prompt, ids in enumerate(PROMPTS):
        top = logits_by_depth(core, ids).argmax(-1)
        for r in range(1, core.config.depth + 1):
            agrees = (top[r - 1] == top[-1]).tolist()
            own = frame[(frame.prompt == prompt) & (frame.depth == r)]
            assert (own.length * own.runs).sum() == sum(agrees)
            assert own[~own.cut].runs.sum() == len(ids) - sum(agrees) and own[own.cut].runs.sum() == int(agrees[-1])
        full = frame[(frame.prompt == prompt) & (frame.depth == core.config.depth)]
        assert full[["length", "cut", "runs"]].values.tolist() == [[len(ids), True, 1]]


def test_both_from_one_reading_are_those_from_two(random_core, monkeypatch):
    import probes.candidates as module

    core = random_core("huginn", gain=0.2, n_core=1, vocab_size=48, seed=1)
    options = {"task": "t", "start_state": "zero", "progress": False}
    alone = [probe(core, PROMPTS, **options) for probe in (second_candidate, agreement_runs)]
    asked, top_tokens = [], module.top_tokens

    def watched(core, ids, *rest, **settings):
        asked.append(len(ids))
        return top_tokens(core, ids, *rest, **settings)

    monkeypatch.setattr(module, "top_tokens", watched)
    both = candidates_and_runs(core, PROMPTS, **options)
    assert asked == [len(ids) for ids in PROMPTS]
    for one, other in zip(both, alone):
        assert type(one) is type(other) and one.frame.equals(other.frame) and one.meta == other.meta


def test_lengths_of_runs():
    y, n = True, False
    assert run_lengths([y, y, n, n, y]) == [(2, False), (0, False), (1, True)]
    assert run_lengths([n]) == [(0, False)] and run_lengths([y, n]) == [(1, False)] and run_lengths([]) == []
