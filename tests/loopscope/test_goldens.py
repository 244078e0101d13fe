"""Our models match outputs of their official code on the same weights (tests/goldens/*/README.md).

First Huginn and Ouro by hand, in two precisions; the other families have files of their own. Then every stored tensor of every
family: one line of CHECKS says what it is compared with, and a tensor that no line knows fails. Sizes, depths, thresholds, slots
and schedules are read from names and shapes, so other data of the same layout can be checked too:
LOOPSCOPE_GOLDENS=folder pytest tests/loopscope/test_goldens.py
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from functools import cache as cached_once
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from decoders import Autoregressive, Wavefront
from loopscope.adaptive import adaptive_forward, weighted_logits
from loopscope.exits import Gate
from loopscope.models.loading import load_core
from loopscope.padding import token_positions
from loopscope.rows import Chain

ATOL = 3e-4


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def cases(goldens, dtype):
    out = {}
    for family in ("huginn", "ouro"):
        out[family] = load_core(goldens / family, dtype=dtype), load_file(goldens / family / "io.safetensors")
    return out


def runs(family, io):
    if family == "ouro":
        return [(f"_T{t}", t, None) for t in range(1, 5)]
    return [(f"_{mode}_T{t}", t, "zero" if mode == "zero" else io["init_states"]) for mode in ("zero", "state") for t in range(1, 5)]


@pytest.mark.support("golden logits")
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_logits_match_at_every_depth(cases, family):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        logits = core(io["input_ids"], depth=depth, start_state=start)
        torch.testing.assert_close(logits.float(), io[f"logits{name}"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_logits_match_when_the_prompt_goes_through_the_cache_in_chunks(cases, family):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        cache = core.make_cache(24, depth, batch=2)
        parts = [core(chunk, depth=depth, start_state=start, cache=cache) for chunk in io["input_ids"].split([9, 1, 14], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1).float(), io[f"logits{name}"], atol=ATOL, rtol=0)


@pytest.mark.support("golden tokens")
@pytest.mark.parametrize("decoder", [Autoregressive(), Wavefront(1)], ids=repr)
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_greedy_tokens_match_exactly(cases, family, decoder):
    core, io = cases[family]
    for name, depth, start in runs(family, io):
        if f"greedy{name}" not in io:
            continue
        for row in range(2):
            own = start if start is None or isinstance(start, str) else start[row : row + 1]
            got = decoder.generate(core, io["input_ids"][row], max_new_tokens=16, depth=depth, start_state=own)
            # the official runs go on behind an end-of-sequence token; ours stop there
            want = io[f"greedy{name}"][row].tolist()
            assert got.tokens == want[: len(got.tokens)]
            assert len(got.tokens) == 16 or got.tokens[-1] in core.config.eos


@pytest.mark.support("golden states", family="huginn")
def test_huginn_states_prelude_and_latents_match(cases):
    core, io = cases["huginn"]
    x = core.embed(io["input_ids"])
    torch.testing.assert_close(x.float(), io["prelude_out"], atol=ATOL, rtol=0)
    for mode in ("zero", "state"):
        state = core.start(x, start_state="zero" if mode == "zero" else io["init_states"])
        for r in range(4):
            state = core.recur(state, x)
            torch.testing.assert_close(state.float(), io[f"core_states_{mode}"][r], atol=ATOL, rtol=0)
        torch.testing.assert_close(core.norm(state).float(), io[f"latent_ln_{mode}_T4"], atol=ATOL, rtol=0)


@pytest.mark.support("golden states", family="ouro")
def test_ouro_states_gate_and_exit_distribution_match(cases):
    core, io = cases["ouro"]
    state = x = core.embed(io["input_ids"])
    states = []
    for r in range(4):
        state = core.recur(state, x)
        states.append(state)
        torch.testing.assert_close(state.float(), io["hidden_steps"][r], atol=ATOL, rtol=0)
    stacked = torch.stack(states)
    torch.testing.assert_close(core.gate(stacked).squeeze(-1).movedim(0, -1).float(), io["gate_logits"], atol=ATOL, rtol=0)
    pdf = core.exit_pdf(stacked)
    torch.testing.assert_close(pdf.float(), io["exit_pdf"], atol=ATOL, rtol=0)
    torch.testing.assert_close(pdf.sum(-1), torch.ones_like(pdf[..., 0]))


@pytest.mark.support("save")
@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_what_was_loaded_can_be_written_and_loaded_again_bit_for_bit(cases, family, dtype, tmp_path):
    core, io = cases[family]
    core.save_pretrained(tmp_path / "copy")
    again = load_core(tmp_path / "copy", dtype=dtype)
    assert again.config == core.config
    for (name, a), (other, b) in zip(core.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_loaded_inside_inference_mode_gives_gradients_outside_it(goldens):
    with torch.inference_mode():
        core = load_core(goldens / "huginn")
        core(torch.tensor([[1, 2, 3]]))  # the rotary table and start states are made here
    state = core.start(core.embed(torch.tensor([[1, 2, 3]]))).clone().requires_grad_()
    core.read(core.recur(state, core.embed(torch.tensor([[1, 2, 3]])))).sum().backward()
    assert state.grad.abs().sum() > 0


# ---- every stored tensor of every family ------------------------------------------------------------------------

FOLDER = Path(os.environ.get("LOOPSCOPE_GOLDENS", Path(__file__).parents[1] / "goldens"))
STORED = [(path.parent.name, name) for path in sorted(FOLDER.glob("*/io.safetensors")) for name in sorted(safe_open(path, "pt").keys())]


class Golden:
    """One folder of reference data. It notes which of its tensors were asked for."""

    def __init__(self, family: str) -> None:
        self.core, self.io = load_core(FOLDER / family), load_file(FOLDER / family / "io.safetensors")
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return self.io[name]

    def start(self, mode: str | None):
        return self["init_states"] if mode == "state" else mode

    def prefix(self, length: str | None) -> int:
        if length is None:
            return 0
        types = self["token_type_ids"]
        assert (types == (torch.arange(types.shape[1]) < int(length))).all()
        return int(length)


golden_of = cached_once(Golden)


def with_config(core, **changes):
    """The same weights under a changed config."""
    other = copy.copy(core)
    other.config = dataclasses.replace(core.config, **changes)
    return other


def equal(ours, stored):
    torch.testing.assert_close(ours.float(), stored, atol=ATOL, rtol=0)


def forward(g: Golden, name: str, core, depth: int, start=None, prefix: int = 0):
    """In one pass and through the cache in chunks."""
    ids = g["input_ids"]
    equal(core(ids, depth, start_state=start, prefix=prefix), g[name])
    n, first = ids.shape[1], max(prefix, ids.shape[1] // 3)
    cache = core.make_cache(n, depth, len(ids))
    parts = [core(chunk, depth, start_state=start, prefix=prefix, cache=cache) for chunk in ids.split([first, 1, n - first - 1], 1)]
    equal(torch.cat(parts, 1), g[name])


def greedy(g: Golden, name: str, core, depths, start=None, prefix: int = 0, slots: int | None = None, recompute: bool = True, run=None):
    """Cached greedy decoding of as many tokens as are stored, depths[i] recurrences for the i-th; recomputed in one pass too.

    name: of the tokens, or of the logits that they were the largest of.
    """
    ids, stored = g["input_ids"], g[name]
    depths = [depths] * stored.shape[1] if isinstance(depths, int) else depths
    cache = core.make_cache(ids.shape[1] + stored.shape[1], max(depths), len(ids), slots)
    run = run or (lambda chunk, depth, cache: core(chunk, depth, start_state=start, prefix=prefix, cache=cache))
    chunk, logits = ids, []
    for depth in depths:
        begin = cache.length
        logits.append(run(chunk, depth, cache)[:, -1])
        cache.fill_deeper(range(begin, cache.length), depth)  # where depths differ, readers find the latest there is
        chunk = logits[-1].argmax(-1, keepdim=True)
    logits = torch.stack(logits, 1)
    if stored.is_floating_point():
        equal(logits, stored)
    assert torch.equal(logits.argmax(-1), stored.argmax(-1) if stored.is_floating_point() else stored)
    if recompute:
        tokens = torch.cat((ids, logits.argmax(-1)[:, :-1]), 1)
        again = core(tokens, depths[0], start_state=start, prefix=prefix)[:, ids.shape[1] - 1 :]
        assert torch.equal(again.argmax(-1), logits.argmax(-1))


def states_of(g: Golden, mode: str | None, depth: int):
    """After 1, 2, .. recurrences, [depth, batch, n, d_model or more]."""
    ids = g["input_ids"]
    x = g.core.embed(ids)
    states = [g.core.start(x, start_state=g.start(mode))]
    for _ in range(depth):
        states.append(g.core.recur(states[-1], x))
    return torch.stack(states[1:])


def states(g, name, mode=None):
    equal(states_of(g, mode, len(g[name]))[..., : g.core.config.d_model], g[name])


def loops(g):
    return g["exit_pdf"].shape[-1]


def shifted_loss(g, name):
    logits, labels = weighted_logits(g.core, g["input_ids"], loops(g)), g["input_ids"]
    equal(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())[None], g[name])


def exits(g, name, threshold):
    got = adaptive_forward(g.core, g["input_ids"], Gate(float(threshold)), loops(g))
    if name.startswith("logits"):
        equal(got.logits, g[name])
    else:
        assert torch.equal(got.exit_depth - 1, g[name])  # stored counting from 0


def padded(g, name):
    """Where the tokens of a left-padded batch stand; what they give is compared in the file named below."""
    pads = tuple((g["leftpad_attention_mask"] == 0).sum(1).tolist())
    assert torch.equal(token_positions(Chain(0, g[name].shape[1], pads=pads), g[name].device), g[name])


def used_by(pattern):
    """An input: the check of the first stored output that `pattern` matches has to ask for it."""

    def check(g, name):
        output = next(other for other in g.io if re.fullmatch(pattern, other) and not other.startswith("leftpad"))
        g.asked.clear()
        check_of(output)(g, output)
        assert name in g.asked

    return check


def handled_in(file):
    def check(g, name):
        assert f'io["{name}"]' in Path(__file__).with_name(file).read_text(encoding="utf-8")

    return check


def hrm(g, low):
    return with_config(g.core, inner_cycles=int(low))


MODE = "(?:_(zero|state))?"
CHECKS = {
    f"logits{MODE}_T(\\d+)": lambda g, name, mode, t: forward(g, name, g.core, int(t), g.start(mode)),
    f"greedy(?:_logits)?{MODE}_T(\\d+)": lambda g, name, mode, t: greedy(g, name, g.core, int(t), g.start(mode)),
    # Huginn's lookup strategies count core layers: s4 with 4 of them is one slot for all recurrences of a layer.
    f"greedy(?:_logits)?{MODE}_T(\\d+)_compress_s(\\d+)": lambda g, name, mode, t, s: greedy(
        g, name, g.core, int(t), g.start(mode), slots=int(s) // g.core.config.n_core, recompute=False),
    f"greedy(?:_logits)?{MODE}_varT_latest_m\\d+": lambda g, name, mode: greedy(
        g, name, g.core, g["varT_schedule"].tolist(), g.start(mode), recompute=False),
    "greedy_T(\\d+)_per_loop": lambda g, name, t: greedy(g, name, with_config(g.core, kv_slots=None), int(t)),
    "greedy_T(\\d+)_last_loop": lambda g, name, t: greedy(g, name, with_config(g.core, kv_slots=1), int(t), recompute=False),
    "logits_H(\\d+)_L(\\d+)(?:_prefix(\\d+))?": lambda g, name, h, low, n: forward(g, name, hrm(g, low), int(h), prefix=g.prefix(n)),
    "greedy_H(\\d+)_L(\\d+)(?:_prefix(\\d+))?": lambda g, name, h, low, n: greedy(g, name, hrm(g, low), int(h), prefix=g.prefix(n)),
    f"core_states{MODE}": states,
    "hidden_steps": states,
    "prelude_out": lambda g, name: equal(g.core.embed(g["input_ids"]), g[name]),
    f"latent_ln{MODE}_T(\\d+)": lambda g, name, mode, t: equal(g.core.norm(states_of(g, mode, int(t))[-1]), g[name]),
    "gate_logits": lambda g, name: equal(g.core.gate(states_of(g, None, loops(g))).squeeze(-1).movedim(0, -1), g[name]),
    "exit_pdf": lambda g, name: equal(g.core.exit_pdf(states_of(g, None, loops(g))), g[name]),
    "logits_weighted": lambda g, name: equal(weighted_logits(g.core, g["input_ids"], loops(g)), g[name]),
    "loss_labels": shifted_loss,
    "(?:logits|exit_step)_thr([\\d.]+)": exits,
    "greedy_thr([\\d.]+)": lambda g, name, threshold: greedy(  # all loops run and are cached; only the readout is early
        g, name, g.core, loops(g), recompute=False,
        run=lambda chunk, depth, cache: adaptive_forward(g.core, chunk, Gate(float(threshold)), depth, cache=cache).logits),
    "leftpad_position_ids": padded,
    "leftpad_.*": handled_in("test_padding.py"),
    "input_ids": used_by("logits.*"), "init_states": used_by("logits_state.*"), "varT_schedule": used_by("greedy.*_varT_.*"),
    "token_type_ids": used_by("logits.*_prefix.*"),
}


def check_of(name):
    """The check of a stored tensor: the first line of CHECKS that knows its name."""
    for pattern, check in CHECKS.items():
        found = re.fullmatch(pattern, name)
        if found:
            return lambda g, name: check(g, name, *found.groups())
    raise AssertionError(f"no test compares {name!r} with ours; add a line to CHECKS")


@pytest.mark.parametrize("family,name", STORED)
@torch.inference_mode()
def test_every_stored_tensor_is_what_our_model_gives(family, name):
    check_of(name)(golden_of(family), name)


def test_there_are_goldens_of_eight_models_and_no_tensor_is_unknown():
    assert len({family for family, _ in STORED}) == 8 or "LOOPSCOPE_GOLDENS" in os.environ
    with pytest.raises(AssertionError, match="no test compares 'logits_T4_of_tomorrow'"):
        check_of("logits_T4_of_tomorrow")
