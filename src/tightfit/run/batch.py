"""A file of requests → pictures in a folder. What is there already is not drawn again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tightfit.progress import listening
from tightfit.run.batch_lines import BatchRequest, LineDefaults, name_requests, read_lines
from tightfit.run.batch_results import RESULTS, BatchFolder
from tightfit.run.drawer import Drawer, Drawn, Failure, check_requests, planned_request
from tightfit.run.generate import stopwatch
from tightfit.run.models import at_home, find_model, resolve_model
from tightfit.run.run_target import RunOptions
from tightfit.schema.batch import BatchRecord
from tightfit.units import format_seconds

__all__ = ["BatchJob", "BatchReport", "BatchWriter", "DrawRequests", "draw_here", "in_order"]

logger = logging.getLogger("tightfit")

MOST_SHOWN = 20  # failures in a report's text
OnProgress = Callable[[str, int, int], object]  # what is being done, work done, all work


class BatchReport(NamedTuple):
    """What became of the requests of a batch."""

    requests: int
    done_before: int
    drawn: int  # requests
    pictures: int
    seconds: float  # of drawing, with loading
    failures: tuple[tuple[BatchRequest, Failure], ...]
    results: Path
    notes: tuple[str, ...] = ()

    @property
    def pictures_per_minute(self) -> float | None:
        return 60 * self.pictures / self.seconds if self.pictures else None

    def __str__(self) -> str:
        failed = len(self.failures)
        plural = "" if self.requests == 1 else "s"
        counts = f"{self.requests} request{plural}: {self.drawn} drawn, {self.done_before} done before, {failed} failed"
        lines = [counts]
        if self.pictures_per_minute is not None:
            took = f"{self.pictures} pictures in {format_seconds(self.seconds)}"
            lines.append(f"{took}: {self.pictures_per_minute:.3g} pictures per minute")
        shown = self.failures[:MOST_SHOWN]
        lines += [f"line {asked.line}, {asked.name}: {failure.message}" for asked, failure in shown]
        lines += [f"and {failed - MOST_SHOWN} more that failed"] if failed > MOST_SHOWN else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), f"records: {self.results}"])

    def to_mapping(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "requests": self.requests,
            "drawn": self.drawn,
            "done_before": self.done_before,
            "failed": len(self.failures),
            "pictures": self.pictures,
            "seconds": self.seconds,
            "pictures_per_minute": self.pictures_per_minute,
            "failures": [
                {"line": asked.line, "name": asked.name, "type": failure.kind, "message": failure.message}
                for asked, failure in self.failures
            ],
            "notes": list(self.notes),
            "results": str(self.results),
        }


class BatchWriter:
    """Writes what is drawn, with a record of each request, counts it, and reports progress."""

    def __init__(self, folder: BatchFolder, requests: Sequence[BatchRequest], on_progress: OnProgress) -> None:
        self._folder, self._on_progress, self._elapsed = folder, on_progress, stopwatch()
        self._count, self._work = len(requests), sum(asked.work for asked in requests)
        self._work_done, self.drawn, self.pictures = 0, 0, 0
        self.failures: list[tuple[BatchRequest, Failure]] = []
        self.notes: list[str] = []

    def started(self, what: str) -> None:
        """Show what is being done now."""
        self._show(what, 0)

    def step(self, asked: BatchRequest, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a request are done."""
        self._show(asked.name, asked.work * done // max(total, 1))

    def finished(self, asked: BatchRequest, result: Drawn | Failure) -> None:
        """Write the pictures of a request and its record, or the record of its failure. RunError on a full disk."""
        prompt = asked.prompt
        record = BatchRecord(
            name=asked.name,
            digest=asked.digest,
            prompt=prompt.text,
            seed=prompt.seed,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if isinstance(result, Failure):
            self._folder.append(record.model_copy(update={"failure": result.kind, "message": result.message}))
            self.failures.append((asked, result))
            self._work -= asked.work
        else:
            measured = {name: value for name, value in result._asdict().items() if name != "pictures"}
            self._folder.write(asked, result.pictures, record.model_copy(update=measured))
            self.drawn, self.pictures = self.drawn + 1, self.pictures + len(result.pictures)
            self._work_done += asked.work
        self._log(asked, result)
        self._show(asked.name, 0)

    def _log(self, asked: BatchRequest, result: Drawn | Failure) -> None:
        done, left = self.drawn + len(self.failures), "unknown time"
        if self._work_done:
            left = f"about {format_seconds(self._elapsed() * (self._work / self._work_done - 1))}"
        said = result.message if isinstance(result, Failure) else f"{result.seconds:.3g} s on {result.device}"
        logger.info("%s of %s: %s: %s; %s left", done, self._count, asked.name, said, left)

    def _show(self, what: str, work: int) -> None:
        done, failed = self.drawn + len(self.failures), len(self.failures)
        counts = f"{done} of {self._count}{f', {failed} failed' if failed else ''}"
        self._on_progress(f"{counts}: {what}", self._work_done + work, self._work)

    def report(self, requests: int, before: int, results: Path) -> BatchReport:
        """Return what became of all `requests`, of which some were done `before`."""
        return BatchReport(
            requests, before, self.drawn, self.pictures, self._elapsed(), tuple(self.failures), results,
            tuple(self.notes),
        )  # fmt: skip


class DrawRequests(Protocol):
    """Draws requests and hands each result to the writer."""

    def __call__(
        self, model: str | None, options: RunOptions, requests: Sequence[BatchRequest], writer: BatchWriter
    ) -> None: ...


@dataclass
class BatchJob:
    """One `tightfit batch`. Its methods are called in the order of their definition."""

    prompts: Path
    out: Path
    defaults: LineDefaults
    options: RunOptions
    model: str | None = None
    _requests: tuple[BatchRequest, ...] = field(default=(), init=False)

    def prepare(self) -> None:
        """Check all lines and options, before anything is loaded or written."""
        self.options.check()
        requests = read_lines(self.prompts, self.defaults, demo=self.model is None)
        check_requests(find_model(self.model), requests)
        if self.model is not None and at_home(Path(self.model)).exists():
            self.model = str(at_home(Path(self.model)).resolve())  # other processes have other working folders
        self.options = replace(self.options, choices=_with_absolute_paths(self.options.choices))
        _, mark = resolve_model(self.model)
        choices = {name: value for name, value in self.options.choices.items() if name != "device"}
        allow = self.options.limits.allow if self.options.limits is not None else ()
        marks = {"model": mark, "choices": choices, "allow": list(allow), "dtype": self.options.dtype}
        self._requests = name_requests(requests, marks)

    def run(self, draw: DrawRequests, on_progress: OnProgress) -> BatchReport:
        """Draw what is not done; return what became of all. Raises what prevents all of them."""
        with BatchFolder(self.out).opened() as folder:
            total = len(self._requests)
            done = folder.done(self._requests, lambda number: on_progress("checking", number, total))
            left = [asked for asked in self._requests if asked.name not in done]
            writer = BatchWriter(folder, left, on_progress)
            if left:
                draw(self.model, self.options, in_order(left), writer)
            return writer.report(total, len(done), self.out / RESULTS)


def in_order(requests: Sequence[BatchRequest]) -> list[BatchRequest]:
    """Return requests with those alike together, so that each kind is planned once; the largest first."""
    groups: dict[str, list[BatchRequest]] = {}
    for asked in requests:
        groups.setdefault(planned_request(asked).to_json(), []).append(asked)
    largest_first = sorted(groups.values(), key=lambda group: -group[0].work)
    return [asked for group in largest_first for asked in group]


def draw_here(model: str | None, options: RunOptions, requests: Sequence[BatchRequest], writer: BatchWriter) -> None:
    """Draw in this process, one request after another."""
    writer.started("planning and loading")
    drawer = Drawer(model, options)
    with listening(lambda _share, _left: None):  # else planning shows a bar of its own
        for asked in requests:
            writer.finished(asked, drawer.draw(asked, partial(writer.step, asked)))


def _with_absolute_paths(choices: dict[str, Any]) -> dict[str, Any]:
    """`choices` with absolute paths of exported files, which other processes find, too."""
    components = choices.get("components")
    if not isinstance(components, dict):
        return choices
    absolute = {
        name: part | {"exported": str(Path(part["exported"]).resolve())} if part.get("exported") else part
        for name, part in components.items()
    }
    return choices | {"components": absolute}
