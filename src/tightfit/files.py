"""Atomic file replacement, positioned reads and writes, the cache folder, and digests of the package's code."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

__all__ = [
    "BINARY",
    "cache_folder",
    "check_regular",
    "code_mark",
    "mark_of_modules",
    "read_at",
    "read_regular",
    "replacing",
    "write_at",
]

BINARY = getattr(os, "O_BINARY", 0)  # without it, Windows opens files in text mode
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
    """Yield a temporary path beside `path`, which replaces `path` on success and is deleted on an error.

    OSError if `path` is there and not a regular file.
    """
    check_regular(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tightfit-", suffix=path.suffix)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
