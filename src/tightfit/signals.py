"""Signals that end a command: TERM, HUP and INT → one line on stderr, no unfinished file, exit code 128 + number.

The handler ends the process itself. An exception would get lost where Python and libraries swallow them: in finalizers
and callbacks of weak references, of which a run has millions, and while modules are imported.

What this imports is loaded by then, or takes no time, so that it is in force before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Protocol

__all__ = ["before_end", "end_on_signals", "end_process", "ignore_signals", "keeping_handlers", "started", "unfinished"]


class Process(Protocol):
    """A process, as psutil has it: `kill` does nothing to another one that got its number since, but raises."""

    def kill(self) -> object: ...


unfinished: set[str] = set()  # paths of files that are deleted where a signal ends the process
started: list[Process] = []  # processes that are killed then, which would end late, or not at all
before_end: list[Callable[[], object]] = []  # what else is done then, in no time
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def end_on_signals() -> None:
    """End this process at the signals that it does not ignore (as below nohup, or in the background of a shell)."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def ignore_signals() -> None:
    """Ignore the signals from now on: everything is done."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Put back the handlers after the block, in which a library may set its own."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    ignore_signals()
    name = signal.Signals(number).name
    end_process(128 + number, name, f"interrupted by {name}: no half-written file is left")


def end_process(code: int, kind: str, message: str, *, silent: bool = False) -> NoReturn:
    """End this process at once, with `message` on stderr; with --json also on stdout, as an error of this `kind`.

    `silent`: without any message, as another process says it.
    """
    for path in list(unfinished):
        with contextlib.suppress(OSError):
            os.unlink(path)
    for process in list(started):
        with contextlib.suppress(Exception):  # it has ended
            process.kill()
    for each in list(before_end):
        with contextlib.suppress(Exception):
            each()
    if silent:
        os._exit(code)
    clear = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # the line of a progress bar, which hides the cursor
    _write(2, f"{clear}tightfit: {message}\n")
    if "--json" in sys.argv:
        _write(1, f'{{"error": {{"type": "{kind}", "message": "{message}"}}}}\n')
    os._exit(code)


def _write(handle: int, text: str) -> None:
    with contextlib.suppress(OSError):  # closed, or on a full disk
        os.write(handle, text.encode())
