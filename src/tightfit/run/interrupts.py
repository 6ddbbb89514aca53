"""Ctrl-C that comes at a bad moment is not lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["heeding_interrupts"]


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C interrupts as always; where that was swallowed, what is yielded raises KeyboardInterrupt when called.

    Python swallows what is raised within callbacks of weak references and finalizers, of which a run has millions.
    """
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are not its business
        yield check
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
