"""A pool of page-locked host memory for reuse: locking pages takes longer than copying them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tightfit.devices.device import Device

__all__ = ["PinnedPool"]

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
