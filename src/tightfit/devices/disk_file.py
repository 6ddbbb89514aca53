"""Files, of which parts are read into host memory: directly (O_DIRECT), or from the page cache.

A direct read uses no page cache, which would count against a control group's limit, and hardly any CPU. Linux requires
offsets, addresses and sizes in multiples of the disk's sector, of 4096 bytes at most (open(2), "O_DIRECT").
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tightfit.errors import InputError, ModelError
from tightfit.files import BINARY, FileState, read_at

__all__ = ["SECTOR", "STEP", "DiskFile", "Extent", "ReadTarget"]

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

    @classmethod
    def of(cls, extent: Extent, target: torch.Tensor) -> ReadTarget:
        """Return the read target for `extent`; InputError where `target` is unsuitable."""
        bytes_there = target.dtype == torch.uint8 and target.device.type == "cpu" and target.is_contiguous()
        if not bytes_there or extent.offset < 0 or not 0 <= extent.size <= target.numel():
            raise InputError(
                f"{extent.size} bytes from {extent.offset} on, of {extent.path}, need a contiguous uint8 tensor on the "
                f"CPU with room for them, not {target.dtype} on {target.device}, shape {tuple(target.shape)}, strides "
                f"{target.stride()}",
                path=str(extent.path), offset=extent.offset, size=extent.size, room=target.numel(),
            )  # fmt: skip
        sectors = -(-extent.size // SECTOR) * SECTOR
        direct = extent.offset % SECTOR == target.data_ptr() % SECTOR == 0 and sectors <= target.numel()
        return cls(extent, target.view(-1).numpy().data[: sectors if direct else extent.size], direct)


class DiskFile:
    """A file that is opened once, and must not be changed until `close`, nor since it was in the `expected` state.

    If the path is replaced by another file later, the opened one is still read. OSError where it cannot be opened or
    read, ModelError where it ended too early or was changed. With `cached`, what is in the page cache is copied from
    there, and stays there; else it is read from the disk again where that can be read directly.
    """

    note: str | None = None  # why it is not read with O_DIRECT; None where it is

    def __init__(self, path: Path, expected: FileState | None = None, *, cached: bool = False) -> None:
        self._path = path
        self._buffered = os.open(path, os.O_RDONLY | BINARY | NO_WAIT)
        self._expected = expected or FileState.of(os.fstat(self._buffered))
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            try:  # through the handle: the path may refer to another file by now
                self._direct = os.open(f"/proc/self/fd/{self._buffered}", os.O_RDONLY | os.O_DIRECT | NO_WAIT)
            except OSError as error:
                self._give_up_direct(error)
        self._cached = cached and hasattr(os, "RWF_NOWAIT") and hasattr(os, "posix_fadvise")
        self._cache: int | None = None

    def close(self) -> None:
        for handle in (self._buffered, self._direct, self._cache):
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
        if self._cached and (count := self._read_cached(view, offset)):
            return count, 0
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

    def _read_cached(self, view: memoryview, offset: int) -> int:
        """Copy bytes from the page cache until one is not there; return their count.

        A read of absent pages makes the kernel begin to read them all, so each read asks for twice as much as the last.
        """
        count, wanted = 0, SECTOR
        try:
            if self._cache is None:
                self._cache = os.open(f"/proc/self/fd/{self._buffered}", os.O_RDONLY | NO_WAIT)
                os.posix_fadvise(self._cache, 0, 0, os.POSIX_FADV_RANDOM)  # or absent pages would be read ahead
            while part := view[count : count + wanted]:
                came = os.preadv(self._cache, [part], offset + count, os.RWF_NOWAIT)
                count += came
                if came < wanted:
                    break
                wanted *= 2
            return count
        except BlockingIOError:
            return count
        except OSError as error:  # a file system that cannot tell
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            self._cached = False
            return 0

    def _check(self) -> None:
        if not (then := self._expected).is_still(now := FileState.of(os.fstat(self._buffered))):
            raise ModelError(
                f"{self._path} was changed while it was in use: it had {then}, now it has {now}: load the model again",
                path=str(self._path), inode=then.inode, size=then.size, size_now=now.size,
            )  # fmt: skip

    def _give_up_direct(self, error: OSError) -> None:
        self._direct = None
        self.note = f"{self._path} is read through the page cache: direct reads are refused ({error.strerror})."
