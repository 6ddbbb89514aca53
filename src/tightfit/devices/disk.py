"""File contents → host memory, read by one background thread, bypassing the page cache where possible."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue

import torch

from tightfit.devices.disk_file import SECTOR, DiskFile, Extent, ReadTarget
from tightfit.errors import ModelError, RunError, TightfitError
from tightfit.files import FileState
from tightfit.units import format_bytes

__all__ = ["SECTOR", "DiskReader", "Extent", "Reading"]


class Reading:
    """One request to `DiskReader.read`. It keeps its targets alive until it is finished."""

    def __init__(self, pieces: Sequence[ReadTarget]) -> None:
        self._pieces = pieces
        self._what = f"{len(pieces)} pieces ({format_bytes(sum(piece.extent.size for piece in pieces))})"
        self._begun = self._stopped = False
        self._over = threading.Event()
        self._failure: tuple[type[TightfitError], str, dict[str, object]] | None = None

    @property
    def done(self) -> bool:
        """Whether it is finished: read, failed or cancelled. The targets are not written to any more then."""
        return self._over.is_set()

    def wait(self) -> float:
        """Block until all targets are filled; return the seconds waited.

        Raises, on every call, the ModelError that ended it, or RunError where it was cancelled. After a Ctrl-C here the
        targets are still being written to: `cancel` before they are used for something else.
        """
        start = time.perf_counter()
        self._over.wait()
        if self._failure is not None:
            kind, message, facts = self._failure
            raise kind(message, **facts)
        return time.perf_counter() - start

    def cancel(self) -> None:
        """Stop reading if not finished yet, and return when the targets are not written to any more."""
        self._stopped = True  # set before `_begun` is read; the thread does it in the opposite order
        if self._begun:
            self._over.wait()
        else:
            self._fail(self._cancelled())
            self._end()

    def _cancelled(self) -> RunError:
        return RunError(f"the reading of {self._what} was cancelled", what=self._what)

    def _fail(self, error: Exception) -> None:
        """Store `error` without its traceback, whose frames would keep the targets alive."""
        ours = error if isinstance(error, TightfitError) else RunError(f"{self._what} were not read: {error!r}")
        self._failure = type(ours), str(ours), ours.facts

    def _end(self) -> None:
        self._pieces = ()
        self._over.set()


class DiskReader(AbstractContextManager["DiskReader"]):
    """Reads extents into memory, in the order of the requests, with one thread that is started on demand.

    Files stay open until `close`, which is also called at the end of a `with` block and when the reader is deleted.
    """

    def __init__(self) -> None:
        self._desk = _ReadQueue()
        weakref.finalize(self, self._desk.close)

    def read(self, pieces: Sequence[tuple[Extent, torch.Tensor]]) -> Reading:
        """Start filling `target[:extent.size]` for each pair of extent and target; `Reading.wait` waits for completion.

        A target is a contiguous uint8 tensor on the CPU of at least the extent's size. The read is direct where the
        extent's offset and the target's address are multiples of SECTOR and the target has space for whole sectors,
        which are then written whole. InputError where a target is unsuitable, RunError after `close`.
        """
        reading = Reading([ReadTarget.of(extent, target) for extent, target in pieces])
        self._desk.take(reading)
        return reading

    @property
    def bytes_read(self) -> int:
        """Bytes that the system delivered, including what the last sectors hold beyond their extents."""
        return self._desk.bytes_read

    @property
    def direct_bytes(self) -> int:
        """How many of `bytes_read` bypassed the page cache."""
        return self._desk.direct_bytes

    @property
    def seconds_busy(self) -> float:
        """Seconds that the thread spent on requests, without its idle time."""
        return self._desk.seconds_busy

    @property
    def notes(self) -> Sequence[str]:
        """One sentence for each file that could not be read directly."""
        return [file.note for file in list(self._desk.files.values()) if file.note]

    def close(self) -> None:
        """Cancel unfinished requests, end the thread, close the files."""
        self._desk.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReadQueue:
    """The state that a reader shares with its thread, which must not keep the reader alive."""

    def __init__(self) -> None:
        self.files: dict[tuple[Path, FileState | None], DiskFile] = {}
        self.bytes_read = self.direct_bytes = 0
        self.seconds_busy = 0.0
        self._lock = threading.RLock()  # a signal handler may call `close` during `take`
        self._queue: SimpleQueue[Reading | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, reading: Reading) -> None:
        with self._lock:
            if self._closed:
                raise RunError(f"this disk reader was closed, after {format_bytes(self.bytes_read)}")
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve_all, name="tightfit disk reader", daemon=True)
                self._thread.start()
            self._queue.put(reading)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve_all(self) -> None:
        while (reading := self._queue.get()) is not None:
            self._serve(reading)
        for file in self.files.values():
            file.close()

    def _serve(self, reading: Reading) -> None:
        """Read one request. Errors are stored in the request, so the thread continues."""
        start = time.perf_counter()
        reading._begun = True
        try:
            for piece in reading._pieces:
                self._fill(piece, reading)
        except Exception as error:
            reading._fail(error)
        self.seconds_busy += time.perf_counter() - start
        reading._end()

    def _fill(self, piece: ReadTarget, reading: Reading) -> None:
        self._heed(reading)
        path, done = piece.extent.path, 0
        file = path, piece.extent.state
        try:
            if file not in self.files:
                self.files[file] = DiskFile(*file)
            while done < piece.extent.size:
                count, direct = self.files[file].read(piece, done)
                self.bytes_read += count
                self.direct_bytes += direct
                done += count
                self._heed(reading)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error

    def _heed(self, reading: Reading) -> None:
        """Raise RunError where the reading was cancelled, by itself or by `close`."""
        if reading._stopped or self._closed:
            raise reading._cancelled()
