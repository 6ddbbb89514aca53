"""Weights stored as eight-bit floats.

Two formats: e4m3 (three bits of mantissa) and e5m2 (two). Each row (output channel) has a float32 scale that
maps its largest magnitude to the format's, so small weights do not fall among the subnormal numbers.
"""

from __future__ import annotations

import torch

from tightfit.apply.weights.eight_bits import StoredWeight, storable

__all__ = ["Float8Weight", "storable"]


class Float8Weight(StoredWeight):
    """A weight held as float8 rows and their scales."""

    rows: torch.Tensor  # float8, original shape
    scale: torch.Tensor  # float32, (rows, 1, …)

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Weight:
        return StoredWeight.__new__(cls, rows, dtype=dtype)

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.rows, self.scale = rows, scale

    @classmethod
    def store(cls, weight: torch.Tensor, form: torch.dtype, dtype: torch.dtype | None = None) -> Float8Weight:
        """`weight` in `form` (float8_e4m3fn or float8_e5m2), to be widened to `dtype` (default: its own)."""
        wide = weight.detach().float()
        largest = wide.abs().amax(dim=tuple(range(1, wide.ndim)), keepdim=True)
        scale = torch.where(largest > 0, largest / torch.finfo(form).max, torch.ones_like(largest))
        return cls((wide / scale).to(form), scale, dtype or weight.dtype)

    def widen(self) -> torch.Tensor:
        return self.rows.float().mul_(self.scale).to(self.dtype)

    def stored_again(self, wide: torch.Tensor) -> Float8Weight:
        return Float8Weight.store(wide, self.rows.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inside: dict[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
    ) -> Float8Weight:
        return Float8Weight(inside["rows"], inside["scale"], dtype)
