"""A recorded run for others' tools: an xarray dataset with named axes, and circuitsvis's view of attention patterns.

Both are behind the extra `interop`; nothing here is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopscope.errors import HookError, SettingError
from loopscope.hook_names import BLOCK_NAMES, EMBED, FINAL, SHORT_NAMES, STATE, cycle_of, depth_of, layer_of

if TYPE_CHECKING:
    import xarray

    from loopscope.recorded import RecordedRun

_KV = ("k", "v", "rot_k")
_HEADS = ("q", "z", "rot_q", *_KV)
_SHORT = {name: short for short, name in SHORT_NAMES.items()}


def need(module: str, what: str) -> Any:
    """A module of the extra. Raises SettingError, naming the extra, where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        if (error.name or module).partition(".")[0] != module.partition(".")[0]:
            raise
        raise SettingError(f"{what} needs {module.partition('.')[0]}, which is not installed; pip install 'loopscope[interop]'") from None


def to_xarray(run: RecordedRun) -> xarray.Dataset:
    """Everything that was recorded, one variable for each short name, with named dimensions and their coordinates.

    Core activations are "v", "resid_post", ... with dimensions (depth, layer, batch, position, head, d_head) or (.., d_model);
    "pattern" is (depth, layer, batch, head, position, key); "state" (depth, batch, position, d_model). Those of prelude and
    coda carry the part in front and have no depth: "coda_v" with (coda_layer, ...). HRM-Text's fast stack is "inner_v", with
    a dimension cycle behind depth. "embed" and "final" are (batch, position, d_model). Where a model has fewer key-value
    heads than heads, k, v and rot_k have a dimension kv_head. Depths count from 1, all else from 0; a depth or layer at
    which a name was not recorded while others were is NaN. bfloat16, which numpy has not, becomes float32; gradients
    are left out.

    Raises SettingError where xarray is not installed.
    """
    xr = need("xarray", "run.to_xarray()")
    groups: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in run.cache_dict.items():
        found = _place(name)
        if found is not None:
            groups.setdefault(found[0], {})[found[1]] = tensor
    arrays = {key: _array(xr, run, key, at) for key, at in sorted(groups.items())}
    dataset = xr.merge(arrays.values(), join="outer", compat="no_conflicts") if arrays else xr.Dataset()
    return dataset.assign_attrs(model=str(run.looped.source or run.looped.family), family=run.looped.family, depth=run.depth)


def _place(name: str) -> tuple[str, tuple[int, ...]] | None:
    """(variable, its place along the stacked axes) of a hook name; None for what is no activation (gradients)."""
    if name in (EMBED, FINAL):
        return name.removeprefix("hook_"), ()
    r, layer = depth_of(name), layer_of(name)
    if r is not None and name.endswith("." + STATE):
        return "state", (r,)
    short = next((_SHORT[n] for n in BLOCK_NAMES if name.endswith("." + n)), None)
    if short is None or layer is None:
        return None
    if r is None:
        return f"{name.partition('.')[0]}_{short}", (layer,)
    return (f"inner_{short}", (r, cycle_of(name), layer)) if cycle_of(name) else (short, (r, layer))


def _array(xr: Any, run: RecordedRun, key: str, at: dict[tuple[int, ...], Tensor]) -> Any:
    part, _, rest = key.partition("_")
    outer = part if part in ("prelude", "coda", "inner") else ""
    short = rest if outer else key
    stacked = {"": ("depth", "layer"), "inner": ("depth", "cycle", "layer")}.get(outer, (f"{outer}_layer",))
    stacked = ("depth",) if key == "state" else () if key in ("embed", "final") else stacked
    few = run.looped.config.n_kv_heads != run.looped.config.n_heads
    head = "kv_head" if short in _KV and few else "head"
    inner: tuple[str, ...] = ("position", head, "d_head") if short in _HEADS else ("position", "d_model")
    if short == "pattern":
        inner = (head, "position", "key")
    example = next(iter(at.values()))
    dims = (("batch",) if run.has_batch_dim else ()) + inner
    if example.ndim < len(dims):  # a single position was sliced out
        dims = tuple(d for d in dims if d != "position")
    axes = [sorted({place[i] for place in at}) for i in range(len(stacked))]
    shape = [len(a) for a in axes]
    dtype = torch.float32 if example.dtype == torch.bfloat16 else example.dtype
    whole = torch.full((*shape, *example.shape), float("nan"), dtype=dtype)
    for place, tensor in at.items():
        whole[tuple(axis.index(i) for axis, i in zip(axes, place))] = tensor.detach().to("cpu", dtype)
    coords: dict[str, Any] = dict(zip(stacked, axes))
    coords |= {d: range(n) for d, n in zip(dims, example.shape)}
    positions = getattr(run, "positions", None)
    if "position" in coords and positions is not None and len(positions) == len(coords["position"]):
        coords["position"] = positions.tolist()
    return xr.DataArray(whole.numpy(), dims=(*stacked, *dims), coords=coords, name=key)


def attention_view(run: RecordedRun, depth: int | str, layer: int, batch: int = 0, tokens: list[str] | None = None) -> Any:
    """circuitsvis's view of one layer's attention patterns: an object that shows itself in a notebook; `str` of it is HTML.

    depth: 1..T, "prelude" or "coda". tokens: texts of the positions; by default those of the recorded tokens. The page that it
    makes loads its code from the network when it is shown.

    Raises SettingError where circuitsvis is not installed, HookError for a pattern that was not recorded or whose rows
    and keys are not the same positions (a slice, or a pass behind a cache).
    """
    shown = need("circuitsvis.attention", "run.attention_view()")
    pattern = run["pattern", depth, layer]
    pattern = pattern[batch] if run.has_batch_dim else pattern
    heads, rows, keys = pattern.shape
    if rows != keys:
        raise HookError(f"the pattern of layer {layer} at depth {depth} has {rows} rows and {keys} keys; a view needs a pass over whole "
                        "sequences, without pos_slice or cache")
    words = run.token_texts(batch, rows) if tokens is None else list(tokens)
    if len(words) != rows:
        raise SettingError(f"the pattern has {rows} positions, but {len(words)} tokens were given")
    return shown.attention_heads(attention=pattern.detach().float().cpu().numpy(), tokens=words,
                                 attention_head_names=[f"depth {depth}, L{layer}H{h}" for h in range(heads)])
