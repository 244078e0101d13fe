"""Packed weights among threads: a reader meets the plain matrix or the packed one, and never both or half of one."""

import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F

from loopscope.models import packing
from loopscope.models.packing import Embedding, Linear, _Away

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN: nothing is packed")


def linear(inner=768, outer=512, dtype=torch.float32):
    return Linear(inner, outer).to(dtype).requires_grad_(False)


def at_every_line(work, look):
    """What `work` returns; before every line of packing.py in it comes a look, as from a thread that takes over there."""
    def trace(frame, event, argument):
        if frame.f_code.co_filename != packing.__file__:
            return None
        if event == "line":
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("kind", [Linear, Embedding])
def test_at_no_moment_can_a_plain_matrix_be_edited_beside_a_packed_one(kind):
    layer, seen = kind(512, 512).requires_grad_(False), set()
    assert layer.pack()
    layer.unpack()  # the kind is compared with F.linear once, above

    def look():
        parameters = layer.__dict__["_parameters"]
        away = isinstance(parameters, _Away)
        seen.add((away, layer._packed is not None))
        assert away or layer._packed is None and parameters["weight"] is not None
        assert not layer.keeps or layer._plain is None or layer._plain["weight"] is not None

    assert at_every_line(layer.pack, look)
    at_every_line(layer.unpack, look)
    assert seen == {(False, False), (True, False), (True, True)}


def test_a_product_that_has_begun_is_right_though_the_matrix_is_brought_back():
    layer, x = linear(), torch.randn(1, 4, 768)
    expected = layer(x)
    for line in range(4):
        assert layer.pack()
        lines = iter(range(99))
        out = at_every_line(lambda: layer(x), lambda lines=lines, line=line: next(lines) == line and layer.unpack())
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)
        assert next(lines) > line and layer._packed is None


def in_threads(*works, seconds=0.8):
    """Run each again and again beside the others, changing threads as often as Python can; how often each ran, and what failed."""
    counts, errors = [0] * len(works), []
    stop, interval = time.monotonic() + seconds, sys.getswitchinterval()

    def run(i):
        try:
            while not errors and (time.monotonic() < stop or not all(counts) and time.monotonic() < stop + 20):  # a busy machine
                works[i]()
                counts[i] += 1
                time.sleep(1e-4)  # without a pause somebody always holds the parameter, and it is never packed
        except Exception as error:  # any failure of any thread is what is asked for
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return counts, errors


@pytest.mark.parametrize("kind", [Linear, Embedding])
def test_threads_see_the_plain_or_the_packed_matrix_and_nothing_between(kind):
    layer, x, did = kind(512, 512).requires_grad_(False), torch.randn(1, 5, 512), []
    before, expected = layer.weight.clone(), F.linear(x, layer.weight)

    def forward():
        torch.testing.assert_close(layer.times(x), expected, atol=1e-3, rtol=1e-4)

    def look():
        assert torch.equal(layer.weight, before)

    def save():
        assert layer.state_dict()["weight"].shape == (512, 512)

    def rows():
        assert torch.equal(layer(torch.tensor([7])), before[7:8])

    counts, errors = in_threads(forward, lambda: did.append(layer.pack()), look, save, *[rows] * (kind is Embedding))
    assert not errors and min(counts) > 0 and any(did)
    assert torch.equal(layer.weight, before)


def test_an_edit_is_not_lost_among_threads_that_pack_and_look():
    layer, x, sign = linear(512, 512), torch.randn(1, 5, 512), [1]
    expected = F.linear(x, layer.weight)

    def edit():
        layer.weight.neg_()
        sign[0] = -sign[0]
        torch.testing.assert_close(layer(x), sign[0] * expected, atol=1e-3, rtol=1e-4)

    counts, errors = in_threads(edit, layer.pack, lambda: layer.weight.shape, lambda: layer.state_dict())
    assert not errors and min(counts) > 0
