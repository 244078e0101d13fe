"""Made-up tables of what looks inside a model; synthetic.py holds those of the rest, and everything is reached through it."""

import numpy as np
import pandas as pd

MODEL = "tiny-huginn"
TASKS = ("maths", "code")


def rng(seed=0):
    return np.random.default_rng(seed)


def attribution(model=MODEL, tasks=TASKS, prompts=12, depths=8, layers=2):
    g, rows = rng(21), []
    for task in tasks:
        for prompt in range(prompts):
            parts = [("start", 0, -1, "start", 0.02), ("embedding", 0, -1, "embedding", 0.4)]
            parts += [("embedding", r, -1, "embedding", 0.3 * 0.6 ** (depths - r)) for r in range(1, depths + 1)]
            parts += [
                ("core", r, layer, branch, (1.5 - 0.7 * layer) * 0.6 ** (depths - r) * (1 if branch == "mlp" else -0.4))
                for r in range(1, depths + 1)
                for layer in range(layers)
                for branch in ("attn", "mlp")
            ]
            parts += [("coda", 0, layer, branch, 0.8) for layer in range(2) for branch in ("attn", "mlp")]
            values = [size + g.normal(0, 0.1) for *_, size in parts]
            rows += [
                (model, task, prompt, "keyed", "next", "", part, depth, 0, layer, branch, value, sum(values), 60)
                for (part, depth, layer, branch, _), value in zip(parts, values)
            ]
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "branch", "value_logits"]
        + ["logit", "n_positions"],
    )


def trajectories(model=MODEL, tasks=TASKS, prompts=12, depths=16):
    g, rows = rng(22), []
    for task in tasks:
        for prompt in range(prompts):
            turn, q, size = g.normal(0.5, 0.1) + 0.4 * (task == "code"), g.normal(0.75, 0.03), g.normal(10, 1)
            points = [size * (q * np.exp(1j * turn)) ** r for r in range(depths)] + [0j]
            for r, z in enumerate(points):
                labels = [min(1.0, r / depths), 0.1, 0.2 * (1 - r / depths)] if r >= 4 else [np.nan] * 3
                rows.append(
                    (model, task, prompt, "keyed", r, 0.9 * q**r if r else np.nan, np.degrees(turn) if r > 1 else np.nan, abs(z) / 10)
                    + (q if r > 1 else np.nan, *labels, z.real, z.imag, 60)
                )
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "depth", "step", "angle_degrees", "distance", "contraction", "fixed_point", "orbit"]
        + ["slider", "pc1", "pc2", "n_positions"],
    )


def head_stability(model=MODEL, tasks=TASKS, prompts=12, depths=16, layers=2, heads=4):
    g, rows = rng(23), []
    for task in tasks:
        for prompt in range(prompts):
            for layer in range(layers):
                for head in range(heads):
                    for r in range(1, depths + 1):
                        js = (0.1 + 0.1 * head) * g.uniform(0.8, 1.2) * (0.6 + 0.1 * layer) ** r * (r < depths)
                        rows.append((model, task, prompt, "keyed", layer, head, r, js, 59))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "layer", "head", "depth", "js_nats", "n_positions"])


def depth_similarity(model=MODEL, tasks=TASKS, prompts=12, depths=16):
    g, rows = rng(24), []
    for task in tasks:
        for prompt in range(prompts):
            rate = g.uniform(0.5, 0.7)
            rows += [
                (model, task, prompt, "keyed", r, s, 1 - 0.6 * abs(rate**r - rate**s) / rate, 60)
                for r in range(1, depths + 1)
                for s in range(1, depths + 1)
            ]
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "start", "depth", "other_depth", "cka", "n_positions"])


def token_grid(model=MODEL, tasks=TASKS, prompts=2, depths=8, positions=10):
    g, rows, words = rng(25), [], [" the", "$x$", "\n", " answer", "42", " is", "\u6f22", "def"]
    for task in tasks:
        for prompt in range(prompts):
            for position in range(positions):
                settled = g.integers(1, depths + 1)
                for r in range(1, depths + 1):
                    top = int(g.integers(8)) if r < settled else position % 8
                    rank = 1 if r >= settled else int(g.integers(2, 9))
                    cell = (words[(position + 3) % 8], r, top, words[top], r / (depths + 1), rank)
                    rows.append((model, task, prompt, "keyed", position, *cell))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "position", "token", "depth", "top", "top_text", "probability", "final_rank"],
    )


def block_lens(model=MODEL, tasks=TASKS, prompts=12, depths=8, layers=2):
    g, rows = rng(31), []
    for task in tasks:
        for prompt in range(prompts):
            for lens, worse in (("coda", 1.0), ("logit", 3.0)):
                for r in range(1, depths + 1):
                    for layer in range(layers):
                        far = worse * (1 + 20 * 0.5**r * (2 - layer)) * g.uniform(0.9, 1.1) - worse + 1
                        block = (r - 1) * layers + layer + 1
                        rows.append((model, task, prompt, "keyed", lens, r, 0, layer, block, max(1.0, far), 1 / (1 + far), 0.5, 60))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "lens", "depth", "cycle", "layer", "block", "rank", "probability", "agreement"]
        + ["n_positions"],
    )


def layer_fixed_points(model=MODEL, tasks=TASKS, prompts=12, depths=12, layers=2):
    g, rows = rng(32), []
    for task in tasks:
        for prompt in range(prompts):
            q = g.uniform(0.5, 0.7)
            for layer in (*range(layers), -1):
                for r in range(1, depths + 1):
                    names = [min(1.0, r / depths), 0.1 * (r < depths), 0.0] if r > 4 else [np.nan] * 3
                    step = [0.4 * q**r, 40.0, q] if r > 1 else [np.nan] * 3
                    apart = 0.7 + 0.1 * layer if layer > 0 or (layer == 0 and r > 1) else np.nan
                    distance = 0.6 * (q**r - q**depths) + 0.0 * layer
                    rows.append((model, task, prompt, "keyed", layer, r, step[0], step[1], distance, step[2], *names, np.nan, apart, 60))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "layer", "depth", "step", "angle_degrees", "distance", "contraction", "fixed_point"]
        + ["orbit", "slider", "period", "apart", "n_positions"],
    )


def head_attribution(model=MODEL, tasks=TASKS, prompts=12, depths=8, layers=2, heads=4):
    g, rows = rng(33), []
    for task in tasks:
        for prompt in range(prompts):
            places = [("core", r, 0, layer) for r in range(1, depths + 1) for layer in range(layers)] + [("coda", 0, 0, 0)]
            for part, r, cycle, layer in places:
                for head in range(heads):
                    value = (0.8 - 0.5 * head) * 0.6 ** (depths - r if r else 1) + g.normal(0, 0.05)
                    rows.append((model, task, prompt, "keyed", "top", "mean", part, r, cycle, layer, head, value, 9.0, 60))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "target", "against", "part", "depth", "cycle", "layer", "head", "value_logits"]
        + ["logit", "n_positions"],
    )


def linear_probe(model=MODEL, tasks=TASKS[:1], prompts=12, depths=8):
    g, rows = rng(34), []
    for task in tasks:
        for prompt in range(prompts):
            for labels, top in (("true", 0.8), ("control", 0.4), ("baseline", 0.1)):
                for r in range(1, depths + 1):
                    value = top * (1 - 0.5**r) * g.uniform(0.9, 1.1)
                    rows.append((model, task, prompt, "keyed", "last digit of the sum", labels, r, "accuracy", value, 3))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "property", "labels", "depth", "metric", "value", "n_positions"],
    )


def patching(model=MODEL, tasks=TASKS[:1], prompts=3, depths=4, layers=2, heads=4, positions=8):
    g, rows, words = rng(35), [], ["Q", ":", " Add", " $x$", "\n", "4", "+", "="]
    for task in tasks:
        for prompt in range(prompts):
            for site in ("resid_post", "z"):
                for r in (*range(1, depths + 1), -1):
                    for layer in range(layers):
                        places = [(p, -1) for p in range(positions)] if site == "resid_post" else [(-1, h) for h in range(heads)]
                        for position, head in places:
                            restored = (0.9 if position in (5, 7) or head == 1 else 0.0) * (r if r > 0 else depths) / depths
                            token = words[position] if position >= 0 else ""
                            other = "9" if position == 5 else token
                            restored += g.normal(0, 0.02)
                            cell = (token, other, 8 * restored - 4, 4.0, -4.0, restored)
                            rows.append((model, task, prompt, "keyed", site, r, layer, position, head, *cell))
    return pd.DataFrame(
        rows,
        columns=["model", "task", "prompt", "start", "site", "depth", "layer", "position", "head", "token", "corrupted_token"]
        + ["difference_logits", "clean_logits", "corrupted_logits", "restored"],
    )


def tables(model=MODEL):
    """One table of every kind here."""
    made = (attribution, trajectories, token_grid, head_stability, depth_similarity, block_lens, layer_fixed_points, head_attribution,
            linear_probe, patching)
    return {make.__name__: make(model) for make in made}
