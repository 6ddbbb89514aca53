"""What a module finds where a weight is that is not on the device: a tensor that fetches it when it is touched.

It answers questions about shape, dtype and device by itself. Any operation that takes it gets the weight, fetched
for that operation alone: so code that looks at weights in an unforeseen way is slower, and never wrong. What is
written into it is kept; what is written into a view of it (a row, say) is not, because the view is of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["LazyWeight", "OffloadedParameter"]

_aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
_ALIASES = (_aten.detach.default, _aten.alias.default)


class LazyWeight:
    """One weight that is away, for all its aliases together: how to fetch it, and what was written into it."""

    def __init__(self, fetch: Callable[[], torch.Tensor]) -> None:
        self._fetch = fetch
        self.written: torch.Tensor | None = None  # stands for the weight from then on

    def take(self, data: torch.Tensor) -> None:
        """`data` stands for the weight from now on; what was written in place comes back like that (`+=`)."""
        if not isinstance(data, OffloadedParameter):
            self.written = data.detach()
        elif data.absence is not self:
            self.written = data.absence.value(data.device)

    def value(self, device: torch.device) -> torch.Tensor:
        return self._fetch() if self.written is None else self.written.to(device)


class OffloadedParameter(torch.Tensor):
    """Stands for a weight of the same shape, strides and dtype on `device`."""

    absence: LazyWeight

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, absence: LazyWeight) -> OffloadedParameter:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )

    def __init__(self, like: torch.Tensor, device: torch.device, absence: LazyWeight) -> None:
        self.absence = absence

    @classmethod
    def standing_for(
        cls, like: torch.Tensor, device: torch.device, fetch: Callable[[], torch.Tensor]
    ) -> OffloadedParameter:
        """A weight laid out as `like`, which `fetch` brings to `device`."""
        return cls(like, device, LazyWeight(fetch))

    # no overriding of Python's torch functions: where they see one, some leave their fast path, and other bits come out
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        return _DATA.__get__(self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        """`weight.data = …`, as module.to(dtype) does."""
        _DATA.__set__(self, data)
        self.absence.take(data)

    def _whole(self) -> torch.Tensor:
        with torch.no_grad():
            value = self.absence.value(self.device).detach().clone(memory_format=torch.preserve_format)
        return nn.Parameter(value, self.requires_grad) if getattr(self, "_is_param", False) else value

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._whole()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return OffloadedParameter(args[0], args[0].device, args[0].absence)
        values: dict[int, torch.Tensor] = {}

        def present(away: OffloadedParameter) -> torch.Tensor:
            if id(away.absence) not in values:
                values[id(away.absence)] = away.absence.value(away.device)
            return values[id(away.absence)]

        result = func(
            *tree_map_only(OffloadedParameter, present, args), **tree_map_only(OffloadedParameter, present, kwargs)
        )
        back = {}
        for away in _written(func, args, kwargs):
            away.absence.written = values[id(away.absence)]
            back[id(away.absence.written)] = away
        return tree_map_only(torch.Tensor, lambda tensor: back.get(id(tensor), tensor), result) if back else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OffloadedParameter]:
    """The weights that are away and that `func` writes into, by its schema."""
    found: list[OffloadedParameter] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += [value for value in tree_leaves(given) if isinstance(value, OffloadedParameter)]
    return found
