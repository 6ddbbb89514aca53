"""torch's table of native functions: which operations have a CUDA kernel, and which are pointwise."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import torch
import yaml

__all__ = ["cuda_kernels", "pointwise_kernels"]

# kernels that use a TensorIterator, although the table does not say so
_UNSTRUCTURED = (
    "_prelu_kernel", "abs.out", "angle", "angle.out", "complex.out", "floor_divide", "floor_divide.out", "hardswish",
    "isnan", "logical_and.out", "logical_not.out", "logical_or.out", "logical_xor.out", "logit",
    "logit.out", "polar.out", "relu", "rsub.Tensor", "where.self", "where.self_out",
)  # fmt: skip


def cuda_kernels() -> list[torch._ops.OpOverload]:
    """Return the operations for which CUDA has its own kernel."""
    table = _table()
    names = [name for name, entry in table.items() if _on_cuda(table[entry.get("structured_delegate", name)])]
    return [op for op in map(_overload, names) if op is not None]


@functools.cache
def pointwise_kernels() -> frozenset[torch._ops.OpOverload]:
    """Return the operations whose output strides are chosen by a TensorIterator."""
    table = _table()
    names = [name for name, entry in table.items() if _iterates(table[entry.get("structured_delegate", name)])]
    found = map(_overload, (*names, *_UNSTRUCTURED))
    return frozenset(op for op in found if op is not None and op is not torch.ops.aten.index.Tensor)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = (files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    return {entry["func"].partition("(")[0]: entry for entry in yaml.load(text, Loader=yaml.CSafeLoader)}


def _on_cuda(entry: dict[str, Any]) -> bool:
    named = any("CUDA" in keys.split(", ") for keys in entry.get("dispatch") or {})
    return named or "ufunc_inner_loop" in entry  # generated for both CPU and CUDA


def _iterates(entry: dict[str, Any]) -> bool:
    return entry.get("structured_inherits") == "TensorIteratorBase"


def _overload(name: str) -> torch._ops.OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None
