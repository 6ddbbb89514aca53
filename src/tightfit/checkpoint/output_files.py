"""Files of a model that is to be written: their names and sizes, known beforehand, and their bytes, chunk by chunk."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tightfit.checkpoint.headers import file_state
from tightfit.checkpoint.tensors import DTYPE_CODES, TensorLocation
from tightfit.devices.disk import DiskReader, Extent
from tightfit.devices.memory import arena
from tightfit.files import FileState

__all__ = [
    "ChunkReader",
    "CopiedFile",
    "OutputFile",
    "StoredTensor",
    "TensorFile",
    "TensorSource",
    "TextFile",
    "byte_view",
    "rounded",
]

CHUNK = 16 * 2**20  # bytes; a multiple of every dtype's


class ChunkReader:
    """Reads extents of files chunk by chunk: the next one is read while the one before is used."""

    def __init__(self) -> None:
        self.disk = DiskReader()
        self._buffers = (arena(CHUNK), arena(CHUNK))

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disk.close()

    def chunks(self, extent: Extent) -> Iterator[torch.Tensor]:
        """Yield the bytes of `extent`, at most CHUNK at once, each valid until the next one.

        ModelError if the file ends too soon or is not in the extent's state any more.
        """
        starts = range(0, extent.size, CHUNK)
        parts = [Extent(extent.path, extent.offset + at, min(CHUNK, extent.size - at), extent.state) for at in starts]
        targets = [self._buffers[number % 2][: part.size] for number, part in enumerate(parts)]
        if not parts:
            return
        reading = self.disk.read([(parts[0], targets[0])])
        for number, target in enumerate(targets):
            reading.wait()
            if number + 1 < len(parts):
                reading = self.disk.read([(parts[number + 1], targets[number + 1])])
            yield target


class TensorSource(ABC):
    """A tensor that is to be written, in row-major order, as `dtype`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[TensorLocation, ...]  # what it is made from

    @property
    def size(self) -> int:
        """Bytes, as written."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @abstractmethod
    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        """Yield its bytes, each chunk valid until the next one."""


class StoredTensor(TensorSource):
    """A tensor of a file, as it is, or rounded to another `dtype`."""

    def __init__(self, place: TensorLocation, dtype: torch.dtype | None = None) -> None:
        self.dtype, self.shape, self.places = dtype or place.dtype, place.shape, (place,)

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        (place,) = self.places
        for chunk in reader.chunks(Extent(place.path, place.offset, place.size, place.state)):
            yield byte_view(chunk if place.dtype == self.dtype else rounded(chunk.view(place.dtype), self.dtype))


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy `tensor` as `dtype`, contiguous, into pages of its own: the heap may keep those of a freed tensor."""
    made = arena(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return made.copy_(tensor)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


@dataclass(frozen=True)
class OutputFile(ABC):
    """A file to be written: `name` is its path within the folder, with slashes."""

    name: str

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes."""

    @property
    @abstractmethod
    def identity(self) -> list[Any]:
        """What its content follows from, as JSON: two files of one identity have the same bytes."""

    @abstractmethod
    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        """Yield its bytes, each chunk valid until the next one."""


@dataclass(frozen=True)
class TextFile(OutputFile):
    """A file whose content is in memory."""

    text: str

    @property
    def size(self) -> int:
        return len(self.text.encode())

    @property
    def identity(self) -> list[Any]:
        return [self.name, self.text]

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        yield memoryview(self.text.encode())


@dataclass(frozen=True)
class CopiedFile(OutputFile):
    """A copy of the file `source`, in the state it had when this was made."""

    source: Path
    state: FileState

    @classmethod
    def of(cls, name: str, source: Path) -> CopiedFile:
        """ModelError if `source` cannot be read."""
        return cls(name, source, file_state(source))

    @property
    def size(self) -> int:
        return self.state.size or 0

    @property
    def identity(self) -> list[Any]:
        return [self.name, *_mark(self.source, self.state)]

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        for chunk in reader.chunks(Extent(self.source, 0, self.size, self.state)):
            yield byte_view(chunk)


@dataclass(frozen=True)
class TensorFile(OutputFile):
    """A safetensors file with these `tensors`; those of large elements are first, so all of them are aligned."""

    tensors: Mapping[str, TensorSource]
    header: bytes = field(init=False)

    def __post_init__(self) -> None:
        sources = sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        object.__setattr__(self, "tensors", dict(sources))
        object.__setattr__(self, "header", _header(self.tensors))

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors.values())

    @property
    def identity(self) -> list[Any]:
        places = [[_place_mark(place) for place in tensor.places] for tensor in self.tensors.values()]
        return [self.name, self.header.decode("latin-1"), places]

    def chunks(self, reader: ChunkReader) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self.tensors.values():
            yield from tensor.chunks(reader)


def _header(tensors: Mapping[str, TensorSource]) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces so that the first tensor is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # diffusers and transformers want to know
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.size
        code = DTYPE_CODES[tensor.dtype]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _place_mark(place: TensorLocation) -> list[Any]:
    return [*_mark(place.path, place.state), place.offset]


def _mark(path: Path, state: FileState) -> list[Any]:
    """What of a file does not change where nobody writes to it, or where only its permissions are changed."""
    return [str(path.resolve()), state.size, state.modified]
