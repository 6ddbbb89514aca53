"""Whose error it is: a user's function that a call was given may run out of memory itself."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

__all__ = ["raised_by"]

_OURS = "tightfit."


def raised_by(arguments: Iterable[Any], error: BaseException) -> bool:
    """Whether a function among a call's `arguments` raised `error`, and not a component that this function called."""
    codes, inside = set(_codes(arguments)), False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if inside and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            return False
        inside = inside or frame.f_code in codes
    return inside


def _codes(arguments: Iterable[Any]) -> Iterator[CodeType]:
    for each in arguments:
        function = each
        while isinstance(function, functools.partial):
            function = function.func
        if not hasattr(function, "__code__") and callable(function):
            function = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code
