"""Exit rules against their formulas, and passes whose tokens leave at depths of their own against what they are made of."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from loopscope.adaptive import adaptive_forward, adaptive_step, weighted_logits
from loopscope.errors import DepthError, HookError, PromptError, SettingError
from loopscope.exits import EXIT_RULES, ArgmaxStability, Gate, LatentDiff, exit_rule
from loopscope.random_models import make_random_core

FAMILIES = ("huginn", "ouro", "raven", "nanbeige", "parcae", "dory", "hrm_text")
DEPTH = 6
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
PADDED = torch.tensor([[0, 0, 0, 3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8]])
MASK = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])


RUNS = [(family, name) for family in FAMILIES for name in EXIT_RULES if name != "gate" or family == "ouro"]  # one family has a gate


@cache
def drawn(family):
    return make_random_core(family, gain=0.4, seed=4)


@pytest.fixture(params=FAMILIES)
def core(request):
    return drawn(request.param)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


# ---- one rule, one formula --------------------------------------------------------------------------------------


def distribution(logits, minp=False):
    odds = [math.exp(x - max(logits)) for x in logits]
    p = [x / sum(odds) for x in odds]
    if minp:
        p = [x if x >= 0.1 * max(p) else 1 / len(p) for x in p]
        p = [x / sum(p) for x in p]
    return p


def entropy(p):
    return -sum(x * math.log(x) for x in p)


def values(name, states, logits, gates):
    """What the criterion measures at depth 1, 2, ..., in plain Python; states[0] is the start, the others count from depth 1."""
    norm = [math.sqrt(sum(x * x for x in h)) for h in states]
    pairs = list(enumerate(zip(states[1:], states[:-1]), 1))
    step = [math.dist(h, g) for _, (h, g) in pairs]
    if name == "gate":
        return [1 - math.prod(1 - lam for lam in gates[: t + 1]) for t in range(len(gates))]
    if name == "latent-diff":
        return [d / norm[r] for d, (r, _) in zip(step, pairs)]
    if name == "state-change":
        return [d / max(norm[r - 1], 1e-6) for d, (r, _) in zip(step, pairs)]
    if name == "cosine":
        return [1 - sum(a * b for a, b in zip(h, g)) / norm[r] / norm[r - 1] for r, (h, g) in pairs]
    if name == "argmax-stability":
        tops, out = [x.index(max(x)) for x in logits], []
        for r, top in enumerate(tops):
            out.append(out[-1] + 1 if r and top == tops[r - 1] else 0)
        return out
    p = [distribution(x, name == "minp-kl") for x in logits]
    if name == "entropy-diff":
        return [math.inf] + [abs(entropy(a) - entropy(b)) for a, b in zip(p[1:], p)]
    before = [[1 / len(p[0])] * len(p[0]), *p]
    return [sum(a * math.log(a / b) for a, b in zip(old, new)) for old, new in zip(before, p)]


def first_exit(name, measured, threshold):
    passed = [v >= threshold if name in ("gate", "argmax-stability") else v < threshold for v in measured]
    return passed.index(True) + 1 if any(passed) else len(passed)


def trajectory(core, tokens, depth, cache=None, **start):
    """states[0..depth] and logits[1..depth] of a full pass: what a rule is shown at each depth."""
    tokens, rows = core.open_rows(tokens, cache)
    x = core.embed(tokens, rows, cache)
    states = [core.start(x, rows, **start)]
    for r in range(1, depth + 1):
        states.append(core.recur(states[-1], x, rows.at_depth(r), cache))
    return states, [core.read(s, rows.at_depth(r), cache) for r, s in enumerate(states[1:], 1)]


def measured_rows(core, name, tokens, depth, *args, **start):
    """The states, and values(...) of every row: {(b, p): [...]}."""
    states, logits = trajectory(core, tokens, depth, *args, **start)
    d = core.config.d_model
    gates = [torch.sigmoid(core.gate(s[..., :d])) for s in states[1:]] if name == "gate" else None
    return states, {(b, p): values(name, [s[b, p, :d].tolist() for s in states], [x[b, p].tolist() for x in logits],
                                   gates and [float(g[b, p]) for g in gates])
                    for b in range(states[0].shape[0]) for p in range(states[0].shape[1])}


def middling(core, name):
    """A threshold in the middle of what is measured, so that tokens leave at many depths; no row lies on its edge by rounding."""
    if name == "argmax-stability":
        return 1
    measured = measured_rows(core, name, TOKENS, DEPTH)[1]
    later = sorted(v for row in measured.values() for v in row[1:])
    return later[len(later) // 2] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("family,name", RUNS)
@torch.inference_mode()
def test_each_token_leaves_where_the_formula_says_and_is_read_there(family, name):
    core = drawn(family)
    states, measured = measured_rows(core, name, TOKENS, DEPTH)
    threshold = middling(core, name)
    got = adaptive_forward(core, TOKENS, exit_rule(name, threshold), DEPTH)
    want = torch.tensor([[first_exit(name, measured[b, p], threshold) for p in range(8)] for b in range(2)])
    assert torch.equal(got.exit_depth, want)
    assert len(set(want.flatten().tolist())) > 1
    own = torch.stack(states).gather(0, want[None, ..., None].expand(1, -1, -1, states[0].shape[-1]))[0]
    close(got.logits, core.read(own))
    assert (got.lossless, got.ran, got.depth) == (False, DEPTH, DEPTH) and got.rule == f"{name} {threshold!r}"


@torch.inference_mode()
def test_a_gate_stops_at_its_threshold_and_differences_stop_below_theirs(random_core):
    core = random_core("ouro", depth=4)
    core.gate.weight.zero_(), core.gate.bias.zero_()  # leaves with probability 1/2 at each depth: 1/2, 3/4, 7/8
    for threshold, depth in ((0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.875, 3), (0.9, 4), (1.0, 4)):
        assert adaptive_forward(core, TOKENS, Gate(threshold)).exit_depth.unique().tolist() == [depth]
    after, before = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    core.config = type("Config", (), {"d_model": 2, "vocab_size": 2})
    for name, state, previous in (("latent-diff", after, before), ("state-change", before, after)):
        for threshold, stops in ((0.5, False), (0.5001, True)):
            rule = exit_rule(name, threshold)
            assert rule.update(rule.begin(core, 1, 1), state, previous, None, core)[0].tolist() == [[stops]]


@torch.inference_mode()
def test_before_the_first_readout_a_row_knows_nothing(random_core):
    """p_0 is uniform, so that a row which still is stops at once by KL; there is no entropy before, so nothing stops by that."""
    core, start = random_core("ouro"), torch.zeros(1, 1, 64, dtype=torch.float64)
    flat, sure = torch.zeros(1, 1, 256, dtype=torch.float64), torch.eye(256, dtype=torch.float64)[None, :1] * 1e3
    for name, logits, stops in (("kl", flat, True), ("kl", sure, False), ("minp-kl", flat, True), ("minp-kl", sure, False),
                                ("entropy-diff", flat, False), ("entropy-diff", sure, False)):
        rule = exit_rule(name)
        memory = rule.begin(core, 1, 1)
        assert bool(rule.update(memory, start, start, logits, core)[0]) == stops, (name, stops)


@torch.inference_mode()
def test_a_top_token_that_has_stayed_for_n_recurrences_stops_the_row(random_core):
    core, rule = random_core("ouro"), ArgmaxStability(2)
    memory, stops = rule.begin(core, 1, 1), []
    for top in (7, 3, 3, 7, 7, 7, 7):
        stop, memory = rule.update(memory, None, None, torch.eye(9)[top][None, None], core)
        stops.append(bool(stop))
    assert stops == [False, False, False, False, False, True, True]


@pytest.mark.parametrize("name", EXIT_RULES)
@torch.inference_mode()
def test_what_a_rule_remembers_travels_with_the_rows(random_core, name):
    """Rows at different depths, joined and parted between recurrences as lanes of a wave are."""
    core, rule = random_core("ouro"), exit_rule(name, 1 if name == "argmax-stability" else 0.5)
    states, logits = trajectory(core, TOKENS[:1], 4)
    alone, memory = [], rule.begin(core, 1, 8)
    for r in range(1, 5):
        stop, memory = rule.update(memory, states[r], states[r - 1], logits[r - 1], core)
        alone.append(stop)
    old = rule.update(rule.begin(core, 1, 4), states[1][:, :4], states[0][:, :4], logits[0][:, :4], core)[1]
    joined = torch.cat((old, rule.begin(core, 1, 4)), 1)
    stop, joined = rule.update(joined, torch.cat((states[2][:, :4], states[1][:, 4:]), 1),
                               torch.cat((states[1][:, :4], states[0][:, 4:]), 1), torch.cat((logits[1][:, :4], logits[0][:, 4:]), 1), core)
    assert torch.equal(stop, torch.cat((alone[1][:, :4], alone[0][:, 4:]), 1))
    stop, _ = rule.update(joined[:, 5:], states[2][:, 5:], states[1][:, 5:], logits[1][:, 5:], core)
    assert torch.equal(stop, alone[1][:, 5:])


# ---- names ------------------------------------------------------------------------------------------------------


def test_rules_are_read_from_text_and_say_themselves_in_text():
    assert exit_rule("gate 0.5") == exit_rule("gate:0.5") == exit_rule("gate", 0.5) == exit_rule(Gate(0.5)) == Gate(0.5)
    defaults = {"latent-diff": 0.03, "state-change": 0.03, "cosine": 1e-3, "entropy-diff": 1e-3, "kl": 1e-3, "minp-kl": 1e-5,
                "argmax-stability": 5}
    assert {name: exit_rule(name).threshold for name in EXIT_RULES if name != "gate"} == defaults
    for name in EXIT_RULES:
        rule = exit_rule(name, 3 if name == "argmax-stability" else 1 / 3)
        assert exit_rule(rule.label) == rule and not rule.lossless
    assert {name for name, rule in EXIT_RULES.items() if rule.reads} == {"entropy-diff", "kl", "minp-kl", "argmax-stability"}


@pytest.mark.parametrize("text,match", [
    ("kll", "'kll' is unknown; the nearest are 'kl'"), ("gate", "no default threshold.*gate 0.5"), ("gate 1.5", "at most 1, got 1.5"),
    ("kl 0", "positive number"), ("kl -1", "positive number"), ("kl nan", "positive number"), ("kl inf", "positive number"),
    ("kl 1 2", "one threshold, got 1 and 2"), ("kl soon", "must be a number, got 'soon'"), ("argmax-stability 2.5", "whole number"),
    (3, "one of gate, latent-diff")])
def test_rules_that_cannot_be_are_refused(text, match):
    with pytest.raises(SettingError, match=match):
        exit_rule(text)


def test_a_model_without_a_gate_says_who_has_one(core):
    if core.family == "ouro":
        assert adaptive_forward(core, TOKENS, "gate 0.5").exit_depth.shape == (2, 8)
        return
    for call in (lambda: adaptive_forward(core, TOKENS, "gate 0.5"), lambda: weighted_logits(core, TOKENS),
                 lambda: adaptive_step(core, TOKENS[:, :1], core.make_cache(4, batch=2), "gate 0.5")):
        with pytest.raises(SettingError, match=f"{core.family} has no exit gate; families with one: ouro. Rules.*latent-diff"):
            call()


# ---- full passes ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_where_nothing_stops_it_is_the_full_pass(core):
    got = adaptive_forward(core, TOKENS, LatentDiff(1e-30), 3)
    close(got.logits, core(TOKENS, depth=3))
    assert got.exit_depth.eq(3).all() and adaptive_forward(core, TOKENS, LatentDiff(1e-30)).depth == core.config.depth


@pytest.mark.parametrize("start", ["zero", torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)],
                         ids=["zero", "given"])
@torch.inference_mode()
def test_start_states_are_those_of_the_full_pass(random_core, start):
    core, never = random_core("huginn"), LatentDiff(1e-30)
    close(adaptive_forward(core, TOKENS, never, start_state=start).logits, core(TOKENS, start_state=start))
    one, other = core.make_cache(9), core.make_cache(9)
    core(TOKENS[0], start_state=start, cache=one), core(TOKENS[0], start_state=start, cache=other)
    close(adaptive_step(core, TOKENS[:1, :1], one, never, start_state=start).logits, core(TOKENS[:1, :1], start_state=start, cache=other))


@torch.inference_mode()
def test_a_cache_holds_all_loops_and_goes_on_where_it_was(core):
    rule = LatentDiff(0.05)
    cache, full = core.make_cache(8, 4, batch=2), core.make_cache(8, 4, batch=2)
    one = adaptive_forward(core, TOKENS, rule, 4, seed=3)
    parts = [adaptive_forward(core, chunk, rule, 4, seed=3, cache=cache) for chunk in TOKENS.split([5, 1, 2], dim=1)]
    core(TOKENS, depth=4, seed=3, cache=full)
    close(torch.cat([p.logits for p in parts], 1), one.logits)
    assert torch.equal(torch.cat([p.exit_depth for p in parts], 1), one.exit_depth) and [p.start for p in parts] == [0, 5, 6]
    for name, held in full.materialised().items():
        if name.startswith(("core", "prelude")):
            close(cache.materialised()[name], held)


@torch.inference_mode()
def test_a_padded_row_leaves_where_it_leaves_alone(core):
    padded = adaptive_forward(core, PADDED, "latent-diff 0.1", 4, attention_mask=MASK)
    for row, width in ((0, 5), (1, 8)):
        alone = adaptive_forward(core, PADDED[row : row + 1, -width:], "latent-diff 0.1", 4)
        close(padded.logits[row, -width:], alone.logits[0])
        assert torch.equal(padded.exit_depth[row, -width:], alone.exit_depth[0])


@torch.inference_mode()
def test_a_prefix_is_read_in_both_directions(random_core):
    core = random_core("hrm_text")
    close(adaptive_forward(core, TOKENS, LatentDiff(1e-30), prefix=4).logits, core(TOKENS, prefix=4))


@torch.inference_mode()
def test_weighted_logits_are_the_mean_under_the_exit_distribution(random_core):
    core = random_core("ouro", depth=3)
    states, logits = trajectory(core, TOKENS, 4)
    lam = [torch.sigmoid(core.gate(s)) for s in states[1:]]
    p = [lam[0], lam[1] * (1 - lam[0]), (1 - lam[1]) * (1 - lam[0])]
    close(weighted_logits(core, TOKENS), sum(a * b for a, b in zip(p, logits)))
    close(weighted_logits(core, TOKENS[0], depth=1), core(TOKENS[0], depth=1))
    close(weighted_logits(core, PADDED, attention_mask=MASK)[0, 3:], weighted_logits(core, PADDED[0, 3:])[0])
    p = [*p[:2], lam[2] * (1 - lam[1]) * (1 - lam[0]), (1 - lam[2]) * (1 - lam[1]) * (1 - lam[0])]
    close(weighted_logits(core, TOKENS, depth=4), sum(a * b for a, b in zip(p, logits)))


def test_exits_as_a_table(random_core):
    got = adaptive_forward(random_core("ouro"), TOKENS, "gate 0.5")
    frame = got.to_frame()
    assert list(frame.columns) == ["row", "position", "exit_depth", "depth", "rule"] and len(frame) == 16
    assert frame.query("row == 1 and position == 3")["exit_depth"].item() == int(got.exit_depth[1, 3])
    assert got.label == "T=4, exit at gate 0.5 (lossy)"


# ---- one token at a time ----------------------------------------------------------------------------------------


def greedy(core, prompt, rule, count, depth, seed=0):
    """Greedy tokens by adaptive_step behind a prompt at full depth; also the cache and every step."""
    cache = core.make_cache(len(prompt) + count, depth)
    token, steps = core(prompt, depth=depth, seed=seed, cache=cache)[:, -1:].argmax(-1), []
    for _ in range(count):
        steps.append((token, adaptive_step(core, token, cache, rule, depth, seed=seed)))
        token = steps[-1][1].logits.argmax(-1)
    return cache, steps


@pytest.mark.parametrize("family,name", [run for run in RUNS if run[1] in ("gate", "latent-diff", "kl", "argmax-stability")])
@torch.inference_mode()
def test_a_token_runs_until_its_rule_stops_it_and_leaves_its_last_k_v_to_deeper_readers(family, name):
    core = drawn(family)
    rule = exit_rule(name, middling(core, name))
    held, steps = greedy(core, TOKENS[0], rule, 8, DEPTH, seed=2)
    same = core.make_cache(16, DEPTH)
    core(TOKENS[0], depth=DEPTH, seed=2, cache=same)
    for token, step in steps:
        position, stopped = same.length, int(step.exit_depth)
        measured = measured_rows(core, name, token, DEPTH, same.clone(), seed=2)[1]
        assert stopped == step.ran == first_exit(name, measured[0, 0], rule.threshold)
        close(core(token, depth=stopped, seed=2, cache=same), step.logits)
        same.fill_deeper([position], stopped)
    assert same.length == held.length == 16
    for key, want in same.materialised().items():
        close(held.materialised()[key], want)
    assert min(int(step.exit_depth) for _, step in steps) < DEPTH


@torch.inference_mode()
def test_rows_of_a_batch_stop_one_by_one_and_equal_the_rows_alone(core):
    rule = LatentDiff(middling(core, "latent-diff"))
    cache = core.make_cache(16, DEPTH, batch=2)
    core(PADDED, depth=DEPTH, cache=cache, attention_mask=MASK)
    tokens = torch.randint(0, 256, (8, 2, 1), generator=torch.Generator().manual_seed(0))
    steps = [adaptive_step(core, pair, cache, rule, DEPTH) for pair in tokens]
    for row, width in ((0, 5), (1, 8)):
        own = core.make_cache(16, DEPTH)
        core(PADDED[row, -width:], depth=DEPTH, cache=own)
        for pair, step in zip(tokens, steps):
            alone = adaptive_step(core, pair[row : row + 1], own, rule, DEPTH)
            close(step.logits[row], alone.logits[0])
            assert step.exit_depth[row] == alone.exit_depth[0]
    assert any(step.exit_depth[0] != step.exit_depth[1] for step in steps)


def test_what_cannot_be_run_one_by_one_is_refused(random_core):
    core = random_core("ouro")
    with pytest.raises(PromptError, match="one position at a time.*got 2"):
        adaptive_step(core, torch.tensor([[1, 2]]), core.make_cache(4), "gate 0.5")
    with pytest.raises(SettingError, match="4 depths share 2 K/V slot"):
        adaptive_step(core, torch.tensor([[1], [2]]), core.make_cache(4, batch=2, slots=2), "gate 0.5")
    with pytest.raises(DepthError, match="depth 3 is outside the cache"):
        adaptive_step(core, torch.tensor([[1]]), core.make_cache(4, 2), "gate 1.0", 3)


@torch.inference_mode()
def test_models_with_hooks_are_refused_and_without_hooks_are_their_core(random_core):
    from loopscope.models.hooked import LoopedModel

    model = LoopedModel(random_core("ouro"))
    assert torch.equal(adaptive_forward(model, TOKENS, "gate 0.5").logits, adaptive_forward(model.core, TOKENS, "gate 0.5").logits)
    with model.hooks([("depth.1.hook_state", lambda t, hook: 2 * t)]):
        for call in (lambda: adaptive_forward(model, TOKENS, "gate 0.5"), lambda: weighted_logits(model, TOKENS)):
            with pytest.raises(HookError, match="hooks do not fire in adaptive passes"):
                call()
