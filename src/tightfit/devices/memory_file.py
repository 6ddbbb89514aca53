"""Memory that several processes of one computer map: a file without a name, gone with the last process that has it."""

from __future__ import annotations

import mmap
import os
import weakref

import torch

__all__ = ["PAGE_SIZE", "MemoryFile"]

PAGE_SIZE = mmap.ALLOCATIONGRANULARITY  # bytes: offsets of mappings are multiples of it


class MemoryFile:
    """A memfd of Linux. It has no name in any folder, so that it is freed however its processes end.

    It is not part of /dev/shm, and no limit of that applies. The processes of `address` may open it while this object
    is there; mappings stay valid without it.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.size = os.fstat(handle).st_size
        self._close = weakref.finalize(self, os.close, handle)
        self._shared: torch.Tensor | None = None
        self._private: torch.Tensor | None = None

    @classmethod
    def create(cls, size: int) -> MemoryFile:
        """Return a new one of `size` bytes, zeros, which take memory when they are first written.

        OSError where the system refuses it, or has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        handle = os.memfd_create("tightfit-weights")
        try:
            os.ftruncate(handle, size)
            return cls(handle)
        except BaseException:
            os.close(handle)
            raise

    @classmethod
    def open(cls, address: str) -> MemoryFile:
        """Open that of another process by its `address`. OSError where this process may not, or finds none."""
        process, _, handle = address.partition(" ")
        return cls(os.open(f"/proc/{int(process)}/fd/{int(handle)}", os.O_RDWR))

    @property
    def address(self) -> str:
        """Where other processes of this computer, and of this namespace of processes, find it."""
        return f"{os.getpid()} {self._handle}"

    def read(self, size: int) -> bytes:
        """Return its first `size` bytes."""
        return os.pread(self._handle, size, 0)

    def write(self, data: bytes) -> None:
        """Write `data` at its beginning."""
        os.pwrite(self._handle, data, 0)

    def shared(self, offset: int, size: int) -> torch.Tensor:
        """Return `size` bytes at `offset`, uint8 of shape (size,): what is written is there for all processes."""
        if self._shared is None:
            self._shared = self._mapped(mmap.MAP_SHARED)
        return self._shared[offset : offset + size]

    def private(self, offset: int, size: int) -> torch.Tensor:
        """Return the same bytes: what is written to a page of them is only in this process, and takes memory then."""
        if self._private is None:
            self._private = self._mapped(mmap.MAP_PRIVATE)
        return self._private[offset : offset + size]

    def _mapped(self, kind: int) -> torch.Tensor:
        room = mmap.mmap(self._handle, self.size, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(room, dtype=torch.uint8)  # only the storage keeps `room` alive
