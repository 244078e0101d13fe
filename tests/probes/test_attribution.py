"""Direct logit attribution: components add up to the logit on every wiring, and are what autograd says the direct path is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopscope.errors import NumericsError, PromptError, SettingError
from loopscope.models import dory
from loopscope.random_models import FAMILIES, make_random_core
from probes import AttributionResult, attribution
from probes.frozen import FrozenRun

IDS = torch.tensor([3, 141, 59, 26, 5, 35, 89])
SHAPES = {"huginn": [{}, {"n_coda": 0, "n_prelude": 0}], "raven": [{}, {"n_coda": 0}], "parcae": [{}, {"n_coda": 0, "n_prelude": 0}],
          "hrm_text": [{}, {"inner_cycles": 3}], "dory": [{}, {"n_coda": 0}]}
CASES = [(family, shape) for family in FAMILIES for shape in SHAPES.get(family, [{}])]


def name(case):
    return case if isinstance(case, str) else "_".join(f"{k}{v}" for k, v in case.items()) or "usual"


@pytest.mark.parametrize("family, shape", CASES, ids=name)
def test_components_add_up_to_the_logit_of_every_position(family, shape):
    core = make_random_core(family, seed=4, **shape)
    run = FrozenRun(core, IDS, 3, seed=5)
    logits = core(IDS, 3, seed=5)[0]
    assert torch.allclose(run.logits, logits, atol=1e-12)
    for tokens in (torch.full_like(IDS, 17), logits.argmax(-1)):
        total = torch.stack([s.value for s in run.shares(run.directions(tokens))]).sum(0)
        assert (total - logits.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-9
    mean = torch.stack([s.value for s in run.shares(run.mean_direction().expand(len(IDS), -1))]).sum(0)
    assert (mean - logits.mean(-1)).abs().max() < 1e-9


def autograd_shares(core, depth, token, monkeypatch):
    """Gradient times output of every source, in a run whose norm scales are constants and whose sources are leaves."""
    def rms(x, shape, weight=None, eps=None):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps).detach()
        return x * scale * (1 if weight is None else weight)

    def l2(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + dory.L2_EPS).detach()

    leaves, order = [], []

    def leaf_of(label):
        def hook(module, inputs, output):
            leaves.append(output.detach().clone().requires_grad_())
            order.append(label)
            return leaves[-1]
        return hook

    handles = [core.wte.register_forward_hook(leaf_of(("embedding", -1, "embedding")))]
    parts = {"prelude": core.prelude, "core": core.blocks, "coda": core.coda, "inner": getattr(core, "low", [])}
    handles += [getattr(block, branch).register_forward_hook(leaf_of((part, i, branch))) for part, blocks in parts.items()
                for i, block in enumerate(blocks) for branch in ("attn", "mlp")]
    with monkeypatch.context() as patch, torch.enable_grad():
        patch.setattr(F, "rms_norm", rms)
        patch.setattr(dory, "l2_norm", l2)
        given = None
        if core.has_start_state:
            given = core.start(torch.zeros(1, len(IDS), core.config.d_model, dtype=core.dtype), seed=5) \
                if core.family != "parcae" else torch.randn(1, len(IDS), core.config.d_model, dtype=core.dtype)
            given = given.detach().clone().requires_grad_()
        logits = core(IDS, depth, start_state=given)
        gradients = torch.autograd.grad(logits[0, :, token].sum(), [*leaves, *([given] if given is not None else [])])
    for handle in handles:
        handle.remove()
    found: dict[tuple, list] = {}
    for label, leaf, gradient in zip(order, leaves, gradients):
        branch = "attn" if label[2] == "attn" else label[2]
        found.setdefault((*label[:2], branch), []).append((leaf * gradient).sum(-1)[0].detach())
    if given is not None:
        found["start", -1, "start"] = [(given * gradients[-1]).sum(-1)[0].detach()]
    return found, given


@pytest.mark.parametrize("family", FAMILIES)
def test_every_component_is_what_autograd_finds_with_frozen_norms_and_sources(family, monkeypatch):
    core = make_random_core(family, seed=2)
    expected, given = autograd_shares(core, 3, 17, monkeypatch)
    run = FrozenRun(core, IDS, 3, start_state=None if given is None else given.detach())
    found: dict[tuple, dict] = {}
    for s in run.shares(run.directions(torch.full_like(IDS, 17))):
        found.setdefault((s.part, s.layer, s.branch), {})[s.depth, s.cycle] = s.value
    if family == "hrm_text":  # z_L's start is a parameter of the oracle, not one of its leaves
        found.pop(("start", -1, "start"))
    assert found.keys() == expected.keys()
    for key, values in found.items():
        in_order = [values[at] for at in sorted(values)]  # depth, then cycle: the order of the calls
        if key[0] in ("prelude", "embedding"):  # one call, whose output several recurrences inject
            in_order = [torch.stack(in_order).sum(0)]
        assert len(in_order) == len(expected[key])
        for mine, theirs in zip(in_order, expected[key]):
            assert (mine - theirs).abs().max() < 1e-9, key


def test_the_table_adds_up_and_says_where_each_row_belongs():
    core = make_random_core("huginn", seed=1)
    result = attribution(core, [IDS.tolist(), [7, 8, 9, 10]], progress=False, depth=3, task="code", seed=5)
    frame, c = result.frame, core.config
    for prompt, ids in ((0, IDS), (1, torch.tensor([7, 8, 9, 10]))):
        part = frame[frame.prompt == prompt]
        logits = core(ids, 3, seed=5)[0]
        expected = logits[:-1].gather(1, ids[1:, None]).mean().item()
        assert part.value_logits.sum() == pytest.approx(expected, abs=1e-9)
        assert (part.logit - expected).abs().max() < 1e-9 and set(part.n_positions) == {len(ids) - 1}
    one = frame[frame.prompt == 0]
    assert one.groupby("part").size().to_dict() == {"embedding": 3, "prelude": 6 * c.n_prelude, "start": 1, "core": 6 * c.n_core,
                                                    "coda": 2 * c.n_coda}
    assert set(one[one.part == "embedding"].depth) == {1, 2, 3} and set(one[one.part.isin(["start", "coda"])].depth) == {0}


@pytest.mark.parametrize("options, expected", [
    ({"target": "top"}, lambda z: z.max(-1).values.mean()),
    ({"target": "top", "positions": "last"}, lambda z: z[-1].max()),
    ({"positions": "last"}, lambda z: z[-2, IDS[-1]]),
    ({"target": 0}, lambda z: z[:, 0].mean()),
    ({"target": 9, "against": 0}, lambda z: (z[:, 9] - z[:, 0]).mean()),
    ({"target": "top", "against": "mean"}, lambda z: (z.max(-1).values - z.mean(-1)).mean()),
])
def test_targets_and_positions_are_the_ones_asked_for(options, expected):
    core = make_random_core("dory", seed=1)
    frame = attribution(core, [IDS.tolist()], progress=False, **options).frame
    wanted = float(expected(core(IDS)[0]))
    assert frame.value_logits.sum() == pytest.approx(wanted, abs=1e-9) and frame.logit.iloc[0] == pytest.approx(wanted, abs=1e-9)


def test_float32_adds_up_to_its_own_rounding_and_wrong_sums_are_refused(monkeypatch):
    core = make_random_core("ouro", dtype=torch.float32)
    frame = attribution(core, [IDS.tolist()], progress=False).frame
    assert frame.value_logits.sum() == pytest.approx(frame.logit.iloc[0], abs=1e-4)
    whole = FrozenRun.shares
    monkeypatch.setattr(FrozenRun, "shares", lambda self, g: whole(self, g)[1:])
    with pytest.raises(NumericsError, match="at position . the components add up to .*but the logit is"):
        attribution(core, [IDS.tolist()], progress=False)


def test_what_has_no_meaning_is_refused(huginn, monkeypatch):
    for options, words in (({"target": "best"}, "target 'best' is unknown.*'next', 'top' or a token id"), ({"target": True}, "target True"),
                           ({"against": 10**6}, "against 1000000"), ({"positions": "first"}, "'all' or 'last'")):
        with pytest.raises(SettingError, match=words):
            attribution(huginn, [[1, 2, 3]], progress=False, **options)
    with pytest.raises(PromptError, match="a next token needs at least 2"):
        attribution(huginn, [[1]], progress=False)
    monkeypatch.setattr(type(huginn), "family", "lookalike")
    with pytest.raises(SettingError, match="wiring of lookalike is not known here"):
        attribution(huginn, [[1, 2]], progress=False)


def test_the_table_comes_back_from_disk(ouro, tmp_path):
    result = attribution(ouro, [[1, 2, 3]], progress=False)
    result.save(tmp_path)
    assert AttributionResult.load(tmp_path).frame.equals(result.frame)
