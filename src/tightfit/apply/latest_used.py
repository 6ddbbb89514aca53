"""A cache of what was used last: keys that were not used for longest are forgotten."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["MOST_SHAPES", "LatestUsed"]

MOST_SHAPES = 32  # shapes of calls for which plans, footprints and graphs, some megabytes each, are kept in memory

Key = TypeVar("Key")
Value = TypeVar("Value")


class LatestUsed(Generic[Key, Value]):
    """At most `most` values, by key; `get` and setting a value use a key."""

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        self._values: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        if key in self._values:
            self._values[key] = self._values.pop(key)
        return self._values.get(key)

    def __setitem__(self, key: Key, value: Value) -> None:
        self._values.pop(key, None)
        self._values[key] = value
        while len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def pop(self, key: Key) -> None:
        """Forget a key, if it is known."""
        self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)
