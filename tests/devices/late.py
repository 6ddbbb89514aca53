"""A card whose copies come at the last moment, both ways: whatever does not wait for them finds NaN."""

from __future__ import annotations

import weakref

import torch

from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.device import LoopbackDevice

__all__ = ["LateCard", "LateLane"]


class LateCard(LoopbackDevice):
    """Copies read what is there when they are waited for, and memory must not have been freed by then."""

    def copy_stream(self) -> CopyStream:
        return LateLane()


class LateLane(CopyStream):
    def send(self, target: torch.Tensor, source: torch.Tensor, after: object = None) -> CopyHandle:
        target.fill_(0xFF)  # NaN in every floating format
        return _Late(target, source)


class _Late(CopyHandle):
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._ends = [
            (weakref.ref(end.untyped_storage()), end.storage_offset(), end.numel()) for end in (target, source)
        ]
        self._done = False

    def wait_on_device(self) -> float:
        self.synchronize()
        return 0.0

    def synchronize(self) -> None:
        if not self._done:
            target, source = (_bytes(*end) for end in self._ends)
            target.copy_(source)
            self._done = True


def _bytes(there: weakref.ref[torch.UntypedStorage], offset: int, size: int) -> torch.Tensor:
    storage = there()
    assert storage is not None, "memory was freed before a copy was done with it"
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
