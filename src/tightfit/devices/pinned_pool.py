"""Page-locked host memory: a pool for reuse, as locking takes longer than copying, and activations offloaded to it.

No copy from or to page-locked memory blocks the host. Device memory that a copy reads or writes is kept alive until the
device's compute stream waits for the copy (`CopyStream`), so it is never reused too early; the caller limits how many
copies are in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.devices.copy_stream import CopyStream, PendingCopy
from tightfit.devices.device import Device

__all__ = ["ActivationHostPool", "HostTape", "HostTransfer", "PinnedPool", "bytes_of", "is_dense"]


ASK_EVERY = 256 * 2**20  # bytes to page-lock before the lockable bytes are queried again


class _Loan(weakref.ref[torch.Tensor]):
    """A weak reference to a lent tensor, whose page is free again when the tensor dies."""

    __slots__ = ("page",)
    page: torch.Tensor


class PinnedPool:
    """Pages of host memory for copies to and from `device`, page-locked where that is not refused."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}  # by size in bytes
        self._loans: set[_Loan] = set()
        self._back: list[weakref.ref[torch.Tensor]] = []  # loans whose tensors have been freed
        self._locks: list[tuple[torch.Tensor, Callable[[], None]]] = []
        self._refused = False
        self._lockable = 0  # bytes that can be locked before `pinnable` is queried again
        weakref.finalize(self, _unlock, self._locks).atexit = False

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uint8 of shape (size,), uninitialized; they are free again when that tensor dies."""
        self._collect()
        free = self._free.get(size)
        with torch.inference_mode(False):  # calls in another mode use the page too
            page = free.pop() if free else self._new(size)
            lent = page.view(-1)
        loan = _Loan(lent, self._back.append)  # a builtin: an exception raised in a callback would be lost
        loan.page = page
        self._loans.add(loan)
        return lent

    def _collect(self) -> None:
        while self._back:
            loan: Any = self._back.pop()
            self._loans.discard(loan)
            self._free.setdefault(loan.page.nbytes, []).append(loan.page)

    def _new(self, size: int) -> torch.Tensor:
        page = self._device.allocate_host(size)
        if not self._refused and self._may_lock(size):
            unlock = self._device.lock_pages(page)
            if unlock is None:
                self._refused = True
            else:
                self._locks.append((page, unlock))
                self._lockable -= size
        return page

    def _may_lock(self, size: int) -> bool:
        """Whether enough RAM can be locked; queried rarely, as a query takes almost as long as locking a page."""
        if self._lockable < size:
            self._lockable = min(self._device.pinnable(), max(size, ASK_EVERY))
        return self._lockable >= size

    def close(self) -> None:
        """Release all pages; lent ones stay valid for their holders, but are no longer page-locked."""
        self._free.clear()
        self._loans.clear()
        self._back.clear()
        self._refused = False
        _unlock(self._locks)


def _unlock(locks: list[tuple[torch.Tensor, Callable[[], None]]]) -> None:
    while locks:
        _, unlock = locks.pop()
        unlock()


PAGE = 8 * 2**20  # bytes of host memory per allocation: a fast link takes some hundred microseconds for them


class ActivationHostPool:
    """Host memory for tensors of `device`, and the streams that copy to and from it."""

    def __init__(self, device: Device) -> None:
        self.place = device.torch_device
        self.pages = PinnedPool(device)
        self.to_host_stream, self.inward = device.copy_stream(), device.copy_stream()
        self._under_way: dict[int, HostTransfer] = {}

    def tape(self, size: int) -> HostTape:
        """Return a new tape of `size` bytes."""
        return HostTape(self, size)

    def depart(self, stream: CopyStream, tensor: torch.Tensor) -> HostTransfer:
        """Register copies that will be sent on `stream` and read from `tensor` or write to it; keeps `tensor` alive."""
        crossing = HostTransfer(stream, tensor, self._under_way)
        self._under_way[id(crossing)] = crossing
        return crossing

    @property
    def idle(self) -> bool:
        """Whether no tensor is kept alive for copies in flight."""
        return not self._under_way

    def settle(self) -> None:
        """Make the device's compute stream wait for all copies, and release the tensors kept for them."""
        for crossing in list(self._under_way.values()):
            crossing.settle()

    def close(self) -> None:
        """Release the host memory."""
        self.settle()
        self.pages.close()


class HostTransfer:
    """Copies that belong together, and the device tensor that they read or write."""

    def __init__(self, stream: CopyStream, tensor: torch.Tensor, under_way: dict[int, HostTransfer]) -> None:
        self._stream, self._after = stream, stream.mark()
        self._tensor: torch.Tensor | None = tensor
        self._under_way = under_way
        self._copies: list[PendingCopy] = []

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.append(self._stream.send(target, source, self._after))

    def settle(self) -> None:
        """Make the device's compute stream wait for all of these copies, and release the tensor."""
        for copy in self._copies:
            copy.wait_on_device()
        self._copies.clear()
        self._tensor = None
        self._under_way.pop(id(self), None)

    def precede(self, stream: CopyStream) -> None:
        """Make copies that are sent on `stream` from now on begin after these."""
        for copy in self._copies:
            stream.follow(copy)


class HostTape:
    """`size` bytes in host memory: written sequentially, read at any offset, freed from the front.

    At most one write is in flight, the last one: the next write waits for it.
    """

    def __init__(self, host_pool: ActivationHostPool, size: int) -> None:
        self._host_pool, self._size = host_pool, size
        self._pages: dict[int, torch.Tensor] = {}  # by page number; a page returns to the pool when its tensor dies
        self.written = 0  # bytes written, or with a write in flight
        self._latest = 0  # offset of the last write
        self._writing: HostTransfer | None = None

    def write(self, source: torch.Tensor) -> None:
        """Append `source`, uint8 of shape (bytes,) on the device; do not modify it before the copy is complete."""
        self.sent()
        self._latest, self.written = self.written, self.written + source.nbytes
        crossing = self._writing = self._host_pool.depart(self._host_pool.to_host_stream, source)
        for page, part in self._parts(self._latest, source):
            crossing.send(page, part)

    def sent(self) -> None:
        """Make the device's compute stream wait until everything written is in host memory."""
        if self._writing is not None:
            self._writing.settle()
            self._writing = None

    def read(self, start: int, target: torch.Tensor) -> HostTransfer:
        """Start copying the bytes from `start` on into `target`, uint8 of shape (bytes,) on the device.

        Device work submitted after `settle()` of the returned transfer sees them; do not `forget` them before that.
        """
        if self._writing is not None and start + target.nbytes > self._latest:
            self._writing.precede(self._host_pool.inward)
        crossing = self._host_pool.depart(self._host_pool.inward, target)
        for page, part in self._parts(start, target):
            crossing.send(part, page)
        return crossing

    def forget(self, before: int) -> None:
        """Free the pages that hold only bytes before offset `before`."""
        for number in [number for number in self._pages if (number + 1) * PAGE <= before]:
            del self._pages[number]

    def _parts(self, start: int, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the slices of pages that hold the bytes from `start` on, each with the matching slice of `tensor`."""
        done, size = 0, tensor.nbytes
        while done < size:
            number, offset = divmod(start + done, PAGE)
            count = min(size - done, PAGE - offset)
            yield self._page(number)[offset : offset + count], tensor[done : done + count]
            done += count

    def _page(self, number: int) -> torch.Tensor:
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = self._host_pool.pages.take(min(PAGE, self._size - number * PAGE))
        return page


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` fill its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of the dense `tensor` as uint8 of shape (bytes,), a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
