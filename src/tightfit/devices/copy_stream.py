"""A queue of copies between host memory and a device, asynchronous to the device's computation.

The host submits copies to the stream and continues; device work submitted after `CopyHandle.wait_on_device()` begins
when the copy is complete. Marks are points in the device's compute stream that a copy waits for before it writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CopyHandle", "CopyStream", "CudaCopyStream", "HostCopyStream", "LateCopyStream", "PendingCopy"]


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


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # compute streams seen so far, by (id, index, type)
_get_stream: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream: Callable[..., None] | None = getattr(torch._C, "_cuda_setStream", None)


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """Same as `torch.cuda.current_stream`, which takes 8 us to create an object on each call; this takes 0.3 us."""
    if _get_stream is None or device.index is None:
        return torch.cuda.current_stream(device)
    number = _get_stream(device.index)
    found = _streams.get(number)
    if found is None:
        if len(_streams) >= 1024:  # bound the cache where a stream is created for each call
            _streams.clear()
        found = _streams[number] = torch.cuda.current_stream(device)
    return found


class CudaCopyStream(CopyStream):
    """A separate CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._own = stream.stream_id, stream.device_index, stream.device_type
        self._marked: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None  # the last mark: its stream and event

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> PendingCopy:
        if after is not None:
            self._stream.wait_event(after)
        if _get_stream is None or _set_stream is None or torch.cuda.current_device() != self._own[1]:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
        else:  # the same without the context manager: 1 us instead of 21 us
            before = _get_stream(self._own[1])
            _set_stream(*self._own)
            try:
                target.copy_(source, non_blocking=True)
            finally:
                _set_stream(*before)
        return _CudaCopy(self._device, self._stream.record_event())

    def follow(self, copy: PendingCopy) -> None:
        assert isinstance(copy, _CudaCopy)
        self._stream.wait_event(copy.event)

    def mark(self) -> Any:
        stream = _current_stream(self._device)
        event = stream.record_event()
        self._marked = stream, event
        return event

    def follow_host(self) -> None:
        stream = _current_stream(self._device)
        if self._marked is not None and self._marked[0] != stream:
            stream.wait_event(self._marked[1])


class _CudaCopy(PendingCopy):
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self.event = device, event
        self._waited: torch.cuda.Stream | None = None  # the last stream that waited for the copy

    def wait_on_device(self) -> float:
        stream = _current_stream(self._device)
        if stream is not self._waited:  # resident weights are copied once, and waited for at each use
            stream.wait_event(self.event)
            self._waited = stream
        return 0.0

    def synchronize(self) -> None:
        self.event.synchronize()
