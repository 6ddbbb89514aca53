"""Page-locked host memory that cannot be freed while the driver still has its address."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tightfit.devices.seam import Device

__all__ = ["PageLock"]


class PageLock:
    """Keeps a buffer alive until its pages are unlocked: by `release`, at the latest when this object is freed.

    The driver registers addresses. Where memory is unmapped while it is registered, whatever is mapped there next
    counts as page-locked, and copies go to and from the old pages.
    """

    def __init__(self, buffer: torch.Tensor, unlock: Callable[[], None]) -> None:
        self._release = weakref.finalize(self, _unlock, unlock, buffer)
        self._release.atexit = False  # the driver itself may be gone by then

    @classmethod
    def acquire(cls, buffer: torch.Tensor, device: Device) -> PageLock | None:
        """Page-locks `buffer` for copies to and from `device`; None where that is refused."""
        unlock = device.lock_pages(buffer)
        return None if unlock is None else cls(buffer, unlock)

    def release(self) -> None:
        """Waits for copies in flight and unlocks the pages; the second time it does nothing."""
        self._release()


def _unlock(unlock: Callable[[], None], buffer: torch.Tensor) -> None:
    unlock()
    del buffer  # not before
