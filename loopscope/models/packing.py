"""Weights laid out for the CPU, so that a call on a few rows costs what a call on one does.

A matrix product on few rows is bound by reading the matrix. torch's F.linear does not get there on a CPU: 2 to 16 rows cost two to
four times what one row does. oneDNN's product on a matrix in its own blocked layout does (`python -m decoders.row_cost` measures it),
is faster on one row and on a whole prompt too, and gives a row the same bits whatever the number of rows beside it, from the
least number that is ever run (LEAST_ROWS; fewer are padded, which the kernel is not slower for).

The packed matrix takes the place of the plain one: a model is never held twice. `core.make_cache`, so everything that decodes, packs
what can be packed, and whoever then looks at a parameter (attribute, state_dict, saving, .to, training) gets the plain matrix back,
bit for bit, before he sees it; the next cache packs it again. A parameter is not packed while anybody else holds it, nor where its
memory is not torch's own (an array's, a mapped file's; so, too, once .numpy() has shown it to one): edits made there would be missed.
So there are never two versions that could differ, and threads see one or the other. What a caller can notice: a parameter that was
packed comes back as a new object. Attributes set on the old one, its id() and weak references to it are gone.

Packed is: float32, and bfloat16 where the CPU multiplies it; no gradient wanted; at least LEAST_SIZE numbers, below which the
call's own overhead is more than what it saves. Each kind and shape is first compared with F.linear. All else runs F.linear.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_SIZE = 2**18  # numbers in a matrix; measured with one and two threads: 512 x 512 gains on 2 rows and loses nothing on 1
LEAST_ROWS = 4

_checked: dict[tuple[torch.dtype, torch.Size], bool] = {}
_lock = threading.RLock()  # held while a matrix changes its form; readers take it only when they meet an _Away


def product(x: Tensor, packed: Tensor) -> Tensor:
    """x [.., n] times a packed matrix [m, n] -> [.., m]; without gradients."""
    width = x.shape[-1]
    rows = x.numel() // width
    if rows >= LEAST_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    few = F.pad(x.reshape(rows, width), (0, 0, 0, LEAST_ROWS - rows))
    out = torch.ops.mkldnn._linear_pointwise(few, packed, None, "none", [], "")
    return out[:rows].view(*x.shape[:-1], out.shape[-1])  # not -1: a call may ask for no row


def pack(weight: Tensor) -> Tensor | None:
    """The packed form of a matrix; None where it has none, or where its product is not that of F.linear."""
    kind = weight.dtype, weight.shape
    if not _fits(weight) or not _checked.get(kind, True):
        return None
    try:
        packed = _reorder(weight)
        if kind not in _checked:
            _checked[kind] = _agrees(weight, packed)
    except (RuntimeError, AttributeError, NotImplementedError):  # AttributeError: torch was built without the operation
        _checked[kind] = False
    return packed if _checked[kind] else None


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _fits(weight: Tensor) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or weight.device.type != "cpu" or weight.ndim != 2 or weight.numel() < LEAST_SIZE \
            or weight.requires_grad or not weight.is_contiguous() or not torch.backends.mkldnn.is_available() \
            or not torch.backends.mkldnn.enabled:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _agrees(weight: Tensor, packed: Tensor) -> bool:
    """Whether products agree to rounding, and the packed matrix gives the plain one back bit for bit."""
    if not torch.equal(packed.to_dense(), weight):
        return False
    draw = torch.Generator().manual_seed(0)
    for rows in (1, LEAST_ROWS + 1):
        x = torch.randn(rows, weight.shape[1], generator=draw).to(weight.dtype)
        expected = F.linear(x, weight).float()
        bound = 4 * (torch.finfo(weight.dtype).eps + torch.finfo(torch.float32).eps * math.sqrt(weight.shape[1]))
        if not float((product(x, packed).float() - expected).abs().max()) <= bound * float(expected.abs().max()):
            return False
    return True


def _owned(weight: Tensor) -> bool:
    """Whether torch itself owns the memory and no other tensor is on it."""
    storage = weight.untyped_storage()
    # Two counts are the tensor's own and that of the object made here. A view, an array or .data would be one more.
    return storage.resizable() and not storage.is_shared() and torch._C._storage_Use_Count(storage._cdata) <= 2


class _Away(MutableMapping):
    """What stands in a module's `_parameters` while its matrix is packed: a look brings the matrix back first."""

    def __init__(self, module: Packable, plain: dict[str, Any]) -> None:
        self._module, self._plain = weakref.ref(module), plain

    def _back(self) -> dict[str, Any]:
        module = self._module()
        assert module is not None
        module.unpack()
        return self._plain  # whoever has it keeps its matrix from being packed again: see _pack

    def __contains__(self, name: object) -> bool:  # asked for every attribute that a module lacks, so it is no look
        return name in self._plain

    def __getitem__(self, name: str) -> Any:
        return self._back()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._back()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._back()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._back())

    def __len__(self) -> int:
        return len(self._back())


class Packable(nn.Module):
    """A module whose parameter `weight` [m, n] may be packed."""

    weight: nn.Parameter
    keeps = False  # whether the plain matrix is needed beside the packed one
    _packed: Tensor | None = None
    _plain: dict[str, Any] | None = None  # the parameters, while the matrix is packed: without it, or (keeps) with it

    def pack(self) -> bool:
        """Pack the matrix, if it can be and nobody else holds it; whether it is packed now."""
        with _lock, torch.inference_mode(False), torch.no_grad():
            return self._packed is not None or self._pack()

    def _pack(self) -> bool:
        plain, packed = self._parameters, None
        alone: dict[str, Any] = {}
        weight = plain.get("weight")  # a pruned or parametrised layer has none: it makes its weight from others
        if weight is None or not _fits(weight) or not _owned(weight):
            return False
        kept, holder = weight.detach(), weakref.ref(weight)
        # From here on whoever looks waits for the lock; whoever looked before has the dictionary or the parameter, and is counted.
        self.__dict__["_parameters"] = _Away(self, plain)
        try:
            if sys.getrefcount(plain) == sys.getrefcount(alone) + 1:  # held by this frame, as the other is, and by the _Away
                plain["weight"] = weight = None
                if _owned(kept):  # asked again: a thread may have taken the parameter, or a view of it, since
                    packed = pack(kept)
        finally:
            if plain["weight"] is None and (packed is None or self.keeps):
                own = holder()
                plain["weight"] = nn.Parameter(kept, requires_grad=False) if own is None else own
            if packed is None:
                self.__dict__["_parameters"] = plain
            else:
                self.__dict__["_plain"] = plain
                self.__dict__["_packed"] = packed
        return packed is not None

    def unpack(self) -> None:
        """Bring the plain matrix back, bit for bit, and let go of the packed one."""
        with _lock:
            if self._packed is None or self._plain is None:
                return
            plain = self._plain
            if not self.keeps:
                with torch.inference_mode(False), torch.no_grad():
                    plain["weight"] = nn.Parameter(self._packed.to_dense(), requires_grad=False)
            # In this order: once the plain matrix can be seen, and so edited, no product may take the packed one.
            self.__dict__["_packed"] = None
            self.__dict__["_parameters"] = plain
            self.__dict__["_plain"] = None

    def times(self, x: Tensor) -> Tensor:
        """x [.., n] -> x weight^T, [.., m]."""
        packed = self._packed  # read once: another thread may bring the matrix back meanwhile
        if packed is None or (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, self.weight)
        return product(x, packed)

    def __getstate__(self) -> dict[str, Any]:  # what copies and pickles take
        with _lock:
            self.unpack()
            return super().__getstate__() | {"_parameters": self._parameters.copy()}  # copy.copy would have both layers pack one dictionary


class Linear(Packable, nn.Linear):  # type: ignore[misc]  # nn.Linear declares its weight as well
    """nn.Linear without a bias, whose matrix may be packed."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    forward = Packable.times  # type: ignore[assignment]  # its argument has another name there


class Embedding(Packable, nn.Embedding):  # type: ignore[misc]
    """nn.Embedding whose matrix may also serve as the head. It is then held twice: rows are looked up in the plain one."""

    keeps = True

    def plain(self) -> Tensor:
        """The plain matrix, for reading: unlike `weight` this does not bring it back."""
        plain = self._plain
        return self.weight if plain is None else cast(Tensor, plain["weight"])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.plain())


def pack_all(module: nn.Module, *, tied: bool = False) -> int:
    """Pack every matrix that can be; how many are. tied: also embeddings, as heads."""
    return sum(part.pack() for part in module.modules() if isinstance(part, Packable) and (tied or not part.keeps))


def unpack_all(module: nn.Module) -> None:
    """Bring every matrix back."""
    for part in module.modules():
        if isinstance(part, Packable):
            part.unpack()
