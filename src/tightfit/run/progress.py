"""A progress bar with the time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tightfit.apply.fitting import Fitted
from tightfit.run.generate import Progress as ProgressCallback
from tightfit.units import format_bytes

__all__ = ["showing_progress"]


@contextlib.contextmanager
def showing_progress(fitted: Fitted, *, watch: bool) -> Iterator[ProgressCallback]:
    """Yield a callback (steps done, total steps) that shows a bar on stderr if that is a terminal.

    Otherwise nothing is shown, or with `watch` plain lines: one for each step and one at the end.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with _Bar(fitted if watch else None, console) as bar:
            task = bar.add_task("denoising", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    def on_progress(done: int, total: int) -> None:
        if watch:
            print(f"step {done} of {total}, {_numbers(fitted)}", file=sys.stderr)

    yield on_progress
    if watch:
        print(_numbers(fitted), file=sys.stderr)


class _Bar(Progress):
    """A bar of steps with the time left, and the live bytes of `watched` below it."""

    def __init__(self, watched: Fitted | None, console: Console) -> None:
        self._watched = watched
        columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=watched is None, refresh_per_second=8)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self._watched is not None:
            yield Text(_numbers(self._watched))


def _numbers(fitted: Fitted) -> str:
    """Current phase, bytes on the device, and the RAM that this process holds, as text."""
    now = fitted.live()
    weights, activations, peak = map(format_bytes, (now.weights, now.activations, now.peak_bytes))
    rss = format_bytes(now.rss_bytes)
    return f"{now.phase or 'ready'}: weights {weights}, activations {activations}, peak {peak}, RAM {rss}"
