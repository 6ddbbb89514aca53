"""A progress bar with the time left, and Ctrl-C that is never lost."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tightfit.apply.fitting import Fitted
from tightfit.run.generate import Progress as Told
from tightfit.units import format_bytes

__all__ = ["heeding_interrupts", "showing_progress"]


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


@contextlib.contextmanager
def showing_progress(fitted: Fitted, *, watch: bool) -> Iterator[Told]:
    """Yields what a run tells its steps to, and shows them on stderr where that is a terminal.

    Where it is none, only those who `watch` are shown anything: plain lines, one for each step and one at the end.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with _Bar(fitted if watch else None, console) as bar:
            task = bar.add_task("denoising", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    def told(done: int, total: int) -> None:
        if watch:
            print(f"step {done} of {total}, {_numbers(fitted)}", file=sys.stderr)

    yield told
    if watch:
        print(_numbers(fitted), file=sys.stderr)


class _Bar(Progress):
    """Steps and the time left, and the bytes of `watched` below them."""

    def __init__(self, watched: Fitted | None, console: Console) -> None:
        self._watched = watched
        columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=watched is None, refresh_per_second=8)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self._watched is not None:
            yield Text(_numbers(self._watched))


def _numbers(fitted: Fitted) -> str:
    """Phase, bytes on the device and bytes in RAM, at this moment."""
    now = fitted.live()
    weights, activations, peak = map(format_bytes, (now.weights, now.activations, now.peak_bytes))
    rss = format_bytes(now.rss_bytes)
    return f"{now.phase or 'ready'}: weights {weights}, activations {activations}, peak {peak}, RSS {rss}"
