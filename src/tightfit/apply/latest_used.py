"""A cache of what was used last: keys that were not used for longest are forgotten."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["MOST_SHAPES", "LatestUsed"]

MOST_SHAPES = 32  # shapes of calls for which plans, footprints and graphs, some megabytes each, are kept in memory

Key = TypeVar("Key")
Value = TypeVar("Value")


class LatestUsed(dict[Key, Value], Generic[Key, Value]):
    """A dictionary of at most MOST_SHAPES values; reading and setting a value use its key."""

    def __getitem__(self, key: Key) -> Value:
        value = super().pop(key)
        super().__setitem__(key, value)
        return value

    def get(self, key: Key, default: None = None) -> Value | None:  # type: ignore[override]
        if key not in self:
            return default
        return self[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > MOST_SHAPES:
            del self[next(iter(self))]
