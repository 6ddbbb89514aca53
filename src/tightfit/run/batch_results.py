"""A batch's folder: its pictures, and results.jsonl with a record of each finished request; what is done already."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from tightfit.errors import InputError, RunError
from tightfit.files import check_regular, locking, replacing
from tightfit.run.batch_lines import BatchRequest, file_names
from tightfit.run.files import check_writable, writing
from tightfit.schema.batch import BatchRecord, PictureFile

__all__ = ["DIGEST", "RESULTS", "BatchFolder"]

RESULTS = "results.jsonl"
DIGEST = "request"  # PNG text of a picture of a batch: the digest of its request


class BatchFolder:
    """The folder that a batch writes to. `opened()` reads its records; only this process writes them then."""

    def __init__(self, path: Path) -> None:
        self.path, self._results = path, path / RESULTS
        self._records: list[BatchRecord] = []
        self._sums: dict[str, str] = {}  # digests of files that were read, by name

    @contextlib.contextmanager
    def opened(self) -> Iterator[BatchFolder]:
        """Make the folder if it is missing, and read its records. InputError if that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            cause = getattr(error, "strerror", None) or error
            raise InputError(f"cannot make the folder {self.path}: {cause}", path=str(self.path)) from None
        check_writable(self._results)
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(locking(self.path))
            except BlockingIOError:
                said = f"another batch writes to {self.path}: wait for its end, or name another folder"
                raise InputError(said, path=str(self.path)) from None
            except OSError:  # a file system without locks
                pass
            self._records = self._read()
            yield self

    def _read(self) -> list[BatchRecord]:
        """The records, without one that was cut off while it was written, which is deleted."""
        if not self._results.exists():
            return []
        content = self._results.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        records = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                records.append(BatchRecord.from_mapping(json.loads(line)))
            except (ValueError, RecursionError) as error:
                said = f"{self._results} line {number} is no record of a batch: {error}; name another folder"
                raise InputError(said, path=str(self._results)) from None
        if len(whole) < len(content):
            os.truncate(self._results, len(whole))
        return records

    def done(self, requests: Sequence[BatchRequest], on_progress: Callable[[int], object]) -> set[str]:
        """Return the names of `requests` whose pictures are there, unchanged, with a record of the same digest.

        InputError if another request would replace a file that this batch did not write.
        """
        latest = {(record.name, record.digest): record for record in self._records}
        found = set()
        for number, asked in enumerate(requests):
            record = latest.get((asked.name, asked.digest))
            if record is not None and record.files and all(map(self._is_unchanged, record.files)):
                found.add(asked.name)
            else:
                for name in file_names(asked.name, asked.request.batch):
                    self._check_own(name, asked.digest, f"line {asked.line} would write {name}")
            on_progress(number + 1)
        return found

    def _is_unchanged(self, file: PictureFile) -> bool:
        path = self.path / file.name
        return path.is_file() and path.stat().st_size == file.bytes and self._sum(file.name) == file.sha256

    def _sum(self, name: str) -> str:
        if name not in self._sums:
            with (self.path / name).open("rb") as file:
                self._sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._sums[name]

    def _check_own(self, name: str, digest: str, what: str) -> None:
        """InputError if there is a file `name` that is not as a record says, nor a picture with this `digest`."""
        path = self.path / name
        if not os.path.lexists(path):
            return
        try:
            check_regular(path)
        except OSError as error:
            raise InputError(f"{what}: {path} is in the way: {error.strerror}", path=str(path)) from None
        written = {file.sha256 for record in self._records for file in record.files if file.name == name}
        if self._sum(name) not in written and digest_in(path) != digest:
            raise InputError(
                f"{what}, but {path} is there, and this batch did not write it, or it was changed since: move it away, "
                "or give the line another name",
                path=str(path),
            )

    def write(self, asked: BatchRequest, pictures: Sequence[bytes], record: BatchRecord) -> None:
        """Write the pictures of a request, all or none, and append its record."""
        names = file_names(asked.name, len(pictures))
        with writing(self.path), contextlib.ExitStack() as whole:
            for name, picture in zip(names, pictures, strict=True):
                self._sums.pop(name, None)
                self._check_own(name, asked.digest, f"line {asked.line} would write {name}")
                whole.enter_context(replacing(self.path / name)).write_bytes(picture)
        sums = [hashlib.sha256(picture).hexdigest() for picture in pictures]
        self._sums |= dict(zip(names, sums, strict=True))
        files = [
            PictureFile(name=name, bytes=len(picture), sha256=sha256)
            for name, picture, sha256 in zip(names, pictures, sums, strict=True)
        ]
        self.append(record.model_copy(update={"files": tuple(files)}))

    def append(self, record: BatchRecord) -> None:
        """Append a record, with one write: a process that is killed leaves it whole, or cut off at the end."""
        with writing(self._results), self._results.open("ab", buffering=0) as file:
            line = f"{record.to_json()}\n".encode()
            if file.write(line) != len(line):
                raise RunError(f"cannot write {self._results}: the disk is full", path=str(self._results))
        self._records.append(record)


def digest_in(path: Path) -> str | None:
    """Return the digest of the request that the PNG file `path` is the picture of; None for other files."""
    try:
        with Image.open(path) as picture:
            found = getattr(picture, "text", {}).get(DIGEST)
            return None if found is None else str(found)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
