"""Attention by third-party packages, if installed: xFormers, and SageAttention, which is lossy."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch.nn import functional as F

from tightfit.apply.activations.sdpa_patch import Settings

__all__ = ["PACKAGES", "attend_by_package"]

PACKAGES = {"xformers": "xformers", "sage": "sageattention"}  # name of the implementation → import name


def attend_by_package(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Return `scaled_dot_product_attention` by "xformers" or "sage"; four-dimensional tensors, without dropout."""
    attend = _by_xformers if name == "xformers" else _by_sage
    return attend(query, key, value, settings)


def _by_xformers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    operations: Any = importlib.import_module(f"{PACKAGES['xformers']}.ops")
    bias = operations.LowerTriangularMask() if settings.causal else None
    if settings.mask is not None:
        bias = _bias(settings.mask, query.dtype, key.shape[-2]).expand(*query.shape[:-1], key.shape[-2])
    parts = (part.transpose(1, 2) for part in (query, key, value))  # (items, positions, heads, width)
    result: torch.Tensor = operations.memory_efficient_attention(*parts, attn_bias=bias, p=0.0, scale=settings.scale)
    return result.transpose(1, 2)


def _by_sage(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    attend = importlib.import_module(PACKAGES["sage"]).sageattn
    said = {"tensor_layout": "HND", "is_causal": settings.causal, "sm_scale": settings.scale}
    result: torch.Tensor = attend(query, key, value, **said)
    return result


def _bias(mask: torch.Tensor, dtype: torch.dtype, keys: int) -> torch.Tensor:
    """`mask` as an additive bias whose rows begin at multiples of 8 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
    mask = mask.to(dtype).expand(*mask.shape[:-1], keys)
    if mask.stride(-1) == 1 and all(step % 8 == 0 for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, 8 - keys % 8))[..., :keys]
