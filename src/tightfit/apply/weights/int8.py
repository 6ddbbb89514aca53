"""Matrices of linear layers stored as torchao's eight-bit integers, with a float32 scale for each row.

torchao's tensor is wrapped in one of ours: it supports linear layers, and little else of what models and LoRA do
with their weights. Linear layers in float32 and bfloat16 are computed by torchao; all other operations dequantize.

torchao multiplies by the integers and scales the sums, which may exceed float16's largest number (65504) where the
results do not. So float16 weights are dequantized.

This module needs torchao, whose import takes seconds: it is imported when a plan asks for int8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torchao.quantization import Int8Tensor, PerRow

from tightfit.apply.weights.quantized_tensor import StoredWeight

__all__ = ["Int8Weight"]


class Int8Weight(StoredWeight):
    """A matrix held as torchao's Int8Tensor: int8 values, and a scale and a zero point (always 0) for each row."""

    held: Any  # Int8Tensor, which has a __tensor_flatten__ of its own

    @staticmethod
    def __new__(cls, held: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
        return StoredWeight.__new__(cls, held, dtype=dtype)

    def __init__(self, held: torch.Tensor, dtype: torch.dtype) -> None:
        self.held = held

    @classmethod
    def store(cls, weight: torch.Tensor, dtype: torch.dtype | None = None) -> Int8Weight:
        """Quantize the matrix `weight` to int8, to be dequantized to `dtype` (default: its own)."""
        return cls(Int8Tensor.from_hp(weight.detach().contiguous(), PerRow()), dtype or weight.dtype)

    def widen(self) -> torch.Tensor:
        wide: torch.Tensor = self.held.dequantize(self.dtype)
        return wide

    def stored_again(self, wide: torch.Tensor) -> Int8Weight:
        return Int8Weight.store(wide)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["held"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inside: dict[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
    ) -> Int8Weight:
        return Int8Weight(inside["held"], dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(weight, Int8Weight) and _suits_torchao(input, weight):
        return F.linear(input, weight.held, bias)
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(input, weight, bias)


def _suits_torchao(values: torch.Tensor, weight: torch.Tensor) -> bool:
    kind = values.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return values.dtype == weight.dtype != torch.float16 and not autocast
