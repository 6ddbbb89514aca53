"""`torch.autocast("privateuseone")`: as on CUDA, what gains by it is computed in the dtype that was asked for.

The operations are those of `AT_FORALL_LOWER_PRECISION_FP` in aten/src/ATen/autocast_mode.h (torch 2.11 to 2.13) that
networks use. All others run in the dtypes that they are given; on CUDA some of them (norms, sums) become float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["register"]

_aten = torch.ops.aten
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_OPERATIONS = (
    _aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default, _aten.conv1d.default, _aten.conv2d.default,
    _aten.conv3d.default, _aten.convolution.default, _aten.einsum.default, _aten.linear.default, _aten.matmul.default,
    _aten.mm.default, _aten.scaled_dot_product_attention.default,
)  # fmt: skip


def register(rest: torch.library.Library, known: torch.library.Library) -> None:
    """Adds the kernels to two libraries, of all namespaces ("_") and of "aten"; they are gone when those are."""
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    for op in _OPERATIONS:
        known.impl(op, functools.partial(_cast, op), "AutocastPrivateUse1")  # type: ignore[no-untyped-call]


def _cast(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if floating else value

    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        args, kwargs = tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)
