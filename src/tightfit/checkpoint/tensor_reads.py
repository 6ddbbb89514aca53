"""Tensors of several files → host memory, read by a few threads at once, each tensor once and to where it stays.

A tensor of OWN_MEMORY bytes or more is read straight into an arena of its own, at the offset within a sector that it
has in its file. Small tensors, and those that are converted to another dtype, come through a staging buffer of STAGING
bytes for each thread, so nothing else is in memory beside what stays. What is in the page cache is copied from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import groupby

import torch

from tightfit.checkpoint.tensors import TensorLocation
from tightfit.devices.disk_file import SECTOR, DiskFile, Extent, ReadTarget
from tightfit.devices.memory import OWN_MEMORY, arena, copy_with_alignment, empty_in_arena
from tightfit.errors import ModelError, RunError
from tightfit.units import format_bytes

__all__ = ["PendingTensor", "TensorReads"]

THREADS = 4
STAGING = 8 * 2**20  # bytes
SHARE = 128 * 2**20  # bytes of a file that one thread reads at a time: a single large file is shared by several
GAP = 64 * 2**10  # bytes between two small tensors that are read to make one request of two


@dataclass(eq=False)
class PendingTensor:
    """The tensor in `place`, wanted in `dtype`; `value` is set when it was read."""

    place: TensorLocation
    dtype: torch.dtype
    value: torch.Tensor | None = None

    @property
    def straight(self) -> bool:
        """Whether it is read straight into its own memory."""
        return self.place.size >= OWN_MEMORY and self.dtype == self.place.dtype

    @property
    def end(self) -> int:
        return self.place.offset + self.place.size


class TensorReads(AbstractContextManager["TensorReads"]):
    """Reads tensors in the background; after `close`, or an error, nothing is read any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "tightfit loading")
        self._jobs: list[Future[None]] = []
        self._stopped = threading.Event()
        self._failures: list[Exception] = []

    def start(self, tensors: Iterable[PendingTensor]) -> None:
        """Start to read `tensors`; those of a file are in the order of their offsets. Files take turns."""
        shares = [
            (number, share)
            for _, group in groupby(tensors, lambda tensor: tensor.place.path)
            for number, share in enumerate(_shares(group))
        ]
        self._jobs += [self._pool.submit(self._read, share) for _, share in sorted(shares, key=lambda item: item[0])]

    def wait(self) -> None:
        """Block until all tensors that were started have values.

        ModelError if a file ends too soon, cannot be read, or has changed since its header was read.
        """
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """Stop reading; return when no thread does."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, tensors: Sequence[PendingTensor]) -> None:
        """Read `tensors` of one file. The first error of all threads is kept, and stops them."""
        place = tensors[0].place
        try:
            with closing(DiskFile(place.path, place.state, cached=True)) as file:
                for run in _runs(tensors):
                    if run[0].straight:
                        self._read_straight(file, run[0])
                    else:
                        self._read_staged(file, run)
        except OSError as error:
            said = ModelError(f"{place.path} cannot be read: {error.strerror}", path=str(place.path))
            said.__cause__ = error
            self._fail(said)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures.append(error)
        self._stopped.set()

    def _read_straight(self, file: DiskFile, tensor: PendingTensor) -> None:
        place = tensor.place
        lead = place.offset % SECTOR if place.offset % place.dtype.itemsize == 0 else 0  # else no view can begin there
        region = arena(-(-(lead + place.size) // SECTOR) * SECTOR)
        self._fill(file, Extent(place.path, place.offset - lead, lead + place.size), region)
        tensor.value = region[lead : lead + place.size].view(place.dtype).view(place.shape)

    def _read_staged(self, file: DiskFile, run: Sequence[PendingTensor]) -> None:
        """Read a large tensor that is converted, in pieces, or some small ones together."""
        begin, end = run[0].place.offset, run[-1].end
        staging = arena(min(STAGING, end - begin) // SECTOR * SECTOR + 2 * SECTOR)
        if len(run) == 1 and run[0].place.size > STAGING:
            self._convert(file, run[0], staging)
            return
        data = self._stage(file, run[0].place, begin, end, staging)
        for tensor in run:
            at = tensor.place.offset - begin
            stored = _typed(data[at : at + tensor.place.size], tensor.place.dtype).view(tensor.place.shape)
            if tensor.dtype == tensor.place.dtype:
                tensor.value = copy_with_alignment(stored)
            else:
                tensor.value = _empty(tensor).copy_(stored)

    def _convert(self, file: DiskFile, tensor: PendingTensor, staging: torch.Tensor) -> None:
        value, place = _empty(tensor), tensor.place
        for start in range(0, place.size, STAGING):
            size = min(STAGING, place.size - start)
            data = self._stage(file, place, place.offset + start, place.offset + start + size, staging)
            done = start // place.dtype.itemsize
            value.view(-1)[done : done + size // place.dtype.itemsize] = _typed(data, place.dtype)
        tensor.value = value

    def _stage(
        self, file: DiskFile, place: TensorLocation, begin: int, end: int, staging: torch.Tensor
    ) -> torch.Tensor:
        """Read the file from `begin` to `end` into `staging`; return the part of it that has these bytes."""
        lead = begin % SECTOR
        self._fill(file, Extent(place.path, begin - lead, lead + end - begin), staging)
        return staging[lead : lead + end - begin]

    def _fill(self, file: DiskFile, extent: Extent, target: torch.Tensor) -> None:
        piece, done = ReadTarget.of(extent, target), 0
        while done < extent.size:
            if self._stopped.is_set():
                raise RunError(f"the reading of {format_bytes(extent.size)} of {extent.path} was cancelled")
            done += file.read(piece, done)[0]


def _shares(tensors: Iterable[PendingTensor]) -> Iterator[list[PendingTensor]]:
    """Divide the tensors of a file into shares of SHARE bytes, or of one tensor."""
    share: list[PendingTensor] = []
    for tensor in tensors:
        if share and tensor.end - share[0].place.offset > SHARE:
            yield share
            share = []
        share.append(tensor)
    yield share


def _runs(tensors: Iterable[PendingTensor]) -> Iterator[list[PendingTensor]]:
    """Divide the tensors of a file into those that are read together: neighbouring small ones up to STAGING bytes."""
    run: list[PendingTensor] = []
    for tensor in tensors:
        together = run and not run[0].straight and not tensor.straight and tensor.place.offset - run[-1].end <= GAP
        if run and not (together and tensor.end - run[0].place.offset <= STAGING):
            yield run
            run = []
        run.append(tensor)
    yield run


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers, copied where they do not begin at a multiple of their size."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


def _empty(tensor: PendingTensor) -> torch.Tensor:
    strides = torch.empty(tensor.place.shape, device="meta").stride()
    return empty_in_arena(tensor.place.shape, strides, tensor.dtype)
