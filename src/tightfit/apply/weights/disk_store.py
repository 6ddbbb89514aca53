"""Weights whose masters are in files: a model's own safetensors shards, or a temporary file written for the purpose.

What moves together is read in few long stretches of whole sectors, straight to where it is used; each weight then lies
at the same place within a sector as in its file, and nothing is repacked. So do weights that are read once: loaders map
files into memory, libraries for matrices may compute otherwise, in the last bit, where addresses are no multiples of
16, and numbers are to be the same.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tightfit.apply.weights.pinned_staging import ByteRange, Stager, send_pieces
from tightfit.apply.weights.weight_store import ALIGNMENT, TensorLayout, WeightStore
from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.disk import SECTOR, DiskReader, Extent, Reading
from tightfit.devices.memory import CACHE_LINE, OWN_MEMORY, arena, copy_alike
from tightfit.errors import RunError
from tightfit.files import write_at

__all__ = ["DiskStore", "FileTensor", "SpillFile", "read_like", "read_stored"]


UNSETTLED = 64 * 2**20  # bytes of a file that may be in the page cache alone


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, in row-major order."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]  # in which it is used; dense

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class DiskStore(WeightStore):
    """Plain tensors whose masters are what `stored` says."""

    writable = False
    alignment = SECTOR

    def __init__(
        self, stored: Sequence[FileTensor], reader: DiskReader, stager: Stager | None = None, *, aligned: bool = False
    ) -> None:
        """With a `stager`, what goes to another device is read and sent by that.

        Where tensors are `aligned`, each arrives at a multiple of ALIGNMENT, from where a card's kernels read fastest,
        and by the same instructions as of any other tensor; else as it lies within its sector.
        """
        self._reader, self._stager = reader, stager
        self.stored = tuple(stored)
        self._runs: list[tuple[Extent, int]] = []  # what is read, and to where
        places = _runs(stored, self._runs)
        self._read_size = max((place + _sectors(extent.size) for extent, place in self._runs), default=0)
        self._pieces = [ByteRange(0, 0, self._read_size)]
        self.layouts = self._read_layouts = _layouts(stored, places)
        if aligned:
            self.layouts = _layouts(stored, _aligned(stored, places, self._pieces))
        self._aligned, self.size = aligned, self._pieces[-1].target + self._pieces[-1].size

    def send(self, stream: CopyStream, target: torch.Tensor, after: Any) -> CopyHandle:
        if target.device.type == "cpu" and not self._aligned:
            return _Read(self._read(target))
        if self._stager is not None:
            return self._stager.send(stream, target, after, self._fill, self._pieces, self._read_size)
        staging = arena(self._read_size)
        self._fill(staging)
        return send_pieces(stream, target, staging, self._pieces, after)

    def _fill(self, part: torch.Tensor) -> None:
        self._read(part).wait()

    def _read(self, target: torch.Tensor) -> Reading:
        return self._reader.read([(extent, target[place:]) for extent, place in self._runs])

    def values(self) -> list[torch.Tensor]:
        """All of them, views of memory of their own."""
        region = arena(self._read_size)
        self._fill(region)
        return [layout.view(region) for layout in self._read_layouts]


def read_stored(stored: FileTensor, reader: DiskReader) -> torch.Tensor:
    """What a file holds, in memory of its own."""
    if not stored.size:
        return torch.empty(stored.shape, dtype=stored.dtype)
    value = DiskStore([stored], reader).values()[0]
    return value if stored.size >= OWN_MEMORY else copy_alike(value)


def read_like(like: torch.Tensor, stored: FileTensor, reader: DiskReader) -> torch.Tensor:
    """What a file holds, laid out as `like` and in its dtype."""
    value = read_stored(stored, reader)
    if (value.dtype, value.stride()) == (like.dtype, like.stride()):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


class _Read(CopyHandle):
    """What is read to where it is used: the host waits, because it is the host that computes."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def wait_on_device(self) -> float:
        return self._reading.wait()

    def cancel(self) -> None:
        self._reading.cancel()


class SpillFile:
    """A temporary file for weights that no file has as they are used. It goes when it is closed, or forgotten."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="tightfit-weights-")
        self.path = Path(name)
        self._handle = handle
        self._end = self._settled = 0
        self._forget = weakref.finalize(self, _remove, handle, self.path)

    def write(self, tensor: torch.Tensor) -> FileTensor:
        """Appends the plain, dense `tensor`; RunError where the disk is full."""
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        self._end += tensor.data_ptr() % CACHE_LINE
        stored = FileTensor(self.path, self._end, tensor.dtype, tensor.shape, tensor.stride())
        self._write(flat.view(torch.uint8).numpy().data)
        return stored

    def _write(self, data: memoryview) -> None:
        try:
            done = 0
            while done < len(data):
                done += write_at(self._handle, data[done : done + 2**30], self._end + done)
        except OSError as error:
            raise RunError(
                f"cannot set {len(data):,} bytes of weights aside in {self.path.parent}: {error.strerror}",
                size=len(data),
            ) from error
        self._end = _sectors(self._end + len(data))
        if self._end - self._settled >= UNSETTLED:
            self._settle()

    def close(self) -> None:
        """The file goes."""
        self._forget()

    def finish(self) -> None:
        """All is on the disk, and none of it in the page cache; nothing more is written."""
        os.ftruncate(self._handle, self._end)
        self._settle()

    def _settle(self) -> None:
        """What was written is on the disk: what is only in the page cache counts against a control group's limit."""
        os.fsync(self._handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        self._settled = self._end


def _remove(handle: int, path: Path) -> None:
    os.close(handle)
    path.unlink(missing_ok=True)


def _runs(stored: Sequence[FileTensor], runs: list[tuple[Extent, int]]) -> list[int]:
    """Fills `runs` with stretches of whole sectors, and where they go; returns where each tensor begins there."""
    places = [0] * len(stored)
    end = 0  # of the memory that the runs take
    for index in sorted(range(len(stored)), key=lambda index: (str(stored[index].path), stored[index].offset)):
        each = stored[index]
        start = each.offset // SECTOR * SECTOR
        if each.offset % each.dtype.itemsize:  # no view could begin there: read by itself, to a place that suits
            runs.append((Extent(each.path, each.offset, each.size), end))
            places[index], end = end, end + _sectors(each.size)
            continue
        last, place = runs[-1] if runs else (None, 0)
        if last is not None and last.path == each.path and last.offset % SECTOR == 0 and start <= _end(last):
            begun = last.offset
            runs[-1] = (Extent(each.path, begun, max(each.offset + each.size, last.offset + last.size) - begun), place)
        else:
            begun, place = start, end
            runs.append((Extent(each.path, begun, each.offset + each.size - begun), place))
        places[index] = place + each.offset - begun
        end = place + _sectors(runs[-1][0].size)
    return places


def _layouts(stored: Sequence[FileTensor], places: Sequence[int]) -> tuple[TensorLayout, ...]:
    return tuple(
        TensorLayout(place, each.dtype, each.shape, each.strides) for place, each in zip(places, stored, strict=True)
    )


def _aligned(stored: Sequence[FileTensor], places: Sequence[int], pieces: list[ByteRange]) -> list[int]:
    """Fills `pieces` with what is sent of what was read to `places`; returns where each tensor begins then.

    Of neighbours that lie as far apart as they should one piece is sent: mostly all of a file's.
    """
    pieces[:] = [ByteRange(0, 0, 0)]
    aligned = [0] * len(stored)
    for index in sorted(range(len(stored)), key=lambda index: places[index]):
        begin, size, last = places[index], stored[index].size, pieces[-1]
        if last.size and (begin - last.source) % ALIGNMENT == 0 and begin - last.source - last.size < SECTOR:
            pieces[-1] = ByteRange(last.source, last.target, max(last.size, begin - last.source + size))
        else:
            end = -(-(last.target + last.size) // ALIGNMENT) * ALIGNMENT
            pieces[len(pieces) - (not last.size) :] = [ByteRange(begin, end, size)]
        aligned[index] = pieces[-1].target + begin - pieces[-1].source
    return aligned


def _end(extent: Extent) -> int:
    """Where the sectors of an extent end in its file."""
    return extent.offset + _sectors(extent.size)


def _sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR
