"""What a module finds where a weight is that is not on the device: a tensor that fetches it when it is touched.

It answers questions about shape, dtype and device by itself. Any operation that takes it gets the weight, fetched
for that operation alone: so code that looks at weights in an unforeseen way is slower, and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["AwayWeight"]

_aten = torch.ops.aten
_GIVE_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ALIASES = (_aten.detach.default, _aten.alias.default)


class Absence:
    """One weight that is away, for all its aliases together: how to fetch it, and what was written into it."""

    def __init__(self, fetch: Callable[[], torch.Tensor]) -> None:
        self._fetch = fetch
        self.written: torch.Tensor | None = None  # stands for the weight from then on

    def take(self, data: torch.Tensor) -> None:
        """`data` stands for the weight from now on; what was written in place comes back like that (`+=`)."""
        if not isinstance(data, AwayWeight):
            self.written = data.detach()
        elif data.absence is not self:
            self.written = data.absence.value(data.device)

    def value(self, device: torch.device) -> torch.Tensor:
        return self._fetch() if self.written is None else self.written.to(device)


class AwayWeight(torch.Tensor):
    """Stands for a weight of the same shape, strides and dtype on `device`."""

    absence: Absence

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, absence: Absence) -> AwayWeight:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )

    def __init__(self, like: torch.Tensor, device: torch.device, absence: Absence) -> None:
        self.absence = absence

    @classmethod
    def standing_for(cls, like: torch.Tensor, device: torch.device, fetch: Callable[[], torch.Tensor]) -> AwayWeight:
        """A weight laid out as `like`, which `fetch` brings to `device`."""
        return cls(like, device, Absence(fetch))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == _GIVE_DATA and isinstance(args[0], AwayWeight):  # `weight.data = …`, as module.to(dtype) does
            args[0].absence.take(args[1])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in _ALIASES and isinstance(first, AwayWeight):
            return AwayWeight(first, first.device, first.absence)
        values: dict[int, torch.Tensor] = {}

        def present(away: AwayWeight) -> torch.Tensor:
            if id(away.absence) not in values:
                values[id(away.absence)] = away.absence.value(away.device)
            return values[id(away.absence)]

        args, kwargs = tree_map_only(AwayWeight, present, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(first, AwayWeight):
            first.absence.written = values[id(first.absence)]
            return first
        return result
