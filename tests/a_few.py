"""Tests that run for many things alike: for a few of them in `make test`, for all others in `make test-slow`."""

from __future__ import annotations

import hashlib
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


def mark_one_in(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of tests that are marked `one_in(n)` slow, but for one in n.

    They are chosen by hashes of their names, because every n-th in order may always have the same value of a parameter.
    """
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        mark = cases[0].get_closest_marker("one_in")
        assert mark is not None
        cases.sort(key=lambda case: hashlib.sha256(case.nodeid.encode()).digest())
        for index, case in enumerate(cases):
            if index % mark.args[0]:
                case.add_marker(pytest.mark.slow)
