"""How each attention backend computes: torch's kernels, chunked attention and third-party packages, if installed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.apply.activations.chunked_attention import chunked_attention
from tightfit.apply.activations.sdpa_patch import Settings, attend_by_torch
from tightfit.schema.attention import BACKENDS

__all__ = ["attend_by", "installed_backends", "is_refusal"]

_REFUSED = (ImportError, NotImplementedError, ValueError, AssertionError)  # raised by packages for unsupported calls

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Settings], torch.Tensor]


def attend_by(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, *, block: int
) -> torch.Tensor:
    """Return `scaled_dot_product_attention` by the backend `name`, with at most `block` bytes of scores if chunked."""
    if name == "chunked":
        return chunked_attention(query, key, value, *settings, block=block)
    return _ATTEND[name](query, key, value, settings)


def installed_backends() -> set[str]:
    """Return the backends whose package can be imported."""
    return {name for name, backend in BACKENDS.items() if backend.package and find_spec(backend.package)}


def is_refusal(name: str, error: Exception) -> bool:
    """Whether `error` means only that the backend `name` does not support a call."""
    if name in BACKENDS and BACKENDS[name].package:
        return isinstance(error, _REFUSED)
    return name in BACKENDS and "No available kernel" in str(error)


def _by_kernel(kernel: SDPBackend) -> Attend:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return attend_by_torch(query, key, value, settings)

    return attend


def _by_xformers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    operations: Any = importlib.import_module("xformers.ops")
    bias = operations.LowerTriangularMask() if settings.causal else None
    if settings.mask is not None:
        bias = _bias(settings.mask, query.dtype, key.shape[-2]).expand(*query.shape[:-1], key.shape[-2])
    parts = (part.transpose(1, 2) for part in (query, key, value))  # (items, positions, heads, width)
    result: torch.Tensor = operations.memory_efficient_attention(*parts, attn_bias=bias, p=0.0, scale=settings.scale)
    return result.transpose(1, 2)


def _by_sage(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> torch.Tensor:
    attend = importlib.import_module("sageattention").sageattn
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


_ATTEND: Mapping[str, Attend] = {
    "torch": attend_by_torch,
    "flash": _by_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": _by_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": _by_kernel(SDPBackend.CUDNN_ATTENTION),
    "math": _by_kernel(SDPBackend.MATH),
    "xformers": _by_xformers,
    "sage": _by_sage,
}
