"""What the stub's libraries count and can be told, while a program runs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["count", "faults", "library", "loaded", "setting"]


def library() -> ctypes.CDLL:
    found = ctypes.CDLL(None)
    found.stub_get.restype = ctypes.c_longlong
    return found


def loaded() -> bool:
    """Whether this process has the stub in place of NVIDIA's libraries."""
    return hasattr(ctypes.CDLL(None), "stub_get")


def count(name: str) -> int:
    """A counter: "races", "hazards", "registered", "taken", "launches", "faults" …; 0 without the stub."""
    return int(library().stub_get(name.encode())) if loaded() else 0


def setting(name: str, value: int) -> None:
    """From now on: "neighbour", or a fault: "fail_malloc", "fail_malloc_times", "fail_register" …"""
    library().stub_set(name.encode(), ctypes.c_longlong(value))


@contextlib.contextmanager
def faults(**settings: int) -> Iterator[None]:
    """With these settings, and none of them afterwards."""
    for name, value in settings.items():
        setting(name, value)
    try:
        yield
    finally:
        for name in settings:
            setting(name, 0)
