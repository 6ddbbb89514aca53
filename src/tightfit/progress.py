"""How far something is that takes long, told to whoever listens: a command, or a bar like those of diffusers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from tightfit.units import format_seconds

__all__ = ["ProgressTracker", "Told", "listening", "showing"]

Told = Callable[[float, float], object]  # the share that is done, and the seconds that are left
DELAY = 2.0  # seconds until a bar is shown

_listener: ContextVar[Told | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(told: Told) -> Iterator[None]:
    """What is done inside is told to `told`."""
    token = _listener.set(told)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def showing(what: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """A bar with the time left for what is done inside, once it takes longer than a moment.

    With a pipeline's `settings` for its own bars (`set_progress_bar_config`). None if somebody listens already.
    """
    if _listener.get() is not None:
        yield
        return
    from tqdm.auto import tqdm

    usual = {"total": 100, "desc": what, "delay": DELAY, "leave": False, "mininterval": 0, "miniters": 1}
    with tqdm(**usual | {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| {postfix}"} | dict(settings)) as bar:

        def told(share: float, left: float) -> None:
            bar.set_postfix_str(f"about {format_seconds(left)} left", refresh=False)
            bar.update(int(100 * share) - bar.n)

        with listening(told):
            yield


class ProgressTracker:
    """ProgressTracker of known parts; what they are measured in is all the same."""

    def __init__(self, size: float) -> None:
        self._begun, self._size, self._done = time.monotonic(), size, 0.0

    def expect(self, size: float) -> None:
        """So much more is to be done than was known."""
        self._size += size

    def did(self, size: float) -> None:
        """So much of it is done."""
        self._done = min(self._done + size, self._size)
        told = _listener.get()
        if told is not None and self._done:
            share = self._done / self._size
            told(share, (time.monotonic() - self._begun) * (1 - share) / share)
