"""A progress bar with the time left, and for those who watch, bytes and phase as they change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tightfit.apply.fitting import Fitted
from tightfit.run.generate import Progress as Told
from tightfit.units import format_bytes

__all__ = ["showing_progress"]


@contextlib.contextmanager
def showing_progress(fitted: Fitted, *, watch: bool) -> Iterator[Told]:
    """Yields what a run tells its steps to. Shown on stderr, and only where that is a terminal, unless `watch`."""
    columns: list[ProgressColumn] = [TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    if watch:
        columns.append(_LiveColumn(fitted))
    console = Console(stderr=True, force_terminal=True if watch else None)
    with Progress(*columns, console=console, transient=not watch, refresh_per_second=8) as bar:
        task = bar.add_task("denoising", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _LiveColumn(ProgressColumn):
    """Bytes on the device and in RAM, at this moment."""

    max_refresh = 0.1

    def __init__(self, fitted: Fitted) -> None:
        self._fitted = fitted
        super().__init__()

    def render(self, task: Task) -> Text:
        now = self._fitted.live()
        return Text(
            f"{now.phase or 'ready'}: weights {format_bytes(now.weights)}, activations {format_bytes(now.activations)}, "
            f"peak {format_bytes(now.peak_bytes)}, RSS {format_bytes(now.rss_bytes)}"
        )
