"""Packed weights: the products of F.linear, the same bits for a row whatever is beside it, and plain matrices for whoever looks."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import loopscope
from decoders import Autoregressive, Wavefront
from loopscope.models import packing
from loopscope.models.layers import rms_norm
from loopscope.models.packing import LEAST_SIZE, Embedding, Linear, Packable, product
from loopscope.random_models import make_random_core

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN: nothing is packed")

WIDE = {"d_model": 512, "n_heads": 4, "d_mlp": 640, "vocab_size": 520, "n_core": 2, "depth": 3, "gain": 0.2}  # out: 2^18 numbers
ENDS = {"n_prelude": 1, "n_coda": 1}
OTHERS = {"ouro": {}, "nanbeige": {"d_head": 128}, "hrm_text": {"d_head": 128}, "dory": {"d_head": 128} | ENDS}


def wide_core(family="huginn", dtype=torch.float32, **overrides):
    return make_random_core(family, dtype=dtype, **WIDE | OTHERS.get(family, ENDS) | overrides)


@pytest.fixture(scope="module")
def core():
    return wide_core()


def packed(core) -> list[str]:
    return [name for name, part in core.named_modules() if isinstance(part, Packable) and part._packed is not None]


def linear(inner=768, outer=512, dtype=torch.float32):
    return Linear(inner, outer).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("shape", [(512, 512), (2304, 768), (768, 2048), (520, 1000), (333, 801)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 33])
def test_a_packed_product_is_that_of_f_linear(shape, rows):
    layer = linear(shape[1], shape[0])
    x = torch.randn(1, rows, shape[1], generator=torch.Generator().manual_seed(rows))
    expected = F.linear(x.double(), layer.weight.double())
    assert layer.pack()
    assert (layer(x) - expected).abs().max() < 2e-6 * shape[1] ** 0.5


@pytest.mark.parametrize("shape", [(2304, 768), (768, 2048), (512, 4096)], ids=str)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(shape):
    """Without the padding of few rows this fails: one row of a matrix with 2048 columns or more goes to another kernel."""
    layer = linear(shape[1], shape[0])
    assert layer.pack()
    x = torch.randn(1, 16, shape[1])
    whole = layer(x)
    assert all(torch.equal(layer(x[:, i:j]), whole[:, i:j]) for i, j in ((0, 1), (5, 6), (2, 4), (0, 3), (0, 5), (3, 16)))


def test_batches_of_any_shape_keep_it():
    layer = linear()
    x = torch.randn(3, 5, 768)
    expected = layer(x)
    assert layer.pack()
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0, 0]), expected[0, 0])
    torch.testing.assert_close(layer(x[:1, ::2]), expected[:1, ::2])


@pytest.mark.parametrize("made", [
    lambda: linear(dtype=torch.float64), lambda: linear(dtype=torch.float16), lambda: Linear(768, 512), lambda: linear(256, 512)],
    ids=["float64", "float16", "wants gradients", "small"])
def test_what_is_not_packed_runs_f_linear(made):
    layer = made()
    x = torch.randn(2, layer.in_features).to(layer.weight.dtype)
    assert not layer.pack() and torch.equal(layer(x), F.linear(x, layer.weight))


def test_the_smallest_that_is_packed():
    assert linear(512, 512).pack() and 512 * 512 == LEAST_SIZE and not linear(512, 511).pack()


def test_where_the_operation_is_missing_or_wrong_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(packing, "_checked", {})
    monkeypatch.setattr(packing, "product", lambda x, w: product(x, w) * 1.001)
    layer = linear()
    assert not layer.pack() and not layer.pack()
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_checked", {})
    monkeypatch.setattr(packing, "_reorder", lambda weight: torch.ops.mkldnn.no_such_operation(weight))
    assert not layer.pack() and torch.isfinite(layer(torch.randn(1, 768))).all()


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not multiply bfloat16")
def test_bfloat16_is_summed_in_float32():
    layer = linear(4096, 512, torch.bfloat16)
    x = torch.randn(1, 8, 4096).bfloat16()
    exact = F.linear(x.double(), layer.weight.double())
    assert layer.pack()
    # Rounding of the result alone is 2^-9 of it; sums of 4096 in bfloat16 would be off by tenths.
    assert ((layer(x).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


# ---- the plain matrix is there for whoever looks, and there is never a second one --------------------------------------------


def test_every_look_brings_the_plain_matrix_back_bit_for_bit():
    looks = {"attribute": lambda m: m.weight, "parameters": lambda m: next(iter(m.parameters())),
             "state_dict": lambda m: m.state_dict()["weight"], "copy": lambda m: copy.deepcopy(m).weight,
             "pickle": lambda m: pickle.loads(pickle.dumps(m)).weight, "to": lambda m: m.double().float().weight}
    for name, look in looks.items():
        layer = linear()
        before = layer.weight.clone()
        assert layer.pack() and layer._packed is not None
        assert layer._plain["weight"] is None, "held twice"
        assert torch.equal(look(layer), before), name
        assert layer._packed is None, name


def test_an_edit_after_packing_is_never_lost():
    layer, x = linear(), torch.randn(1, 4, 768)
    assert layer.pack()
    layer.weight.mul_(2)
    expected = F.linear(x, layer.weight)
    assert layer.pack()
    torch.testing.assert_close(layer(x), expected)
    layer.weight = torch.nn.Parameter(torch.zeros(512, 768), requires_grad=False)
    assert not layer(x).any() and layer.pack() and not layer(x).any()
    layer.load_state_dict({"weight": torch.ones(512, 768)})
    torch.testing.assert_close(layer(x), x.sum(-1, keepdim=True).expand(1, 4, 512), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("hold", [lambda p: p, lambda p: p.data, lambda p: p[0], lambda p: p.detach(), lambda p: p.numpy()],
                         ids=["itself", "data", "a row", "detached", "an array"])
def test_a_parameter_that_somebody_holds_is_not_packed(hold):
    layer = linear()
    held = hold(layer.weight)
    assert not layer.pack()
    assert not isinstance(held, torch.nn.Parameter) or layer.weight is held
    held[...] = 0
    assert not layer(torch.randn(1, 4, 768))[..., 0].any()
    array = isinstance(held, np.ndarray)
    del held
    assert layer.pack() is not array  # torch cannot tell whether an array that it once gave away is still there


def memory_of_others(array, how, layer, folder):
    """The layer's weight on memory that torch did not allocate; what edits it."""
    if how == "memmap":
        array = np.memmap(folder / "w", dtype="f4", mode="w+", shape=array.shape)
    tensor = {"frombuffer": lambda: torch.frombuffer(array.data, dtype=torch.float32).view(array.shape),
              "dlpack": lambda: torch.from_dlpack(array)}.get(how, lambda: torch.from_numpy(array))()
    if how == "assigned":
        layer.load_state_dict({"weight": tensor}, assign=True)
        layer.requires_grad_(False)
    elif how == "data":
        layer.weight.data = tensor
    else:
        layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
    return array


@pytest.mark.parametrize("how", ["from_numpy", "memmap", "frombuffer", "dlpack", "assigned", "data"])
def test_memory_that_is_not_torchs_own_is_not_packed(how, tmp_path):
    layer = linear()
    array = memory_of_others(np.zeros((512, 768), "f4"), how, layer, tmp_path)
    assert not layer.pack()
    array[...] = 1
    x = torch.randn(1, 4, 768)
    torch.testing.assert_close(layer(x), x.sum(-1, keepdim=True).expand(1, 4, 512), atol=1e-3, rtol=1e-4)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("change", [
    lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: register_parametrization(m, "weight", Doubled()),
    parametrizations.spectral_norm, parametrizations.weight_norm], ids=["pruned", "parametrised", "spectral norm", "weight norm"])
def test_a_layer_that_makes_its_weight_is_not_packed(change, first):
    for layer in (linear(), Embedding(512, 768).requires_grad_(False)):
        assert not first or layer.pack()
        before = layer.weight.clone()
        change(layer.eval())
        assert not layer.pack()
        x = torch.arange(4) if isinstance(layer, Embedding) else torch.randn(4, 768)
        made = layer.weight
        torch.testing.assert_close(layer(x), made[x] if isinstance(layer, Embedding) else F.linear(x, made))
        assert made.shape == before.shape


def test_a_layer_without_its_weight_is_not_packed():
    layer = linear()
    assert layer.pack()
    del layer.weight
    assert not layer.pack() and not hasattr(layer, "weight")
    layer = linear()
    layer.weight = None
    assert not layer.pack()


@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed"])
def test_a_shallow_copy_shares_the_parameter_and_neither_breaks_the_other(first):
    layer = linear()
    before = layer.weight.clone()
    assert not first or layer.pack()
    other = copy.copy(layer)
    assert other.weight is layer.weight and not layer.pack() and not other.pack()
    other.weight = torch.nn.Parameter(torch.zeros(512, 768), requires_grad=False)
    assert torch.equal(layer.weight, before)
    assert layer.pack() and other.pack()
    assert torch.equal(layer.weight, before) and not other.weight.any()


def test_a_dictionary_of_parameters_that_somebody_holds_keeps_its_matrix():
    layer = linear()
    held = layer._parameters
    assert not layer.pack() and held["weight"] is layer.weight
    del held
    assert layer.pack()


def test_gradients_pass_through_a_packed_layer():
    layer = linear()
    assert layer.pack()
    x = torch.randn(1, 4, 768, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad[0, 0], layer.weight.sum(0))


def test_an_embedding_keeps_the_plain_matrix_for_its_rows():
    table = Embedding(512, 512).requires_grad_(False)
    x, tokens = torch.randn(1, 4, 512), torch.tensor([3, 500])
    assert table.pack() and torch.equal(table(tokens), table.plain()[tokens]) and table._packed is not None
    torch.testing.assert_close(table.times(x), F.linear(x, table.plain()), atol=1e-3, rtol=1e-4)
    table.weight.zero_()
    assert not table.times(x).any() and not table(tokens).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_norm_has_the_bits_of_torchs_own(dtype, weighted):
    draw = torch.Generator().manual_seed(0)
    for width, rows in ((48, 1), (96, 16), (768, 5), (100, 3)):
        x, weight = torch.randn(1, rows, width, generator=draw).to(dtype), torch.rand(width, generator=draw).to(dtype) if weighted else None
        with torch.no_grad():
            assert torch.equal(rms_norm(x, (width,), weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))


# ---- in a model --------------------------------------------------------------------------------------------------------


def test_a_decode_packs_and_its_tokens_are_those_without(core):
    core.packs = False
    core.unpack()
    plain = Autoregressive().generate(core, [1, 2, 3], max_new_tokens=24)
    assert not packed(core)
    core.packs = True
    ours = [d.generate(core, [1, 2, 3], max_new_tokens=24) for d in (Autoregressive(), Wavefront(1))]
    assert [g.tokens for g in ours] == [plain.tokens] * 2 and 0 < ours[1].alpha
    inner = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    blocks = [f"{part}.{i}.{name}" for part, n in (("prelude", 1), ("blocks", 2), ("coda", 1)) for i in range(n) for name in inner]
    assert sorted(packed(core)) == sorted(["wte", "adapter", *blocks])


@pytest.mark.parametrize("family", ["ouro", "raven", "raven_olmo", "nanbeige", "parcae", "dory", "hrm_text"])
def test_every_family_runs_packed(family):
    core = wide_core(family)
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        plain = core(tokens)
        assert core.pack() >= 4 * len(core.blocks) - 1
        ours = core(tokens)
    assert core.head is None or core.head._packed is not None
    assert (ours - plain).abs().max() < 1e-3 * plain.abs().max()


def test_saving_and_loading_give_the_same_weights(core, tmp_path):
    before = {name: tensor.clone() for name, tensor in core.state_dict().items()}
    assert core.pack()
    core.save_pretrained(tmp_path / "saved")
    after = loopscope.load(tmp_path / "saved", hooked=False).state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_hooks_and_gradients_see_the_same_model_packed(core):
    model = loopscope.LoopedModel(core)
    tokens = torch.tensor([[5, 6, 7, 8]])
    core.unpack()
    with torch.no_grad():
        _, plain = model.run_with_cache(tokens)
        assert core.pack()
        _, ours = model.run_with_cache(tokens)
    assert packed(core)
    assert all((ours[name] - plain[name]).abs().max() <= 1e-3 * (1 + plain[name].abs().max()) for name in plain)
    grads = {}
    hook = ("depth.1.hook_state", lambda g, hook: grads.update(g=g.clone()))
    model.run_with_hooks(tokens, return_type="loss", bwd_hooks=[hook]).backward()
    assert grads["g"].abs().sum() > 0


def test_training_is_not_packed(core):
    made = copy.deepcopy(core).requires_grad_(True)
    assert not made.pack()
    made.make_cache(4)
    assert not packed(made)
