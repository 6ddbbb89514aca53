"""Atomic file replacement, positioned reads and writes, the cache folder, and digests of the package's code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

__all__ = ["BINARY", "cache_folder", "code_mark", "mark_of_modules", "read_at", "replacing", "write_at"]

BINARY = getattr(os, "O_BINARY", 0)  # without it, Windows opens files in text mode
_LIBRARIES = ("diffusers", "torch", "transformers")


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` on success and is deleted on an error."""
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
