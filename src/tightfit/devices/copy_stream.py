"""A queue of copies between host memory and a device, asynchronous to the device's computation.

The host submits copies to the stream and continues; device work submitted after `CopyHandle.wait_on_device()` begins
when the copy is complete. Marks are points in the device's compute stream that a copy waits for before it writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["CopyHandle", "CopyStream", "HostCopyStream", "LateCopyStream", "PendingCopy"]


class CopyHandle:
    """A copy in flight; this base class is a complete one."""

    def wait_on_device(self) -> float:
        """Make device work submitted from now on begin after the copy; return the seconds that the host waited."""
        return 0.0

    def cancel(self) -> None:
        """Give the copy up; work submitted from now on that uses its memory begins after it has finished or stopped."""
        self.wait_on_device()


class PendingCopy(CopyHandle):
    """A copy already submitted to a stream, which the host can wait for."""

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""


class CopyStream(ABC):
    """Copies that run in the order in which they are sent."""

    @abstractmethod
    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        """Copy `source` to `target`, both uint8 of equal length; one is on the device, one in host memory or on meta.

        The copy begins when the device has done the work submitted before `after` was marked. Both tensors must stay
        alive, and the device memory must not be reused, until `wait_on_device()` was called on the returned copy.
        """

    def follow(self, copy: PendingCopy) -> None:
        """Make copies sent from now on begin after `copy`, which may be in flight on another stream."""
        copy.synchronize()

    def mark(self) -> Any:
        """Return the point after all work submitted to the device's compute stream so far."""
        return None

    def follow_host(self) -> None:  # noqa: B027 - most devices have one stream
        """Make device work submitted from now on, perhaps on another compute stream, begin after the last mark."""


class HostCopyStream(CopyStream):
    """For a device emulated by the CPU: copies synchronously, so a copy sent too early overwrites data in use."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        target.copy_(source)
        return PendingCopy()


class LateCopyStream(CopyStream):
    """Copies only when waited for, so anything used without waiting has no valid values yet."""

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
