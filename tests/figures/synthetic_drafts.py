"""Made-up tables of what drafts of each depth would say."""

import numpy as np
import pandas as pd

MODEL = "tiny-huginn"
TASKS = ("maths", "code")


def second_candidate(model=MODEL, tasks=TASKS, prompts=12, depths=8):
    g, rows = np.random.default_rng(31), []
    for task in tasks:
        for prompt in range(prompts):
            for r in range(1, depths + 1):
                first = 1.0 if r == depths else min(0.99, 1 - 0.5 * 0.7**r + g.normal(0, 0.01))
                rows.append((model, task, prompt, "keyed", r, first, 0.4 * (1 - first), 60))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "depth", "first", "second", "n_positions"])


def agreement_runs(model=MODEL, tasks=TASKS, prompts=12, depths=8):
    g, rows = np.random.default_rng(32), []
    for task in tasks:
        for prompt in range(prompts):
            for r in range(1, depths):
                for length, n in zip(*np.unique(g.geometric(0.4 * 0.7**r, 12) - 1, return_counts=True)):
                    rows.append((model, task, prompt, "keyed", r, int(length), False, int(n)))
            rows.append((model, task, prompt, "keyed", depths, 60, True, 1))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "depth", "length", "cut", "runs"])


def hops(model=MODEL, tasks=TASKS, prompts=12, rounds=8):
    g, rows = np.random.default_rng(33), []
    for task in tasks:
        for prompt in range(prompts):
            for j in range(1, rounds + 1):
                for i in range(1, j + 2):
                    right = float(np.clip((1 - 0.5**j) * 0.9 ** max(0, i - j / 2) + g.normal(0, 0.01), 0, 1))
                    rows.append((model, task, prompt, "keyed", "deep_kv", 1, i, j, right, right**2, 8))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "policy", "updates", "hop", "round", "agreement", "chain",
                                       "n_positions"])


def tables(model=MODEL):
    return {"second_candidate": second_candidate(model), "agreement_runs": agreement_runs(model), "hops": hops(model)}
