"""Progress of long operations, reported to the current listener: a command, or a bar like those of diffusers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from tightfit.units import format_seconds

__all__ = ["ProgressCallback", "ProgressTracker", "listening", "showing"]

ProgressCallback = Callable[[float, float], object]  # called with the fraction done and the seconds left
DELAY = 2.0  # seconds before a bar is shown

_listener: ContextVar[ProgressCallback | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(on_progress: ProgressCallback) -> Iterator[None]:
    """Report progress inside the block to `told`."""
    token = _listener.set(on_progress)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def showing(what: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Show a bar with the time left for the work inside the block, once it takes longer than DELAY.

    `settings` are a pipeline's for its own bars (`set_progress_bar_config`). No bar is shown if there is a listener.
    """
    if _listener.get() is not None:
        yield
        return
    from tqdm.auto import tqdm

    usual = {"total": 100, "desc": what, "delay": DELAY, "leave": False, "mininterval": 0, "miniters": 1}
    with tqdm(**usual | {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| {postfix}"} | dict(settings)) as bar:

        def on_progress(share: float, left: float) -> None:
            bar.set_postfix_str(f"about {format_seconds(left)} left", refresh=False)
            bar.update(int(100 * share) - bar.n)

        with listening(on_progress):
            yield


class ProgressTracker:
    """Progress of work whose parts have known sizes, in any unit."""

    def __init__(self, size: float) -> None:
        self._begun, self._size, self._done = time.monotonic(), size, 0.0

    def expect(self, size: float) -> None:
        """Add `size` to the work to be done."""
        self._size += size

    def did(self, size: float) -> None:
        """Add `size` to the work done, and report the progress to the listener."""
        self._done = min(self._done + size, self._size)
        on_progress = _listener.get()
        if on_progress is not None and self._done:
            share = self._done / self._size
            on_progress(share, (time.monotonic() - self._begun) * (1 - share) / share)
