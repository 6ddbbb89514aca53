"""Weights stored in eight bits: a quarter of float32, half of bfloat16, widened for each use and forgotten.

Two formats: e4m3 (three bits of mantissa) and e5m2 (two). Each row (output channel) has a float32 scale that
maps its largest magnitude to the format's, so small weights do not fall among the subnormal numbers.

A stored weight is a tensor that says it has the compute dtype and the original shape, so nothing that asks
`weight.dtype` or `model.dtype` notices; whatever operation takes it gets it widened. Copies between devices
move the eight-bit form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.plan.streaming import DEFAULT_SKIP

__all__ = ["Float8Weight", "storable"]


def storable(module: nn.Module, skip: tuple[str, ...] | None) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Owner, name and value of each matrix or kernel of `module` that no pattern in `skip` matches."""
    patterns = [re.compile(pattern) for pattern in (DEFAULT_SKIP if skip is None else skip)]
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if type(parameter) is not nn.Parameter or parameter.ndim < 2 or not parameter.is_floating_point():
                continue
            if parameter.itemsize > 1 and not any(pattern.search(f"{path}.{name}") for pattern in patterns):
                yield owner, name, parameter


@dataclass
class _Writes:
    """How often a stored weight was written into, counted for all its aliases together."""

    count: int = 0


class Float8Weight(torch.Tensor):
    """A weight held as eight-bit rows and their scales; every operation sees it widened to `dtype`."""

    rows: torch.Tensor  # float8, original shape
    scale: torch.Tensor  # float32, (rows, 1, …)

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Weight:
        return torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.rows, self.scale, self._writes = rows, scale, _Writes()

    @classmethod
    def store(cls, weight: torch.Tensor, form: torch.dtype, dtype: torch.dtype | None = None) -> Float8Weight:
        """`weight` in `form` (float8_e4m3fn or float8_e5m2), to be widened to `dtype` (default: its own)."""
        wide = weight.detach().float()
        largest = wide.abs().amax(dim=tuple(range(1, wide.ndim)), keepdim=True)
        scale = torch.where(largest > 0, largest / torch.finfo(form).max, torch.ones_like(largest))
        return cls((wide / scale).to(form), scale, dtype or weight.dtype)

    def widen(self) -> torch.Tensor:
        """The weight in its compute dtype, a new plain tensor."""
        return self.rows.float().mul_(self.scale).to(self.dtype)

    @property
    def written(self) -> bool:
        """Whether something was written into it (a LoRA fused, say) since it was stored."""
        return self._writes.count > 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.rows.nbytes + self.scale.nbytes

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inside: dict[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
    ) -> Float8Weight:
        return Float8Weight(inside["rows"], inside["scale"], dtype)

    def _like(self, rows: torch.Tensor, scale: torch.Tensor) -> Float8Weight:
        return Float8Weight(rows, scale, self.dtype)

    def _write(self, wide: torch.Tensor) -> None:
        stored = Float8Weight.store(wide, self.rows.dtype)
        self.rows.copy_(stored.rows)
        self.scale.copy_(stored.scale)
        self._writes.count += 1

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, weight = kwargs or {}, args[0]
        if func in _SAME_FORM and isinstance(weight, Float8Weight) and not _widens(weight, kwargs):
            options = {key: value for key, value in kwargs.items() if key != "dtype"}
            same = weight._like(func(weight.rows, **options), func(weight.scale, **_without_format(options)))
            if func in _ALIASES:
                same._writes = weight._writes
            return same
        stored = [value for value in (*args, *kwargs.values()) if isinstance(value, Float8Weight)]
        wide = {id(value): value.widen() for value in stored}
        result = func(
            *(wide.get(id(value), value) for value in _opened(args)),
            **{key: wide.get(id(value), value) for key, value in kwargs.items()},
        )
        if func._schema.is_mutable and isinstance(weight, Float8Weight):
            weight._write(wide[id(weight)])
            return weight
        return result


_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_SAME_FORM = (*_ALIASES, _aten.clone.default, _aten._to_copy.default)


def _widens(weight: Float8Weight, options: dict[str, Any]) -> bool:
    return options.get("dtype") not in (None, weight.dtype)


def _without_format(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "memory_format"}


def _opened(args: tuple[Any, ...]) -> list[Any]:
    """`args` with the stored weights inside lists (`torch.cat`, say) widened too."""
    return [
        type(arg)(v.widen() if isinstance(v, Float8Weight) else v for v in arg)
        if isinstance(arg, list | tuple)
        else arg
        for arg in args
    ]
