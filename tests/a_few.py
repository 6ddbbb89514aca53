"""What a test is done with, many times alike: with a few in `make test`, with all others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def a_few(values: Iterable[Any], *soon: str) -> list[Any]:
    """`values` as parameters, by their names; those that are not among `soon` are slow."""
    names = {str(getattr(value, "name", value)): value for value in values}
    assert names.keys() >= set(soon), set(soon) - names.keys()
    return [
        pytest.param(value, id=name, marks=() if name in soon else pytest.mark.slow) for name, value in names.items()
    ]
