"""Python's garbage collector, which planning makes much work for and hardly any garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["raised_threshold"]


@contextlib.contextmanager
def raised_threshold() -> Iterator[None]:
    """Let the garbage collector run a tenth as often: its collections took up to a third of the time."""
    before = gc.get_threshold()
    gc.set_threshold(10 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
