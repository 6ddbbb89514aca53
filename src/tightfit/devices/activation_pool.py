"""Bytes of a device that wait in host memory: they go beside its arithmetic, and may come back ahead of need.

Nothing here lets the host wait for a copy from or to page-locked memory. What a copy reads or writes on the device is
kept until the device's own stream waits for the copy (`CopyStream`); so memory is never used again too early,
and how much is under way is up to who sends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tightfit.devices.copy_stream import CopyStream, PendingCopy
from tightfit.devices.device import Device
from tightfit.devices.pinned_pool import PinnedPool

__all__ = ["ActivationHostPool", "HostTape", "HostTransfer", "bytes_of", "is_dense"]

PAGE = 8 * 2**20  # bytes of host memory that are taken together: some hundred microseconds of a fast link


class ActivationHostPool:
    """Host memory for what is on `device`, and the copies there and back."""

    def __init__(self, device: Device) -> None:
        self.place = device.torch_device
        self.pages = PinnedPool(device)
        self.outward, self.inward = device.copy_stream(), device.copy_stream()
        self._under_way: dict[int, HostTransfer] = {}

    def tape(self, size: int) -> HostTape:
        """A new tape for `size` bytes."""
        return HostTape(self, size)

    def depart(self, stream: CopyStream, tensor: torch.Tensor) -> HostTransfer:
        """Copies are about to begin on `stream` that read from `tensor`, or write to it."""
        crossing = HostTransfer(stream, tensor, self._under_way)
        self._under_way[id(crossing)] = crossing
        return crossing

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for copies that are under way."""
        return not self._under_way

    def settle(self) -> None:
        """What the device is given from now on begins after all copies; nothing is kept for them any more."""
        for crossing in list(self._under_way.values()):
            crossing.settle()

    def close(self) -> None:
        """Gives its host memory up."""
        self.settle()
        self.pages.close()


class HostTransfer:
    """Copies that belong together, and the tensor on the device that they read or write."""

    def __init__(self, stream: CopyStream, tensor: torch.Tensor, under_way: dict[int, HostTransfer]) -> None:
        self._stream, self._after = stream, stream.mark()
        self._tensor: torch.Tensor | None = tensor
        self._under_way = under_way
        self._copies: list[PendingCopy] = []

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.append(self._stream.send(target, source, self._after))

    def settle(self) -> None:
        """What the device is given from now on begins after all of them; the tensor is not kept any more."""
        for copy in self._copies:
            copy.wait_on_device()
        self._copies.clear()
        self._tensor = None
        self._under_way.pop(id(self), None)

    def precede(self, stream: CopyStream) -> None:
        """What `stream` is given from now on begins after it."""
        for copy in self._copies:
            stream.follow(copy)


class HostTape:
    """`size` bytes in host memory, written from the first to the last, read anywhere, and forgotten from the first on.

    One piece is on its way there at most, the last: the next waits for it.
    """

    def __init__(self, host_pool: ActivationHostPool, size: int) -> None:
        self._host_pool, self._size = host_pool, size
        self._pages: dict[int, torch.Tensor] = {}  # by number; they are the depot's again when nobody holds them
        self.written = 0  # bytes that are there, or on their way
        self._latest = 0  # where those begin that were written last
        self._writing: HostTransfer | None = None

    def write(self, source: torch.Tensor) -> None:
        """Sends `source`, uint8 of shape (bytes,) on the device, which nobody writes into before it is there."""
        self.sent()
        self._latest, self.written = self.written, self.written + source.nbytes
        crossing = self._writing = self._host_pool.depart(self._host_pool.outward, source)
        for page, part in self._parts(self._latest, source):
            crossing.send(page, part)

    def sent(self) -> None:
        """What the device is given from now on begins when all that was written is in host memory."""
        if self._writing is not None:
            self._writing.settle()
            self._writing = None

    def read(self, start: int, target: torch.Tensor) -> HostTransfer:
        """Begins to bring the bytes from `start` on to `target`, uint8 of shape (bytes,) on the device.

        They are there for what the device is given after `settle()`, and not to be forgotten before.
        """
        if self._writing is not None and start + target.nbytes > self._latest:
            self._writing.precede(self._host_pool.inward)
        crossing = self._host_pool.depart(self._host_pool.inward, target)
        for page, part in self._parts(start, target):
            crossing.send(part, page)
        return crossing

    def forget(self, before: int) -> None:
        """The bytes `before` this one are not needed any more."""
        for number in [number for number in self._pages if (number + 1) * PAGE <= before]:
            del self._pages[number]

    def _parts(self, start: int, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of pages that are the tape's bytes from `start` on, each with its part of `tensor`."""
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
    """Whether the numbers of `tensor` lie side by side in its memory, in whatever order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, which is dense, as uint8 of shape (bytes,)."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
