"""File contents → host memory, read by one background thread, bypassing the page cache where possible.

A direct read (O_DIRECT) uses no page cache, which would count against a control group's limit, and hardly any CPU.
Linux requires offsets, addresses and sizes in multiples of the disk's sector, of 4096 bytes at most (open(2),
"O_DIRECT").
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from tightfit.errors import InputError, ModelError, RunError, TightfitError
from tightfit.files import BINARY, FileState, read_at
from tightfit.units import format_bytes

__all__ = ["SECTOR", "DiskReader", "Extent", "Reading"]

SECTOR = 4096
# Bytes per system call, for which cancelling waits. From 4 MiB on the rate is the same, but each call ends with a
# wait for the interpreter lock: 5 ms where another thread is busy in Python.
STEP = 16 * 2**20
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # to open a FIFO would wait for a writer; for files it means nothing


@dataclass(frozen=True)
class Extent:
    """`size` bytes of the file `path`, from byte `offset` on."""

    path: Path
    offset: int
    size: int
    state: FileState | None = None  # of the file whose bytes are meant; None: whatever it is when it is opened


@dataclass(frozen=True)
class ReadTarget:
    """An extent and its target memory: `view` has the extent's size, rounded up to whole sectors for a direct read."""

    extent: Extent
    view: memoryview
    direct: bool


class DiskFile:
    """A file that is opened once, and must not be changed until `close`, nor since it was in the `expected` state.

    If the path is replaced by another file later, the opened one is still read. OSError where it cannot be opened or
    read, ModelError where it ended too early or was changed.
    """

    note: str | None = None  # why it is not read with O_DIRECT; None where it is

    def __init__(self, path: Path, expected: FileState | None = None) -> None:
        self._path = path
        self._buffered = os.open(path, os.O_RDONLY | BINARY | NO_WAIT)
        self._expected = expected or FileState.of(os.fstat(self._buffered))
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            try:  # through the handle: the path may refer to another file by now
                self._direct = os.open(f"/proc/self/fd/{self._buffered}", os.O_RDONLY | os.O_DIRECT | NO_WAIT)
            except OSError as error:
                self._give_up_direct(error)

    def close(self) -> None:
        for handle in (self._buffered, self._direct):
            if handle is not None:
                os.close(handle)

    def read(self, piece: ReadTarget, done: int) -> tuple[int, int]:
        """Continue reading `piece` after `done` bytes; return the bytes read, and how many of them directly."""
        view, extent = piece.view[done : done + STEP], piece.extent
        self._check()  # before the read: it may be no file by now
        count, direct = self._read_some(view, extent.offset + done, direct=piece.direct and done % SECTOR == 0)
        self._check()  # after the read: so the bytes are those that were expected
        if count == 0:
            raise ModelError(
                f"{self._path} ends after {self._expected.size} bytes: of {extent.size} from {extent.offset} on, only "
                f"{done} came", path=str(self._path), offset=extent.offset, size=extent.size, came=done,
            )  # fmt: skip
        return count, direct

    def _read_some(self, view: memoryview, offset: int, *, direct: bool) -> tuple[int, int]:
        """Make one system call, or two where the first shows that the file system refuses direct reads."""
        if direct and self._direct is not None:
            try:
                count = read_at(self._direct, view, offset)
                return count, count
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
                os.close(self._direct)
                self._give_up_direct(error)
        count = read_at(self._buffered, view, offset)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._buffered, offset, count, os.POSIX_FADV_DONTNEED)
        return count, 0

    def _check(self) -> None:
        if not (then := self._expected).is_still(now := FileState.of(os.fstat(self._buffered))):
            raise ModelError(
                f"{self._path} was changed while it was in use: it had {then}, now it has {now}: load the model again",
                path=str(self._path), inode=then.inode, size=then.size, size_now=now.size,
            )  # fmt: skip

    def _give_up_direct(self, error: OSError) -> None:
        self._direct = None
        self.note = f"{self._path} is read through the page cache: direct reads are refused ({error.strerror})."


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
        reading = Reading([_piece(extent, target) for extent, target in pieces])
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


def _piece(extent: Extent, target: torch.Tensor) -> ReadTarget:
    """Return the read target for `extent`; InputError where `target` is unsuitable."""
    bytes_there = target.dtype == torch.uint8 and target.device.type == "cpu" and target.is_contiguous()
    if not bytes_there or extent.offset < 0 or not 0 <= extent.size <= target.numel():
        raise InputError(
            f"{extent.size} bytes from {extent.offset} on, of {extent.path}, need a contiguous uint8 tensor on the CPU "
            f"with room for them, not {target.dtype} on {target.device}, shape {tuple(target.shape)}, strides "
            f"{target.stride()}",
            path=str(extent.path), offset=extent.offset, size=extent.size, room=target.numel(),
        )  # fmt: skip
    sectors = -(-extent.size // SECTOR) * SECTOR
    direct = extent.offset % SECTOR == target.data_ptr() % SECTOR == 0 and sectors <= target.numel()
    return ReadTarget(extent, target.view(-1).numpy().data[: sectors if direct else extent.size], direct)
