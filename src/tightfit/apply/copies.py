"""Copies of a pipeline or a component that follows a plan: ordinary ones with their own weights, which follow none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from tightfit.apply.method_overrides import own_class

__all__ = ["copying"]


def copying(set_aside: Callable[[], AbstractContextManager[None]]) -> dict[str, Any]:
    """Return the members by which objects are copied and pickled; inside `set_aside()`, the plan is not followed."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:  # noqa: N807
        with set_aside():
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        return copy.copy, (copy.deepcopy(self),)

    def __copy__(self: Any) -> Any:  # noqa: N807 - has the same parts, which follow the plan
        twin: Any = object.__new__(type(self) if isinstance(self, nn.Module) else own_class(self))
        vars(twin).update(vars(self))
        return twin

    return {function.__name__: function for function in (__deepcopy__, __reduce_ex__, __copy__)}
