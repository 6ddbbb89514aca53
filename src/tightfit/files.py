"""Atomic file replacement, changes of files, positioned reads and writes, the cache folder, digests of the code."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from tightfit.signals import unfinished

if sys.platform != "win32":
    import fcntl

__all__ = [
    "BINARY",
    "FileState",
    "cache_folder",
    "check_regular",
    "code_mark",
    "locking",
    "mark_of_modules",
    "read_at",
    "read_regular",
    "replacing",
    "write_at",
]

BINARY = getattr(os, "O_BINARY", 0)  # without it, Windows opens files in text mode
PREFIX = ".tightfit-"  # of unfinished files
_LIBRARIES = ("diffusers", "torch", "transformers")


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit; where there is no home, a path that cannot exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"
    except RuntimeError:  # no HOME, and no entry of this user
        return Path(os.devnull) / "tightfit"


@functools.cache
def code_mark() -> str:
    """Return a digest of this package's code and data, and of the versions of diffusers, torch and transformers."""
    package = Path(str(files("tightfit")))
    modules = sorted(path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}"))
    libraries = " ".join(f"{library} {version(library)}" for library in _LIBRARIES)
    return hashlib.sha256(f"{libraries}{_digest(package, modules)}".encode()).hexdigest()


@functools.cache
def mark_of_modules(*modules: str) -> str:
    """Return a digest of the code of `modules`, each given by its file's path in this package."""
    package = Path(str(files("tightfit")))
    return _digest(package, [package / module for module in modules])


def _digest(package: Path, modules: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in modules:
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_regular(path: Path) -> None:
    """OSError if `path` is there, but a folder, a device or a pipe, whose reader may wait forever."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no file, but a pipe, a device or the like", str(path))


def read_regular(path: Path) -> str:
    """Return the text of a file. OSError if there is none, or if it is not a regular file, which might never end."""
    check_regular(path)
    return path.read_text()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is written replaces `path` on success and is gone after an error.

    Until it is complete it has no name where the system can do that, so a process that is killed leaves nothing.
    Elsewhere a name that begins with PREFIX is left, which the next process that replaces a file in the folder deletes.
    OSError if `path` is there and not a regular file.
    """
    check_regular(path)
    _sweep(path.parent)
    partial = path.with_name(f"{PREFIX}{os.urandom(8).hex()}")
    unfinished.add(str(partial))
    try:
        with _opened(partial) as (handle, written):
            yield written
            if written != partial:
                _link(handle, partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        unfinished.discard(str(partial))


@contextlib.contextmanager
def _opened(partial: Path) -> Iterator[tuple[int, Path]]:
    """Yield a new file, locked, and its path: `partial`, or that of an open file that has no name."""
    written = partial
    try:
        handle = os.open(partial.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        written = Path(f"/proc/self/fd/{handle}")
    except (AttributeError, OSError):  # another system, or a file system that cannot
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(handle)
        yield handle, written
    finally:
        os.close(handle)


def _link(handle: int, partial: Path) -> None:
    """Give the name `partial` to an open file that has none."""
    source = f"/proc/self/fd/{handle}"
    try:
        os.link(source, partial, src_dir_fd=handle, follow_symlinks=True)  # with a folder, or it links the link
    except OSError:  # a file system that only copies
        shutil.copyfile(source, partial)


@functools.cache
def _sweep(folder: Path) -> None:
    """Delete unfinished files that killed processes left in `folder`: those that nobody has locked."""
    for partial in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(partial, os.O_RDONLY | BINARY)
            try:
                _lock(handle)
                partial.unlink()
            finally:
                os.close(handle)


def _lock(handle: int) -> None:
    """Lock an open file until it is closed. OSError where another process has it."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locking(folder: Path) -> Iterator[None]:
    """Keep other processes from `folder`, as far as they lock it, too. OSError where one has it, or moved it."""
    if sys.platform == "win32":  # folders cannot be opened there
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        if not os.path.samestat(os.fstat(handle), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, "it was moved", str(folder))
        yield
    finally:
        os.close(handle)


class FileState(NamedTuple):
    """What shows that a file is another than it was, or was written to.

    The system sets `changed` at each write, and no program can set it back, as it can `modified`; it is also set where
    a file's mode, owner or name changes, of which only another number of names is recognized (a file that was replaced,
    and is still open, has lost one).
    """

    device: int
    inode: int
    size: int | None = None  # None: it is still being written, and only has to be the same file
    modified: int = 0  # st_mtime_ns
    changed: int = 0  # st_ctime_ns
    names: int = 0  # hard links

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink
        )

    def __str__(self) -> str:
        times = f"written at {self.modified} ns, changed at {self.changed} ns"
        return f"{self.size} bytes, {times}, as inode {self.inode}"

    def is_still(self, now: FileState) -> bool:
        """Whether `now` is the same file with the same content."""
        if self[:2] != now[:2] or self.size is None:
            return self[:2] == now[:2]
        same_time = self.changed == now.changed or self.names != now.names
        return self.size == now.size and self.modified == now.modified and same_time


def read_at(handle: int, view: memoryview, offset: int) -> int:
    """Read into `view` at `offset`; return the byte count. One thread at a time: Windows moves the file position."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [view], offset)
    os.lseek(handle, offset, os.SEEK_SET)
    data = os.read(handle, len(view))
    view[: len(data)] = data
    return len(data)


def write_at(handle: int, data: memoryview, offset: int) -> int:
    """Write `data` at `offset`; return the byte count. One thread at a time, as `read_at`."""
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.write(handle, data)
