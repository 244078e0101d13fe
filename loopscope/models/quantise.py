"""Weight-only int8 through torchao (extra `int8`): a quarter of float32's memory, and another model than the checkpoint.

Decoders stay lossless in their own sense: their tokens are those of autoregressive decoding on these weights. But these are not the
checkpoint's weights, so the model's name says int8 wherever it is written, and it cannot be saved as that checkpoint.

On a CPU this saves memory and costs time: torchao's product widens the whole matrix at every call. Packed weights (packing.py) are the
fast ones there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopscope.errors import SettingError
from loopscope.models.packing import Linear

if TYPE_CHECKING:
    from loopscope.models.looped import LoopedCore

MARK = " int8"


@torch.inference_mode(False)
def quantise(core: LoopedCore) -> LoopedCore:
    """Quantise the matrices of all blocks, adapter and head to int8, one scale per output channel, in place; gives the core back.

    Embeddings (a tied head with them), norms and gates stay as they are. The model's `source` gains " int8". Raises SettingError where
    torchao is not installed, or the model is quantised already or takes gradients.
    """
    if core.quantised:
        raise SettingError(f"{core.source} is quantised already; load the checkpoint anew")
    if any(p.requires_grad for p in core.parameters()):
        raise SettingError("int8 weights take no gradients; call model.requires_grad_(False) first")
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise SettingError("int8 weights need torchao: pip install 'loopscope[int8]'") from error
    quantize_(core, Int8WeightOnlyConfig(), filter_fn=lambda module, name: isinstance(module, Linear))
    core.quantised = "int8"
    core.source = f"{core.source or core.family}{MARK}"
    return core
