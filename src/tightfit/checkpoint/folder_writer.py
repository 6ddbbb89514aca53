"""A list of output files → a folder that is whole or not there; what an interrupted process wrote is used again.

Files are written into `NAME.part` beside the folder NAME: each as `FILE.part`, which gets its name when its bytes are
on the disk, then its checksum. When all are there, the folder gets its name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.checkpoint.checksums import RECORD_NAME, ChecksumRecord, FileChecksum, find_damage
from tightfit.checkpoint.headers import mode_of, names_in
from tightfit.checkpoint.output_files import ChunkReader, OutputFile
from tightfit.errors import ModelError, RunError
from tightfit.files import code_mark, locking
from tightfit.signals import unfinished
from tightfit.units import format_bytes

__all__ = ["WrittenFolder", "write_folder"]

PART = ".part"  # ending of what is not whole yet
_FULL = {errno.ENOSPC, errno.EDQUOT}
StepProgress = Callable[[str, int, int], object]  # (what is done, bytes done, bytes in total)


@dataclass(frozen=True)
class WrittenFolder:
    """`size` bytes in `files` files, of which `kept_size` bytes in `kept` files were there already.

    `notes` are sentences on what was read.
    """

    path: Path
    files: int
    size: int
    kept: int
    kept_size: int
    notes: tuple[str, ...] = ()


def write_folder(target: Path, files: Sequence[OutputFile], on_progress: StepProgress) -> WrittenFolder:
    """Write `files`, and their checksums, as the new folder `target`; continue what was interrupted.

    Files that an interrupted call for the same `files` has finished are verified and kept. A `target` that is whole
    is left as it is. Raises ModelError if `target` is there and is another, or a source cannot be read; RunError,
    with the bytes needed and free, if the disk is full, and if another process writes it.
    """
    job = _job(files)
    if _is_there(target, job):
        size = ChecksumRecord.read(target).size
        return WrittenFolder(target, len(files), size, len(files), size)
    whole = target.resolve()  # of "." and "..", the name; of a link to an empty folder, that folder
    work = whole.with_name(whole.name + PART)
    with _writing(target):
        work.mkdir(parents=True, exist_ok=True)
    with _only_here(work, target):
        writer = _FolderWriter(work, target, files, job, on_progress)
        writer.take_up()
        writer.write_missing()
        with _writing(target):
            writer.finish()
    return writer.written


def _job(files: Sequence[OutputFile]) -> str:
    """Digest of all that the files follow from."""
    what = json.dumps([code_mark(), *(file.identity for file in files)])
    return hashlib.sha256(what.encode()).hexdigest()


def _is_there(target: Path, job: str) -> bool:
    """Whether `target` is what `job` makes. ModelError if it is anything else but an empty folder, or nothing."""
    mode = mode_of(target)
    if not mode or (stat.S_ISDIR(mode) and not names_in(target)):
        return False
    if stat.S_ISDIR(mode) and mode_of(target / RECORD_NAME) and ChecksumRecord.read(target).job == job:
        return True
    what = f"a folder with {len(names_in(target))} files and folders" if stat.S_ISDIR(mode) else "a file"
    raise ModelError(f"{target} is there already, {what}, and is never changed: name a new folder", path=str(target))


@contextlib.contextmanager
def _only_here(work: Path, target: Path) -> Iterator[None]:
    """Keep other processes from the same work. RunError where one is at it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locking(work))
        except OSError as error:
            raise RunError(
                f"another process is writing {target} ({error.strerror}): wait for it", path=str(target)
            ) from error
        yield


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}", path=str(path)) from error


class _FolderWriter:
    """The work on one folder, in `work`, which no other process has."""

    def __init__(
        self, work: Path, target: Path, files: Sequence[OutputFile], job: str, on_progress: StepProgress
    ) -> None:
        self._work, self._target = work, target
        self._files = {file.name: file for file in files}
        self._record = ChecksumRecord(job, unfinished=True)
        self._on_progress = on_progress
        self._done, self._total = 0, sum(file.size for file in files)
        self._kept = (0, 0)

    @property
    def written(self) -> WrittenFolder:
        return WrittenFolder(self._target, len(self._files), self._total, *self._kept)

    def take_up(self) -> None:
        """Keep the files of an interrupted process that are whole. ModelError if the folder is none of this program."""
        if names := [name for name in names_in(self._work) if not name.startswith(".tightfit-")]:
            if RECORD_NAME not in names:
                what = f"{self._work} is there, with {len(names)} files and folders, and is no unfinished copy"
                raise ModelError(f"{what}: remove it, or name another folder", path=str(self._work))
            with contextlib.suppress(ModelError):  # a damaged record: everything is written again
                self._keep(ChecksumRecord.read(self._work))
        with self._on_disk(RECORD_NAME):
            self._record.write(self._work)

    def _keep(self, before: ChecksumRecord) -> None:
        if before.job != self._record.job:  # of another model, or of other options
            return
        known = {name: entry for name, entry in before.files.items() if name in self._files}
        damaged = find_damage(self._work, known, lambda name, count: self._did(f"verifying {name}", count))
        self._record.files = {name: entry for name, entry in known.items() if name not in damaged}
        self._kept = len(self._record.files), self._record.size
        self._done = self._record.size

    def write_missing(self) -> None:
        """Write the files that are not finished yet, in their order."""
        missing = [file for file in self._files.values() if file.name not in self._record.files]
        self._check_space(sum(file.size for file in missing))
        with ChunkReader() as reader:
            for file in missing:
                with self._on_disk(file.name):
                    self._record.files[file.name] = self._write(file, reader)
                    self._record.write(self._work)

    def _check_space(self, needed: int) -> None:
        """RunError if the disk has not `needed` bytes; unfinished files, which are written anew, are deleted first."""
        self._delete_others()
        free = shutil.disk_usage(self._work).free
        if needed > free:
            raise RunError(
                f"{self._target} needs {format_bytes(needed)} more, {self._state()}, and its disk has "
                f"{format_bytes(free)} free: {format_bytes(needed - free)} too few",
                path=str(self._target), needed=needed, free=free,
            )  # fmt: skip

    def _write(self, file: OutputFile, reader: ChunkReader) -> FileChecksum:
        """Write one file; it has its name when all its bytes are on the disk."""
        path = self._work / file.name
        part = path.with_name(path.name + PART)
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        unfinished.add(str(part))
        try:
            with part.open("wb", buffering=0) as stream:
                for chunk in file.chunks(reader):
                    _write_all(stream.fileno(), chunk)
                    digest.update(chunk)
                    self._did(f"writing {file.name}", len(chunk))
                os.fsync(stream.fileno())
            _check_size(part, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
            unfinished.discard(str(part))
        _sync_folder(path.parent)
        return FileChecksum(file.size, digest.hexdigest())

    def _did(self, what: str, count: int) -> None:
        self._done += count
        self._on_progress(what, min(self._done, self._total), self._total)

    @contextlib.contextmanager
    def _on_disk(self, name: str) -> Iterator[None]:
        """Raise what the system says while the file `name` is written as a RunError, with the numbers."""
        try:
            yield
        except OSError as error:
            free, needed = shutil.disk_usage(self._work).free, self._total - self._record.size
            if error.errno not in _FULL:
                raise RunError(
                    f"{self._work / name} cannot be written: {error.strerror}", path=str(self._work)
                ) from error
            raise RunError(
                f"the disk of {self._target} is full: {format_bytes(needed)} more are needed, {format_bytes(free)} "
                f"are free, {self._state()}; with more space, the same command goes on from there",
                path=str(self._target), needed=needed, free=free,
            ) from error  # fmt: skip

    def _state(self) -> str:
        return f"{format_bytes(self._record.size)} of {format_bytes(self._total)} are finished"

    def _delete_others(self) -> None:
        """Delete what interrupted processes left and nobody asked for."""
        finished = {RECORD_NAME, *self._record.files}
        for path in sorted(self._work.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()
            elif path.relative_to(self._work).as_posix() not in finished:
                path.unlink()

    def finish(self) -> None:
        """Give the folder its name."""
        self._delete_others()
        self._record.unfinished = False
        with self._on_disk(RECORD_NAME):
            self._record.write(self._work)
        _sync_folder(self._work)
        whole = self._work.with_name(self._work.name.removesuffix(PART))
        self._work.rename(whole)
        _sync_folder(whole.parent)


def _write_all(handle: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(handle, chunk) :]


def _check_size(part: Path, file: OutputFile) -> None:
    """RunError if not as many bytes were written as were promised: a mistake of this program."""
    size = part.stat().st_size
    if size != file.size:
        raise RunError(f"{file.name} has {size:,} bytes instead of {file.size:,}: please report this", file=file.name)


def _sync_folder(folder: Path) -> None:
    """Let new names in `folder` be on the disk, where the system can open folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
