"""Group norm as torch puts it together on CUDA: of maps that have channels first, whatever they were before.

torch (aten/src/ATen/native/group_norm.cpp, 2.11 to 2.13) lets the CPU and devices of others keep channels last; 2.14
copies what CUDA's kernel cannot take after it has made the result, and 2.15 keeps channels last on CUDA too
(kernels.py and layouts.py know). Where all numbers are kept, the layout is the CPU's, so that they are the CPU's to the
last bit; a convolution's is CUDA's there too, as it decides what the next one copies.
"""

from __future__ import annotations

import math

import torch
from torch._prims_common import suggest_memory_format

from tightfit.pretend.storage import store_of

__all__ = ["group_norm"]

_COPIES_FIRST = torch.__version__ < "2.14"


def group_norm(
    maps: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`torch.group_norm` on a card, or on one that plays a computer's own CPU."""
    card = store_of(maps).card
    if card.values == "real" or card.accelerator.is_cpu:
        maps = maps.contiguous(memory_format=suggest_memory_format(maps))
    elif _COPIES_FIRST:
        maps = maps.contiguous()
    batch, channels, *spatial = maps.shape
    sizes = (batch, channels, math.prod(spatial), groups, eps)
    normed: torch.Tensor = torch.native_group_norm(maps, weight, bias, *sizes)[0]
    return normed
