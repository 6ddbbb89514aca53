"""A folder → the rate at which its disk is read, past the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from tightfit.measure.host_rates import MOST_RUNS
from tightfit.units import format_bytes

__all__ = ["disk_rate"]

CHUNK, FILE = 8 * 2**20, 256 * 2**20


def disk_rate(folder: Path, seconds: float) -> float:
    """Bytes per second that a program reads from a file in `folder`, bypassing the page cache; OSError where it cannot.

    The file has no name where the system supports that, and is unlinked at once where not: no file is left behind.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 4 * FILE:
        message = (
            f"the disk has {format_bytes(free_bytes)} of room, and a file of {format_bytes(FILE)} should not crowd it"
        )
        raise OSError(errno.ENOSPC, message)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, CHUNK) as chunk:
        chunk[:] = random.Random(0).randbytes(CHUNK)  # no zeros: file systems with compression would store nothing
        chunks = _write(file, chunk, seconds / 2)
        deadline = time.perf_counter() + seconds / 2
        runs: list[float] = []
        while not runs or (len(runs) < MOST_RUNS and time.perf_counter() < deadline):
            if len(runs) % chunks == 0:
                file.seek(0)
                _bypass_cache(file.fileno())
            start = time.perf_counter()
            read = file.readinto(chunk)
            runs.append(read / (time.perf_counter() - start))
    return statistics.median(runs)


def _write(file: BinaryIO, chunk: mmap.mmap, seconds: float) -> int:
    """Write `chunk` through to the disk until FILE bytes are written or the time is over; return the chunks written."""
    count, deadline = 0, time.perf_counter() + seconds
    while count < FILE // CHUNK and (not count or time.perf_counter() < deadline):
        file.write(chunk)
        os.fsync(file.fileno())
        count += 1
    return count


def _bypass_cache(handle: int) -> None:
    """Make reads come from the disk: bypass the page cache, or drop the file's pages from it."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "posix_fadvise"):
        raise OSError(errno.ENOTSUP, "this system has no way of reading past its page cache")
    import fcntl  # not available on every system

    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):  # in-memory and some network file systems refuse
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
