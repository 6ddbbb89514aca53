"""Objects that answer some questions differently for a while.

Python looks operators and properties up on the class, so an object's `__call__` or `device` can only be
changed by changing its class. A disguise is a subclass under the same name; taking it off restores the class
that was there, and leaves no attribute behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["override_class_members"]


def override_class_members(target: object, **members: Any) -> Callable[[], None]:
    """Gives `target`'s class these members for this object alone; returns how to take them off again."""
    original = type(target)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    object.__setattr__(target, "__class__", _passing(original)(original.__name__, (original,), names | members))
    held = weakref.ref(target)  # a pipeline is not kept alive by what was done to it

    def reveal() -> None:
        if (alive := held()) is not None:
            object.__setattr__(alive, "__class__", original)

    return reveal


def _passing(original: type) -> type:
    """Whose classes are equal to `original`: diffusers looks types up in lists when pipelines share components."""
    members = {"__eq__": lambda cls, other: other is cls or other is original, "__hash__": lambda cls: hash(original)}
    return type("Disguise", (type(original),), members)
