"""Tests that run for many things alike: for a few of them in `make test`, for all others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def a_few(values: Iterable[Any], *soon: str) -> list[Any]:
    """`values` as parameters of a test, by their names; those that are not named in `soon` are marked slow."""
    names = {str(getattr(value, "name", value)): value for value in values}
    assert names.keys() >= set(soon), set(soon) - names.keys()
    return [
        pytest.param(value, id=name, marks=() if name in soon else pytest.mark.slow) for name, value in names.items()
    ]
