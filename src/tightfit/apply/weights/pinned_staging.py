"""Page-locked host memory: locked permanently, or a staging buffer through which a thread sends weights."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from tightfit.devices.copy_stream import CopyHandle, CopyStream, PendingCopy
from tightfit.devices.device import Device
from tightfit.devices.memory import arena
from tightfit.plan.prefetch import Lease, Ring

__all__ = ["ByteRange", "PageLock", "Stager", "send_pieces"]


class PageLock:
    """Keeps a buffer alive until its pages are unlocked: by `release`, at the latest when this object is freed.

    The driver registers addresses. Where memory is unmapped while it is registered, the next mapping at its addresses
    counts as page-locked, and copies go to and from the old pages.
    """

    def __init__(self, buffer: torch.Tensor, unlock: Callable[[], None]) -> None:
        self._release = weakref.finalize(self, _unlock, unlock, buffer)
        self._release.atexit = False  # the driver may be unloaded by then

    @classmethod
    def acquire(cls, buffer: torch.Tensor, device: Device) -> PageLock | None:
        """Page-lock `buffer` for copies to and from `device`; return None where that is refused."""
        unlock = device.lock_pages(buffer)
        return None if unlock is None else cls(buffer, unlock)

    def release(self) -> None:
        """Wait for copies in flight and unlock the pages; a second call does nothing."""
        self._release()


def _unlock(unlock: Callable[[], None], buffer: torch.Tensor) -> None:
    unlock()
    del buffer  # only after unlocking


SIZE = 64 * 2**20  # bytes of the staging buffer, at least; it grows for larger groups


class ByteRange(NamedTuple):
    """Bytes that are sent in one copy. Offsets in bytes, in the source and in the target."""

    source: int
    target: int
    size: int


def send_pieces(
    stream: CopyStream, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[ByteRange], after: Any
) -> PendingCopy:
    """Send `pieces` of `source` to `target` on `stream`, after the mark `after`."""
    handles = [stream.send(target[to : to + size], source[begin : begin + size], after) for begin, to, size in pieces]
    return handles[0] if len(handles) == 1 else _Several(handles)


class _Several(PendingCopy):
    """Copies that are waited for together."""

    def __init__(self, handles: Sequence[PendingCopy]) -> None:
        self._handles = handles

    def wait_on_device(self) -> float:
        return sum(handle.wait_on_device() for handle in self._handles)

    def synchronize(self) -> None:
        for handle in self._handles:
            handle.synchronize()

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()


class Stager:
    """A staging buffer and its thread. The buffer exists from the first `send` to `close`."""

    def __init__(self, device: Device) -> None:
        self._thread = ThreadPoolExecutor(1, "tightfit staging")
        self._buffer = _Buffer(device)
        weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)

    def send(
        self,
        stream: CopyStream,
        target: torch.Tensor,
        after: Any,
        fill: Callable[[torch.Tensor], None],
        pieces: Sequence[ByteRange] = (),
        size: int | None = None,
    ) -> CopyHandle:
        """Send to `target` (uint8, on the device), on `stream`, what `fill` writes into a staging tensor of its size.

        With `size`, the staging tensor has `size` bytes, of which `pieces` are sent.
        """
        whole = pieces or [ByteRange(0, 0, target.nbytes)]
        size = target.nbytes if size is None else size
        return _Staged(self._thread.submit(self._buffer.send, stream, target, after, fill, whole, size))

    def close(self) -> None:
        """Cancel copies that have not begun, and free the buffer."""
        self._thread.shutdown(cancel_futures=True)
        self._buffer.close()


class _Buffer:
    """The thread's page-locked memory, parts of which are being filled or copied."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ring, self._memory = Ring(0), torch.empty(0, dtype=torch.uint8)
        self._lock: PageLock | None = None
        self._under_way: deque[tuple[Lease, PendingCopy]] = deque()

    def send(
        self,
        stream: CopyStream,
        target: torch.Tensor,
        after: Any,
        fill: Callable[[torch.Tensor], None],
        pieces: Sequence[ByteRange],
        size: int,
    ) -> PendingCopy:
        with torch.inference_mode():  # it writes bytes, whichever mode their tensors were made in
            lease = self._lease(size)
            part = self._memory[lease.offset : lease.offset + size]
            try:
                fill(part)
                handle = send_pieces(stream, target, part, pieces, after)
            except BaseException:
                self._ring.give_back(lease)
                raise
        self._under_way.append((lease, handle))
        return handle

    def _lease(self, size: int) -> Lease:
        while (lease := self._ring.take(size)) is None:
            if self._under_way:
                self._await_one()
            else:  # too small even when empty
                self._grow(max(SIZE, 2 * size))
        return lease

    def _await_one(self) -> None:
        lease, handle = self._under_way.popleft()
        handle.synchronize()
        self._ring.give_back(lease)

    def _grow(self, size: int) -> None:
        self.close()
        self._ring, self._memory = Ring(size), arena(size)
        self._lock = PageLock.acquire(self._memory, self._device)
        if self._lock is None:  # drivers that lock no existing memory (WSL) may still allocate some
            self._memory = self._device.pinned(size)

    def close(self) -> None:
        while self._under_way:
            self._await_one()
        if self._lock is not None:
            self._lock.release()
        self._ring, self._memory, self._lock = Ring(0), torch.empty(0, dtype=torch.uint8), None


class _Staged(CopyHandle):
    """A copy that the staging thread will launch."""

    def __init__(self, given: Future[PendingCopy]) -> None:
        self._given = given

    def wait_on_device(self) -> float:
        start = time.perf_counter()
        handle = self._given.result()
        return time.perf_counter() - start + handle.wait_on_device()

    def cancel(self) -> None:
        if self._given.cancel():
            return
        wait([self._given])
        if self._given.exception() is None:
            self._given.result().cancel()
