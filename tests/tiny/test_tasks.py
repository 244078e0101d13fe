"""The generated problems are right, seeded and cleanly split."""

import ast
import random
import re

import pytest

from loopscope.tiny import tasks
from loopscope.tiny.prompts import maths_problems, prompts

CELLS = [*tasks.every_cell("worked"), *tasks.every_cell("direct")]


def solve_story(q):
    have, *_ = map(int, re.findall(r"has (\d+)", q))
    for sentence in q.split(". ")[1:]:
        if m := re.search(r"finds (\d+)", sentence):
            have += int(m[1])
        elif m := re.search(r"gives (\d+)", sentence):
            have -= int(m[1])
        elif m := re.search(r"buys (\d+) bags of (\d+)", sentence):
            have += int(m[1]) * int(m[2])
        elif "double" in sentence:
            have *= 2
    return str(have)


def solve_bill(q):
    spent = sum(int(n) * int(price) for n, price in re.findall(r"(\d+) \w+ for (\d+) coins", q))
    return str(int(re.search(r"pays with (\d+)", q)[1]) - spent)


def solve_boxes(q):
    lost = int(m[1]) if (m := re.search(r"(\d+) break", q)) else 0
    full, left = divmod(int(re.search(r"\d+", q)[0]) - lost, int(re.search(r"boxes of (\d+)", q)[1]))
    return f"{full} and {left}"


def solve_columns(q):
    return str(sum(map(int, re.findall(r"\d+", q))))


def evaluate(expression):
    return eval(compile(ast.parse(expression.strip(), mode="eval"), "problem", "eval"), {"__builtins__": {}})


def solve_counter(q):
    value = int(re.search(r"x=(\d)", q)[1])
    return str((value + sum(int(s + n) for s, n in re.findall(r"x([+-])=(\d)", q))) % 10)


def solve_pointer(q):
    after = dict(re.findall(r"(\w)>(\w)", q))
    at, hops = re.search(r"From (\w) go (\d)", q).groups()
    for _ in range(int(hops)):
        at = after[at]
    return at


SOLVERS = {
    "story": solve_story,
    "bill": solve_bill,
    "boxes": solve_boxes,
    "columns": solve_columns,
    "steps": lambda q: str(evaluate(re.search(r"out (\S+) step", q)[1])),
    "nested": lambda q: str(evaluate(re.search(r"of (\S+)\?", q)[1]) % 10),
    "counter": solve_counter,
    "lookup": lambda q: dict(re.findall(r"(\w+) has (\d)", q))[re.search(r"What has (\w+)", q)[1]],
    "pointer": solve_pointer,
}


@pytest.mark.parametrize(("task", "difficulty"), CELLS)
def test_final_answers_agree_with_an_independent_solver(task, difficulty):
    rng = random.Random(f"{task} {difficulty}")
    for _ in range(200):
        problem = tasks.make(task, difficulty, rng, held_out=False)
        assert problem.prompt.startswith("Q: ") and problem.prompt.endswith("\nA:")
        assert problem.final == SOLVERS[task](problem.prompt), problem


@pytest.mark.parametrize(("task", "difficulty"), list(tasks.every_cell("worked")))
def test_every_equation_in_a_worked_answer_holds(task, difficulty):
    rng = random.Random(f"equations {task} {difficulty}")
    for _ in range(200):
        answer = tasks.make(task, difficulty, rng, held_out=False).answer
        for chain in re.findall(r"[\d(][\d+*()-]*(?: ?= ?[\d(-][\d+*()-]*)+", answer):
            values = {evaluate(side) for side in chain.split("=")}
            assert len(values) == 1, (chain, answer)


@pytest.mark.parametrize(("task", "difficulty"), CELLS)
def test_generators_are_pure_functions_of_their_seed(task, difficulty):
    first, again, other = (tasks.make(task, difficulty, random.Random(s), False) for s in (5, 5, 6))
    assert first == again
    assert first != other


def test_training_and_held_out_questions_never_meet():
    rng = random.Random(0)
    train = {tasks.draw(rng, kind).prompt for kind in ("worked", "direct") for _ in range(2000)}
    held_out = {tasks.draw(rng, kind, held_out=True).prompt for kind in ("worked", "direct") for _ in range(500)}
    assert not train & held_out


def test_evaluation_prompts_are_held_out_different_and_the_same_each_time():
    first = maths_problems(40)
    assert [p.prompt for p in first] == prompts("maths", 40)
    assert len({p.prompt for p in first}) == 40
    assert all(tasks.is_held_out(p.prompt) for p in first)
    assert prompts("maths", 8, seed=1) != prompts("maths", 8)
    assert prompts("maths", 8) == prompts("maths", 40)[:8]
