"""Weights stored in eight bits, as float8 rows or by subclasses: dequantized for each use, then freed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from tightfit.apply.weights.weight_store import plain_parts, rebuilt
from tightfit.plan.eight_bits import DEFAULT_SKIP

__all__ = ["Entry", "Float8Weight", "StoredWeight", "storable"]


Entry = tuple[nn.Module, str, nn.Parameter]


def storable(module: nn.Module, skip: tuple[str, ...] | None, owners: type[nn.Module] = nn.Module) -> Iterator[Entry]:
    """Return owner, name and value of each matrix or kernel of `module`'s `owners` that no pattern in `skip` matches.

    A shared weight that is kept as loaded in one place is kept so in all.
    """
    found = list(_storable(module, skip, owners))
    uses = Counter(id(value) for part in module.modules() for value in part._parameters.values())
    stored = Counter(id(parameter) for _, _, parameter in found)
    return (entry for entry in found if stored[id(entry[2])] == uses[id(entry[2])])


def _storable(module: nn.Module, skip: tuple[str, ...] | None, owners: type[nn.Module]) -> Iterator[Entry]:
    patterns = [re.compile(pattern) for pattern in (DEFAULT_SKIP if skip is None else skip)]
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items() if isinstance(owner, owners) else ():
            if type(parameter) is not nn.Parameter or parameter.ndim < 2 or not parameter.is_floating_point():
                continue
            if parameter.itemsize > 1 and not any(pattern.search(f"{path}.{name}") for pattern in patterns):
                yield owner, name, parameter


@dataclass
class _Writes:
    """Number of writes to a stored weight, shared by all its aliases."""

    count: int = 0


class StoredWeight(torch.Tensor):
    """A weight held as other tensors, which `__tensor_flatten__` names; operations see it dequantized to `dtype`."""

    _writes: _Writes
    _bytes = 0

    @staticmethod
    def __new__(cls, held: torch.Tensor, *_: Any, dtype: torch.dtype) -> Self:
        whole: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=dtype, device=held.device
        )
        whole._writes = _Writes()
        return whole

    def widen(self) -> torch.Tensor:
        """Dequantize the weight to its compute dtype, as a new plain tensor."""
        raise NotImplementedError

    def stored_again(self, wide: torch.Tensor) -> Self:
        """Quantize `wide` to the format of this weight."""
        raise NotImplementedError

    @property
    def written(self) -> bool:
        """Whether it was written to (e.g. a LoRA was fused) since it was stored."""
        return self._writes.count > 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the tensors that hold it, also while their values are offloaded and they are empty."""
        self._bytes = self._bytes or sum(part.nbytes for part in plain_parts(self))
        return self._bytes

    def _write(self, stored: StoredWeight) -> None:
        for part, new in zip(plain_parts(self), plain_parts(stored), strict=True):
            part.copy_(new)
        self._writes.count += 1

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, weight = kwargs or {}, args[0]
        if func in _SAME_FORM and isinstance(weight, StoredWeight) and not _widens(weight, kwargs):
            options = {key: value for key, value in kwargs.items() if key != "dtype"}
            same = rebuilt(weight, [func(part, **options) for part in plain_parts(weight)])
            assert isinstance(same, StoredWeight)  # has the class of `weight`
            if func in _ALIASES:
                same._writes = weight._writes
            return same
        if func is _aten.copy_.default and isinstance(weight, StoredWeight) and _alike(weight, args[1]):
            weight._write(args[1])  # quantizing dequantized values would round them again
            return weight
        stored = [value for value in (*args, *kwargs.values()) if isinstance(value, StoredWeight)]
        wide = {id(value): value.widen() for value in stored}
        result = func(
            *(wide.get(id(value), value) for value in _opened(args)),
            **{key: wide.get(id(value), value) for key, value in kwargs.items()},
        )
        if func._schema.is_mutable and isinstance(weight, StoredWeight):
            weight._write(weight.stored_again(wide[id(weight)]))
            return weight
        return result


_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_SAME_FORM = (*_ALIASES, _aten.clone.default, _aten._to_copy.default)


def _widens(weight: StoredWeight, options: dict[str, Any]) -> bool:
    return options.get("dtype") not in (None, weight.dtype)


def _alike(weight: StoredWeight, other: object) -> bool:
    """Whether `other` has the form, shape and dtype of `weight`."""
    if not isinstance(other, StoredWeight) or (type(other), other.dtype) != (type(weight), weight.dtype):
        return False
    return [(p.dtype, p.shape) for p in plain_parts(other)] == [(p.dtype, p.shape) for p in plain_parts(weight)]


def _opened(args: tuple[Any, ...]) -> list[Any]:
    """Return `args` with the stored weights inside lists (as for `torch.cat`) dequantized."""
    return [
        type(arg)(v.widen() if isinstance(v, StoredWeight) else v for v in arg)
        if isinstance(arg, list | tuple)
        else arg
        for arg in args
    ]


class Float8Weight(StoredWeight):
    """A weight held as float8 values and one float32 scale per row (index of the first dimension)."""

    rows: torch.Tensor  # float8, original shape
    scale: torch.Tensor  # float32, (rows, 1, …)

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Weight:
        return StoredWeight.__new__(cls, rows, dtype=dtype)

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.rows, self.scale = rows, scale

    @classmethod
    def store(cls, weight: torch.Tensor, form: torch.dtype, dtype: torch.dtype | None = None) -> Float8Weight:
        """Quantize `weight` to `form` (float8_e4m3fn or float8_e5m2); `dtype`: to dequantize to (default: its own)."""
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
