"""Left padding: how many columns at the front of each sequence of a batch hold no token.

A padded batch is a rectangle [batch, columns]. Row b begins with pads[b] columns that nobody attends to; its tokens have the positions
0, 1, .. from the first that is real, as they have alone: rotary angle and start state follow the position, never the column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopscope.errors import PromptError

if TYPE_CHECKING:
    from loopscope.cache import DepthCache
    from loopscope.rows import Chain

Pads = tuple[int, ...]  # one number per sequence; empty where nothing is padded


def read_pads(mask: Tensor | None, tokens: Tensor, cache: DepthCache | None = None) -> Pads:
    """What an attention mask says of `tokens` [batch, n] behind the cache's columns: pads per sequence, () if there are none.

    mask: 0 or 1 (or bool), [batch, n] for these tokens or [batch, length + n] for the cached columns as well; zeros only on the left.
    None continues a padded cache as it is. Raises PromptError for anything else.
    """
    length = 0 if cache is None else cache.length
    earlier = cache.pads if cache is not None and length else ()
    if mask is None:
        return earlier
    new = _zeros_first(mask, tokens, length)
    width = new.shape[1]
    known = torch.tensor(earlier or [0] * len(new), device=new.device).clamp(max=length)
    if width == tokens.shape[1]:
        new = torch.cat((torch.arange(length, device=new.device) >= known[:, None], new), dim=1)
    pads = (~new).sum(1)
    behind_tokens = (new[:, :-1] & ~new[:, 1:]).any(1).nonzero()
    if len(behind_tokens):
        raise PromptError(f"attention_mask: row {int(behind_tokens[0])} has a 0 behind a 1; padding is supported on the left only")
    if (pads.clamp(max=length) != known).any():
        row = int((pads.clamp(max=length) != known).nonzero()[0])
        raise PromptError(f"attention_mask says that row {row} begins with {int(pads[row])} pads, but the cache was filled with "
                          f"{int(known[row])}; pass the mask of the new tokens alone, or none")
    if cache is None and (empty := (pads == new.shape[1]).nonzero()).numel():
        raise PromptError(f"attention_mask: row {int(empty[0])} holds no token, only pads")
    return tuple(pads.tolist()) if pads.any() else ()


def _zeros_first(mask: Tensor, tokens: Tensor, length: int) -> Tensor:
    """The mask as bool, its shape and values checked."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise PromptError(f"attention_mask must be a tensor of whole numbers 0 and 1, or of bool, got {found}")
    mask = mask[None] if mask.ndim == 1 else mask
    batch, n = tokens.shape
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (n, length + n):
        wanted = f"[{batch}, {n}]" + (f" or, with the cached positions, [{batch}, {length + n}]" if length else "")
        raise PromptError(f"attention_mask must be {wanted} like the tokens, got {list(mask.shape)}")
    if mask.dtype != torch.bool and ((mask != 0) & (mask != 1)).any():
        raise PromptError(f"attention_mask holds 0 (a pad) and 1 (a token), found {int(mask[(mask != 0) & (mask != 1)][0])}")
    return mask.to(device=tokens.device, dtype=torch.bool)


def token_positions(rows: Chain, device: torch.device) -> Tensor:
    """Position of every row in its own sequence, [batch, count] (int64): its column less the pads before it; 0 for a pad."""
    columns = torch.arange(rows.start, rows.start + rows.count, device=device)
    return (columns - torch.tensor(rows.pads, device=device)[:, None]).clamp_(min=0)


def readable_in_batch(queries: Tensor, keys: Tensor, pads: Pads) -> Tensor:
    """Which key columns [L] the rows at the columns `queries` [n] read in each sequence, [batch, 1, n, L] (bool): tokens up to their own.

    A pad reads itself alone: what it computes is read by nobody, but a softmax over nothing would be NaN.
    """
    queries, first = queries[:, None], torch.tensor(pads, device=keys.device)[:, None, None, None]
    return (keys <= queries) & (keys >= first) | (keys == queries)
