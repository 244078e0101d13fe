"""Linear probes: prompts are held out whole, a planted property is found where it is, and the control tells a token from a state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopscope
from loopscope.errors import PromptError, SettingError
from loopscope.random_models import make_random_core
from probes import Labelled, LinearProbeResult, linear_probe, sum_digits
from probes.linear import control_labels
from probes.recording import Recording


def prompts(n, length=6, vocabulary=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=draw).tolist() for _ in range(n)]


def means(result, **fixed):
    return result.frame.groupby(["labels", "depth"]).value.mean()


@pytest.fixture(scope="module")
def core():
    return make_random_core("huginn", gain=0.5)


def test_a_linear_function_of_one_depth_is_read_there_and_nowhere_else(core):
    weight = torch.randn(core.config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    examples = []
    for ids in prompts(40):
        states = Recording(core, torch.tensor(ids), depth=3).states()
        examples.append(Labelled(ids, [2, 5], (states[1, [2, 5]] @ weight).tolist()))
    result = linear_probe(core, examples, kind="regress", penalty=1e-3, depth=3, folds=4, progress=False)
    value = means(result)
    assert set(result.frame.metric) == {"absolute_error"} and len(result.frame) == 40 * 3 * 3
    assert value["true", 2] < 0.05 * value["baseline", 2] and value["true", 1] > 5 * value["true", 2] < value["true", 3]
    chosen = result.selectivity().groupby("depth").selectivity.mean()
    assert chosen[2] == pytest.approx(value["control", 2] - value["true", 2]) and chosen[2] > 0


def test_what_a_prompt_alone_knows_cannot_be_read_on_others(core):
    """Positions of one prompt share their label and resemble each other: a map that saw some of them would know the rest."""
    few = [[t] * 6 for t in range(20)]  # a prompt is one token, its label a coin
    coins = np.random.default_rng(3).permutation(np.arange(20) % 2)
    examples = [Labelled(ids, range(6), [int(c)] * 6) for ids, c in zip(few, coins)]
    value = means(linear_probe(core, examples, control=False, depth=2, progress=False))
    assert (value["true"] < 0.8).all()


def test_a_property_of_the_token_alone_has_no_selectivity(core):
    examples = [Labelled(ids, range(6), [t % 3 for t in ids]) for ids in prompts(60, vocabulary=6)]
    result = linear_probe(core, examples, depth=1, penalty=0.1, progress=False)
    value = means(result)
    assert value["true", 1] > 0.95 and value["control", 1] > 0.95 and value["baseline", 1] < 0.6
    assert abs(result.selectivity().selectivity.mean()) < 0.05


def test_the_controls_labels_are_one_for_each_type_and_as_frequent_as_the_true_ones():
    labels = np.array(["a", "b", "b", "b"] * 300)
    types = [f"t{i // 2}" for i in range(1200)]
    drawn = control_labels(labels, types, seed=0)
    assert (drawn[::2] == drawn[1::2]).all() and 0.67 < (drawn == "b").mean() < 0.83
    assert (drawn == control_labels(labels, types, seed=0)).all() and (drawn != control_labels(labels, types, seed=1)).any()


def test_the_sums_of_a_worked_addition_are_labelled_where_they_stand(tmp_path):
    model = loopscope.load("tiny-ouro", hooked=False)
    examples = sum_digits(model, 6)
    for prompt, positions, labels, types in examples:
        text = model.tokenizer.decode(prompt)
        assert len(positions) == len(labels) >= 2
        for position, label, terms in zip(positions, labels, types):
            assert model.tokenizer.decode([prompt[position]]) == "="
            assert sum(map(int, terms.split("+"))) % 10 == label
            assert model.tokenizer.decode(prompt[: position + 1]).endswith(terms + "=") and f"{terms}=" in text
    result = linear_probe(model, examples, depth=1, folds=2, progress=False, property="last digit", task="maths")
    result.save(tmp_path)
    assert LinearProbeResult.load(tmp_path).frame.equals(result.frame) and set(result.frame["property"]) == {"last digit"}


def test_an_unseen_class_and_a_fold_with_one_class_are_scored(core):
    examples = [Labelled(ids, [1], [int(i == 0)], [i]) for i, ids in enumerate(prompts(4))]
    frame = linear_probe(core, examples, depth=1, folds=4, progress=False).frame
    assert frame[(frame.prompt == 0) & (frame.labels == "true")].value.item() == 0


@pytest.mark.parametrize("examples, options, error, message", [
    ([Labelled([1, 2], [0], [1])] * 4, {}, PromptError, "need at least 5 prompts, got 4"),
    ([Labelled([1, 2], [2], [1])] * 5, {}, PromptError, "prompt 0 has 2 tokens: position 2 is not"),
    ([Labelled([1, 2], [], [])] * 5, {}, PromptError, "prompt 0 has no labelled position"),
    ([Labelled([1, 2], [0], [1, 2])] * 5, {}, SettingError, "1 positions and 2 labels"),
    ([Labelled([1, 2], [0], [1], [1, 2])] * 5, {}, SettingError, "1 positions and 2 types"),
    ([Labelled([1, 2], [0], ["x"])] * 5, {}, SettingError, "every label is 'x'"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"kind": "regress"}, SettingError, "needs numbers"),
    ([Labelled([1, 1], [0, 1], ["x", "y"])] * 5, {}, SettingError, "of one type.*types="),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"folds": 1}, SettingError, "folds must be .*got 1"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"penalty": 0}, SettingError, "penalty must be above 0"),
    ([Labelled([1, 2], [0, 1], [1.0, float("nan")])] * 5, {"kind": "regress"}, SettingError, "finite labels, prompt 0 has nan"),
    ([Labelled([1, 2], [0, 1], [1.0, float("inf")])] * 5, {"kind": "regress"}, SettingError, "finite labels, prompt 0 has inf"),
    ([Labelled([1, 2], [0, 1], [1.0, 10**400])] * 5, {"kind": "regress"}, SettingError, "finite labels, prompt 0 has 1000"),
    ([Labelled([1, 2], [0, 1], [1.0, None])] * 5, {"kind": "regress"}, SettingError, "needs numbers.* prompt 0 has None"),
    ([Labelled([1, 2], [0, 1], [1, None])] * 5, {}, SettingError, "all texts or all whole numbers, prompt 0 has None"),
    ([Labelled([1, 2], [0, 1], [None, "x"])] * 5, {}, SettingError, "all texts or all whole numbers, prompt 0 has None"),
    ([Labelled([1, 2], [0, 1], ["1", "2"])] * 4 + [Labelled([1, 2], [0, 1], ["1", 2])], {}, SettingError, "prompt 4 has 2"),
    ([Labelled([1, 2], [0, 1], [1, "2"])] * 5, {}, SettingError, "prompt 0 has '2'"),
    ([Labelled([1, 2], [0, 1], [1, 1.5])] * 5, {}, SettingError, "prompt 0 has 1.5.*kind='regress'"),
    ([Labelled([1, 2], [0, 1], [1, float("nan")])] * 5, {}, SettingError, "prompt 0 has nan"),
    ([Labelled([1, 2], [0, 1], [1, 10**30])] * 5, {}, SettingError, "prompt 0 has 1000"),
    ([Labelled([1, 2], [0, 1], [[1], [2]])] * 5, {}, SettingError, r"prompt 0 has \[1\]"),
    ([Labelled([1, 2], [0, 1], [{1}, {2}])] * 5, {"kind": "regress"}, SettingError, r"prompt 0 has \{1\}"),
    ([Labelled([1, 2], [0, 1], [b"x", b"y"])] * 5, {}, SettingError, "prompt 0 has b'x'"),
    ([Labelled([1, 2], [0, 1], None)] * 5, {}, SettingError, "prompt 0 has no labels"),
    ([Labelled([1, 2], [0, 1], ["x", "y"], [[1], [2]])] * 5, {}, SettingError, r"prompt 0 has the type \[1\]"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"penalty": float("inf")}, SettingError, "penalty must be above 0 and finite, got inf"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"penalty": float("nan")}, SettingError, "penalty must be above 0 and finite, got nan"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"penalty": "10"}, SettingError, "penalty must be above 0 and finite, got '10'"),
    ([Labelled([1, 2], [0, 1], ["x", "y"])] * 5, {"kind": "rank"}, SettingError, "kind 'rank' is unknown")])
def test_what_cannot_be_probed_is_said(core, examples, options, error, message):
    with pytest.raises(error, match=message):
        linear_probe(core, examples, progress=False, **options)


def test_selectivity_needs_the_control(core):
    examples = [Labelled(ids, [1, 2], [0, 1]) for ids in prompts(5)]
    with pytest.raises(SettingError, match="control=True"):
        linear_probe(core, examples, depth=1, control=False, progress=False).selectivity()
    with pytest.raises(SettingError, match="at least one prompt"):
        sum_digits(core, 0)
    with pytest.raises(PromptError, match="without a tokenizer"):
        sum_digits(core, 1)


@pytest.mark.parametrize("kind, labels", [("classify", np.array([0, 1])), ("classify", np.array(["x", "y"])), ("classify", [True, False]),
                                          ("classify", [1.0, 2.0]), ("regress", np.array([0.5, 1.5], dtype=np.float32)),
                                          ("regress", np.array([1, 2])), ("classify", np.array([True, False]))])
def test_labels_may_come_from_arrays(core, kind, labels):
    examples = [Labelled(ids, [1, 2], labels, np.array([0, 1])) for ids in prompts(4)]
    frame = linear_probe(core, examples, kind=kind, depth=1, folds=2, progress=False).frame
    assert set(frame.labels) == {"true", "control", "baseline"} and np.isfinite(frame.value).all()
