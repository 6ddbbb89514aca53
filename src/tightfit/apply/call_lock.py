"""One call at a time: the lock that each call of a pipeline holds."""

from __future__ import annotations

import threading
from types import TracebackType

__all__ = ["CallLock"]


class CallLock:
    """A reentrant lock that threads of torch's own pass: they run backward passes for a call that waits for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not _is_torchs():
            self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not _is_torchs():
            self._lock.release()


def _is_torchs() -> bool:
    """Whether this thread was not started by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)
