"""Weights that are stored in files: a model's own safetensors shards, or a temporary file.

A group is read in few long runs of whole sectors, directly to where it is used. Each weight then has the same offset
within a sector as in its file, and nothing is repacked. Weights that are read only once keep that offset too: loaders
map files into memory, matrix libraries may compute differently, in the last bit, where addresses are no multiples of
16, and results are to be the same.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tightfit.apply.weights.pinned_staging import ByteRange, Stager, send_pieces
from tightfit.apply.weights.weight_store import ALIGNMENT, FileTensor, TensorLayout, WeightStore
from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.disk import SECTOR, DiskReader, Extent, Reading
from tightfit.devices.memory import CACHE_LINE, OWN_MEMORY, arena, copy_with_alignment
from tightfit.errors import RunError
from tightfit.files import FileState, write_at

__all__ = ["DiskStore", "SpillFile", "read_like", "read_stored"]


UNSETTLED = 64 * 2**20  # bytes written to a file that may be only in the page cache


class DiskStore(WeightStore):
    """Plain tensors that are read from the files and offsets in `stored`."""

    writable = False
    alignment = SECTOR

    def __init__(
        self, stored: Sequence[FileTensor], reader: DiskReader, stager: Stager | None = None, *, aligned: bool = False
    ) -> None:
        """With a `stager`, weights for another device are read and sent by it.

        With `aligned`, each tensor is sent to a multiple of ALIGNMENT, where a card's kernels read fastest, and with
        the same instructions as for any other tensor; else to its offset within its sector.
        """
        self._reader, self._stager = reader, stager
        self.stored = tuple(stored)
        self._runs: list[tuple[Extent, int]] = []  # what is read, and its offset in the target
        offsets = _runs(stored, self._runs)
        self._read_size = max((place + _sectors(extent.size) for extent, place in self._runs), default=0)
        self._pieces = [ByteRange(0, 0, self._read_size)]
        self.layouts = self._read_layouts = _layouts(stored, offsets)
        if aligned:
            self.layouts = _layouts(stored, _aligned(stored, offsets, self._pieces))
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
        """Read all tensors; return views of newly allocated memory."""
        region = arena(self._read_size)
        self._fill(region)
        return [layout.view(region) for layout in self._read_layouts]


def read_stored(stored: FileTensor, reader: DiskReader) -> torch.Tensor:
    """Read a tensor from its file into memory of its own."""
    if not stored.size:
        return torch.empty(stored.shape, dtype=stored.dtype)
    value = DiskStore([stored], reader).values()[0]
    return value if stored.size >= OWN_MEMORY else copy_with_alignment(value)


def read_like(like: torch.Tensor, stored: FileTensor, reader: DiskReader) -> torch.Tensor:
    """Read a tensor from its file, with the strides and dtype of `like`."""
    value = read_stored(stored, reader)
    if (value.dtype, value.stride()) == (like.dtype, like.stride()):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


class _Read(CopyHandle):
    """A read directly to where the tensor is used: the host waits for it, because the host computes."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def wait_on_device(self) -> float:
        return self._reading.wait()

    def cancel(self) -> None:
        self._reading.cancel()


class SpillFile:
    """A temporary file for weights that no file has in the layout and dtype used; it ends with `close` or with this.

    It has no name, so that nothing is left of it if the process is killed; `path` refers to the open file.
    """

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(prefix="tightfit-weights-", buffering=0)  # noqa: SIM115 - closed with this
        self._handle = file.fileno()
        self.path = Path(file.name if isinstance(file.name, str) else f"/dev/fd/{self._handle}")  # a name: Windows
        self._state = FileState.of(os.fstat(self._handle))._replace(size=None)  # a closed file's number is used again
        self._end = self._settled = 0
        self.close = weakref.finalize(self, file.close)

    def write(self, tensor: torch.Tensor) -> FileTensor:
        """Append the plain, dense `tensor`; return where it is. Raises RunError where the disk is full."""
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        self._end += tensor.data_ptr() % CACHE_LINE
        stored = FileTensor(self.path, self._end, tensor.dtype, tensor.shape, tensor.stride(), self._state)
        self._write(flat.view(torch.uint8).numpy().data)
        return stored

    def _write(self, data: memoryview) -> None:
        try:
            done = 0
            while done < len(data):
                done += write_at(self._handle, data[done : done + 2**30], self._end + done)
        except OSError as error:
            raise RunError(
                f"cannot set {len(data):,} bytes of weights aside in {tempfile.gettempdir()}: {error.strerror}",
                size=len(data),
            ) from error
        self._end = _sectors(self._end + len(data))
        if self._end - self._settled >= UNSETTLED:
            self._settle()

    def finish(self) -> None:
        """Flush everything to the disk and out of the page cache; nothing may be written after that."""
        os.ftruncate(self._handle, self._end)
        self._settle()

    def _settle(self) -> None:
        """Flush to the disk: the page cache counts against a control group's limit."""
        os.fsync(self._handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        self._settled = self._end


def _runs(stored: Sequence[FileTensor], runs: list[tuple[Extent, int]]) -> list[int]:
    """Fill `runs` with extents of whole sectors and their target offsets; return the target offset of each tensor."""
    offsets = [0] * len(stored)
    end = 0  # of the target, in bytes
    for index in sorted(range(len(stored)), key=lambda index: (str(stored[index].path), stored[index].offset)):
        each = stored[index]
        start = each.offset // SECTOR * SECTOR
        if each.offset % each.dtype.itemsize:  # no view can begin there: read by itself, to an aligned offset
            runs.append((Extent(each.path, each.offset, each.size, each.state), end))
            offsets[index], end = end, end + _sectors(each.size)
            continue
        last, place = runs[-1] if runs else (None, 0)
        if last is not None and last.path == each.path and last.offset % SECTOR == 0 and start <= _end(last):
            begun = last.offset
            size = max(each.offset + each.size, last.offset + last.size) - begun
            runs[-1] = (Extent(each.path, begun, size, each.state), place)
        else:
            begun, place = start, end
            runs.append((Extent(each.path, begun, each.offset + each.size - begun, each.state), place))
        offsets[index] = place + each.offset - begun
        end = place + _sectors(runs[-1][0].size)
    return offsets


def _layouts(stored: Sequence[FileTensor], offsets: Sequence[int]) -> tuple[TensorLayout, ...]:
    return tuple(
        TensorLayout(place, each.dtype, each.shape, each.strides) for place, each in zip(offsets, stored, strict=True)
    )


def _aligned(stored: Sequence[FileTensor], offsets: Sequence[int], pieces: list[ByteRange]) -> list[int]:
    """Fill `pieces` with what is sent of tensors read to `offsets`; return the target offset of each tensor.

    Neighbours at distances that keep both aligned are sent as one piece: mostly all tensors of a file.
    """
    pieces[:] = [ByteRange(0, 0, 0)]
    aligned = [0] * len(stored)
    for index in sorted(range(len(stored)), key=lambda index: offsets[index]):
        begin, size, last = offsets[index], stored[index].size, pieces[-1]
        if last.size and (begin - last.source) % ALIGNMENT == 0 and begin - last.source - last.size < SECTOR:
            pieces[-1] = ByteRange(last.source, last.target, max(last.size, begin - last.source + size))
        else:
            end = -(-(last.target + last.size) // ALIGNMENT) * ALIGNMENT
            pieces[len(pieces) - (not last.size) :] = [ByteRange(begin, end, size)]
        aligned[index] = pieces[-1].target + begin - pieces[-1].source
    return aligned


def _end(extent: Extent) -> int:
    """Return where the sectors of an extent end in its file, in bytes."""
    return extent.offset + _sectors(extent.size)


def _sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR
