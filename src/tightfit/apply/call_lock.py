"""One call at a time: the lock that each call of a pipeline holds."""

from __future__ import annotations

import threading
from types import TracebackType

from tightfit.errors import RunError

__all__ = ["CallLock"]

_waiting: dict[int, CallLock] = {}  # by thread
_deciding = threading.Lock()  # held while a thread looks whether it may wait


class CallLock:
    """A reentrant lock that threads of torch's own pass: they run backward passes for a call that waits for them.

    RunError where a thread would wait for one that waits for it: two pipelines' callbacks that call the other one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None  # the thread
        self._depth = 0  # of its calls

    def __enter__(self) -> None:
        if _is_torchs():
            return
        if not self._lock.acquire(blocking=False):
            self._wait(threading.get_ident())
        self._holder, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not _is_torchs():
            self._depth -= 1
            if not self._depth:
                self._holder = None
            self._lock.release()

    def _wait(self, me: int) -> None:
        with _deciding:
            lock: CallLock | None = self
            while lock is not None and lock._holder is not None:
                if lock._holder == me:
                    name = threading.current_thread().name
                    raise RunError(
                        f"two pipelines call each other, {name} and another thread: each would wait for ever"
                    )
                lock = _waiting.get(lock._holder)
            _waiting[me] = self
        try:
            self._lock.acquire()
        finally:
            del _waiting[me]


def _is_torchs() -> bool:
    """Whether this thread was not started by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)
