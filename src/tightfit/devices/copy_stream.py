"""A queue of copies between host memory and a device, beside the device's arithmetic.

The host gives copies to the lane and goes on; what it gives to the device after `Arrival.settle()` begins when the
copy is complete. Marks are points in the device's arithmetic, for which a copy waits before it writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["CopyHandle", "CopyStream", "HostCopyStream", "LateCopyStream", "PendingCopy"]


class CopyHandle:
    """A copy on its way; this one is complete."""

    def wait_on_device(self) -> float:
        """What the device is given from now on begins after the copy; returns seconds that the host waited."""
        return 0.0

    def cancel(self) -> None:
        """Nobody wants it any more; what its memory is used for from now on begins after it has come, or stopped."""
        self.wait_on_device()


class PendingCopy(CopyHandle):
    """One that was given to a lane already, which the host can wait for."""

    def synchronize(self) -> None:
        """The host waits until it is complete."""


class CopyStream(ABC):
    """Copies in the order in which they are sent."""

    @abstractmethod
    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        """Copies `source` to `target`, both uint8 and as long; one is on the device, one in host memory, or a shape.

        It begins when the device has done what it was given before `after` was marked. Both are there, and what is on
        the device is used for nothing else, until the arrival was settled.
        """

    def follow(self, copy: PendingCopy) -> None:
        """What is sent from now on begins after `copy`, which may be on its way on another lane."""
        copy.synchronize()

    def mark(self) -> Any:
        """The point after all that the device's arithmetic was given so far."""
        return None

    def follow_host(self) -> None:  # noqa: B027 - most devices have one stream
        """What the host gives the device from now on, perhaps on another stream, begins after the last mark."""


class HostCopyStream(CopyStream):
    """Where the CPU plays the device: copies at once, so that what comes too early destroys what is in use."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        target.copy_(source)
        return PendingCopy()


class LateCopyStream(CopyStream):
    """Copies when they are waited for, and not before: whatever is used without waiting has no values yet."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        return _LateCopy(target, source)


class _LateCopy(PendingCopy):
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self._turn = threading.Lock()

    def wait_on_device(self) -> float:
        self.synchronize()
        return 0.0

    def synchronize(self) -> None:
        with self._turn:
            if self._copy:
                target, source = self._copy
                target.copy_(source)
                self._copy = None
