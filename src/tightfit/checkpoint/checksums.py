"""SHA-256 of each file of a model folder, in `checksums.json` beside them: written with the files, verified later."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tightfit.checkpoint.headers import file_error, listed, mode_of, quoted, read_json
from tightfit.errors import ModelError
from tightfit.files import replacing

__all__ = ["RECORD_NAME", "ByteProgress", "ChecksumRecord", "FileChecksum", "find_damage", "hash_file", "verify_folder"]

RECORD_NAME = "checksums.json"
STEP = 16 * 2**20  # bytes that are read at once
ByteProgress = Callable[[str, int], object]  # called with the file's name and the number of bytes done since then


@dataclass(frozen=True)
class FileChecksum:
    """Length of a file in bytes and its SHA-256 as 64 hexadecimal digits."""

    size: int
    sha256: str


@dataclass
class ChecksumRecord:
    """Checksums by the files' paths within their folder. `job` is a digest of what they are made from.

    `unfinished`: other files are still to be written.
    """

    job: str
    files: dict[str, FileChecksum] = field(default_factory=dict)
    unfinished: bool = False

    @classmethod
    def read(cls, folder: Path) -> ChecksumRecord:
        """Read the record of `folder`. ModelError if it has none, or a damaged one."""
        file = folder / RECORD_NAME
        if not mode_of(file):
            raise file_error(folder, f"has no {RECORD_NAME}, which tightfit shard writes beside the files")
        content = read_json(file)
        match content:
            case {"job": str(job), "files": dict(files)}:
                entries = dict(_entry(file, name, value) for name, value in files.items())
                return cls(job, entries, content.get("unfinished") is True)
        raise file_error(file, f"is damaged: it has {listed(sorted(content))} instead of job and files")

    def write(self, folder: Path) -> None:
        """Replace the record of `folder` as a whole."""
        files = {name: {"bytes": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        content = {"job": self.job, **({"unfinished": True} if self.unfinished else {}), "files": files}
        with replacing(folder / RECORD_NAME) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def _entry(file: Path, name: str, value: object) -> tuple[str, FileChecksum]:
    path = PurePosixPath(name)
    match value:
        case {"bytes": int(size), "sha256": str(digest)} if size >= 0 and re.fullmatch(r"[0-9a-f]{64}", digest):
            if not path.is_absolute() and ".." not in path.parts:
                return name, FileChecksum(size, digest)
    raise file_error(file, f"is damaged: its entry of {quoted(name)} has no bytes and sha256")


def hash_file(path: Path, on_bytes: Callable[[int], object]) -> FileChecksum:
    """Read a file once; `on_bytes` is called with the number of bytes of each step. OSError where it cannot be read."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(path):
        digest.update(chunk)
        size += len(chunk)
        on_bytes(len(chunk))
    return FileChecksum(size, digest.hexdigest())


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(STEP))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            yield buffer[:count]


def verify_folder(folder: Path, on_bytes: ByteProgress = lambda _name, _count: None) -> ChecksumRecord:
    """Compare all files of `folder` with its checksums; return these. Files without a checksum are not read.

    Raises ModelError, naming the damaged files and how they differ, if there is one; and if the folder is unfinished.
    """
    if not mode_of(folder):
        raise ModelError(f"{folder} does not exist: there is nothing to verify", path=str(folder))
    record = ChecksumRecord.read(folder)
    if record.unfinished:
        done = f"{len(record.files)} of its files are finished"
        raise file_error(folder, f"is not whole: {done}; the same tightfit shard command goes on from there")
    damaged = find_damage(folder, record.files, on_bytes)
    if damaged:
        first, how = next(iter(damaged.items()))
        more = f" ({len(damaged)} of {len(record.files)} files are damaged: {listed(sorted(damaged))})"
        raise file_error(folder / first, f"{how}{more}", damaged=sorted(damaged))
    return record


def find_damage(folder: Path, files: Mapping[str, FileChecksum], on_bytes: ByteProgress) -> dict[str, str]:
    """Name → how the file in `folder` differs from its checksum, of those `files` that do."""
    damaged = {}
    for name, expected in files.items():
        try:
            found = (folder / name).stat().st_size
            if found == expected.size:
                actual = hash_file(folder / name, lambda count, name=name: on_bytes(name, count))  # type: ignore[misc]
                if actual == expected:
                    continue
                damaged[name] = f"is damaged: its SHA-256 is {actual.sha256[:16]}…, not {expected.sha256[:16]}…"
            else:
                damaged[name] = f"is damaged: it has {found:,} bytes, not {expected.size:,}"
        except OSError as error:
            damaged[name] = f"cannot be read: {error.strerror}"
    return damaged
