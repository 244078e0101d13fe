"""Acceptance by depth against the early readings of one teacher-forced pass: what each depth would have drafted, and what came."""

from collections import Counter

import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Wavefront
from decoders.bench import AcceptanceByDepthResult, bench
from decoders.draft_depths import acceptance_by_depth
from decoders.generation import Event, Run

DEPTH, NEW = 8, 32
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module", params=[0.5, 1.0], ids=["often right", "often wrong"])
def core(request, random_core):
    return random_core("ouro", gain=request.param, depth=DEPTH, n_core=1)


def early(core, generation, prompt) -> list[list[int]]:
    """[new token][depth - 1]: what each depth says the new token is, all before it verified. No row for the prefill's, nor for
    the last, whose draft could not become an input."""
    import torch

    text = torch.tensor([*prompt, *generation.tokens])
    said = [core.forward(text[None, :-1], depth=r)[0].argmax(-1).tolist() for r in range(1, DEPTH + 1)]
    return [[row[at] for row in said] for at in range(len(prompt), len(text) - 2)]


def totals(generation, two_stand=False) -> dict[int, tuple[int, int]]:
    """depth -> drafts compared, accepted."""
    compared, accepted = Counter(), Counter()
    for _, depth, n, right in acceptance_by_depth(generation, two_stand):
        compared[depth] += n
        accepted[depth] += right
    return {depth: (compared[depth], accepted[depth]) for depth in sorted(compared)}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("redraft", [1, 3])
def test_a_re_drafting_wave_is_held_to_the_last_depth_that_changed_its_mind(core, prompt, redraft):
    g = Wavefront(2, redraft=redraft).generate(core, prompt, max_new_tokens=NEW)
    compared, accepted = Counter(), Counter()
    for row in early(core, g, prompt):
        at = 2
        for depth in range(2, DEPTH, redraft):
            if row[depth - 1] != row[at - 1]:
                at = depth
        compared[at] += 1
        accepted[at] += row[at - 1] == row[-1]
    assert totals(g) == {depth: (compared[depth], accepted[depth]) for depth in sorted(compared)}
    assert set(totals(g)) != {2}, "the draws make drafts that are drafted anew"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("first, second", [(1, 2), (2, 5), (3, 4)])
def test_both_of_loopspecs_drafts_are_compared_each_at_its_depth(core, prompt, first, second):
    g = LoopSpec(first, second).generate(core, prompt, max_new_tokens=NEW)
    compared, accepted = Counter(), Counter()
    for row in early(core, g, prompt):
        for depth in {first, second} if row[first - 1] != row[second - 1] else {first}:
            compared[depth] += 1
            accepted[depth] += row[depth - 1] == row[-1]
    assert totals(g, two_stand=True) == {depth: (compared[depth], accepted[depth]) for depth in sorted(compared)}
    assert compared[second] and sum(accepted.values()) == g.accepted and compared[first] == g.proposed


DECODERS = [(Wavefront(3), {3}), (DraftThenVerify(2, 4), {2}), (DraftThenVerify(3, 4, read="deep_kv"), {3}), (PromptLookup(), {0}),
            (LoopSpec(2, None), {2}), (DASWave(4, 1), None)]


@pytest.mark.parametrize("decoder, depths", DECODERS, ids=[d.label for d, _ in DECODERS])
def test_by_place_and_in_all_it_counts_what_the_generation_counts(core, decoder, depths):
    for prompt in PROMPTS:
        g = decoder.generate(core, prompt, max_new_tokens=NEW)
        found = acceptance_by_depth(g)
        by_place = Counter(), Counter()
        for place, depth, compared, accepted in found:
            by_place[0][place] += compared
            by_place[1][place] += accepted
        assert [(p, by_place[0][p], by_place[1][p]) for p in sorted(by_place[0])] == g.acceptance_by_position()
        assert sum(by_place[0].values()) == g.proposed and sum(by_place[1].values()) == g.accepted
        if depths is not None and g.proposed:
            assert {depth for _, depth, _, _ in found} == depths


def test_das_waves_guesses_are_as_deep_as_their_position_had_run(random_core):
    """Four rounds from two positions on: the k-th draft's row joined in round max(1, k - 1) and ran once in each round from then on."""
    g = DASWave(4, 1, initial_width=2, growth=1).generate(random_core("huginn", gain=0.1, depth=DEPTH, n_core=1), [1, 2, 3],
                                                           max_new_tokens=NEW)
    pairs = {(place, depth) for place, depth, _, _ in acceptance_by_depth(g)}
    assert pairs == {(1, 4), (2, 4), (3, 3), (4, 2), (5, 1)}


def test_the_benchmark_keeps_it_as_a_table_in_which_both_drafts_of_loopspec_count(core, tmp_path):
    result = bench(core, PROMPTS, [LoopSpec(2, 5), Wavefront(2)], "made-up", max_new_tokens=NEW)
    frame = result.by_depth.frame
    assert frame.columns.tolist() == list(AcceptanceByDepthResult.columns) and set(frame.decoder) == {"LoopSpec d1=2 d2=5", "WFD d=2"}
    for i, prompt in enumerate(PROMPTS):
        part = frame[(frame.prompt == i) & (frame.decoder == "LoopSpec d1=2 d2=5")].groupby("depth")[["compared", "accepted"]].sum()
        g = LoopSpec(2, 5).generate(core, prompt, max_new_tokens=NEW)
        assert {depth: tuple(row) for depth, row in zip(part.index, part.to_numpy().tolist())} == totals(g, two_stand=True)
    result.save(tmp_path)
    assert len(AcceptanceByDepthResult.load(tmp_path).frame) == len(frame)


def test_without_drafts_there_is_nothing(core):
    assert acceptance_by_depth(Autoregressive().generate(core, [1, 2, 3], max_new_tokens=5)) == []


def test_a_sibling_that_drafted_the_same_token_at_another_depth_is_not_taken_for_it():
    """By hand. The lane of position 3, born at tick 0, drafts 7 at depth 1 and 8 at depth 2. Both lanes of position 4 draft for 5: that
    of 7 (born at 1) says 9 and then 6, that of 8 (born at 2) says 6. The target says 8, and then 6: drafted at depth 1."""
    trace = [Event(0, 3, 4, "commit", 1), Event(1, 4, 1, "draft", 7), Event(2, 4, 2, "draft", 8), Event(2, 5, 1, "draft", 9),
             Event(3, 5, 2, "draft", 6), Event(3, 5, 1, "draft", 6), Event(4, 4, 4, "accept", 8), Event(4, 4, 4, "commit", 8),
             Event(6, 5, 4, "accept", 6), Event(6, 5, 4, "commit", 6)]
    generation = type("G", (), {"trace": trace, "runs": [Run(2, False)]})
    assert acceptance_by_depth(generation, True) == [(1, 1, 1, 0), (1, 2, 1, 1), (2, 1, 1, 1)]
