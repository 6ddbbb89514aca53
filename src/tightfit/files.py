"""Files that are there whole or not at all, and the folder for what need not be worked out twice."""

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

BINARY = getattr(os, "O_BINARY", 0)  # without it Windows reads and writes text
_LIBRARIES = ("diffusers", "torch", "transformers")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tightfit, or ~/.cache/tightfit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"


@functools.cache
def code_mark() -> str:
    """A digest of this package's code and data, and of the versions of what it stands on."""
    package = Path(str(files("tightfit")))
    modules = sorted(path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}"))
    libraries = " ".join(f"{library} {version(library)}" for library in _LIBRARIES)
    return hashlib.sha256(f"{libraries}{_digest(package, modules)}".encode()).hexdigest()


@functools.cache
def mark_of_modules(*modules: str) -> str:
    """A digest of the code of some `modules` of this package, each by its file's path in it."""
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
    """A temporary path beside `path` that becomes it when all went well, and vanishes when not."""
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
    """Reads into `view` from `offset` on; how many bytes came. One thread at a time: on Windows it moves the file."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [view], offset)
    os.lseek(handle, offset, os.SEEK_SET)
    data = os.read(handle, len(view))
    view[: len(data)] = data
    return len(data)


def write_at(handle: int, data: memoryview, offset: int) -> int:
    """Writes `data` from `offset` on; how many bytes went. One thread at a time, as `read_at`."""
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.write(handle, data)
