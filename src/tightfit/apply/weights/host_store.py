"""Weights in host memory: one flat buffer for each group, page-locked where the plan says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tightfit.apply.weights.pinned_staging import PageLock, Stager
from tightfit.apply.weights.weight_store import ALIGNMENT, TensorLayout, WeightStore
from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.device import Device
from tightfit.devices.memory import arena, move_into

__all__ = ["HostStore"]


class HostStore(WeightStore):
    """One flat buffer in host memory; `tensors`, plain, become views of it."""

    writable = True

    def __init__(self, tensors: Sequence[torch.Tensor], device: Device, stager: Stager | None = None) -> None:
        """With a `stager`, memory that is not page-locked is sent through it."""
        offset, layouts = 0, []
        for tensor in tensors:
            layouts.append(TensorLayout(offset, tensor.dtype, tensor.shape, tensor.stride()))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.size, self.layouts = offset, tuple(layouts)
        shapes = any(tensor.is_meta for tensor in tensors)
        self.buffer = torch.empty(offset, dtype=torch.uint8, device="meta") if shapes else arena(offset)
        self.device, self.stager = device, stager
        self._wants_lock = False
        self._lock: PageLock | None = None
        if not shapes:
            for tensor, layout in zip(tensors, layouts, strict=True):
                move_into(layout.view(self.buffer), tensor)

    @property
    def lock_refused(self) -> bool:  # type: ignore[override]
        return self._wants_lock and self._lock is None

    @property
    def is_locked(self) -> bool:
        """Whether its pages are locked."""
        return self._lock is not None

    def lock_pages(self) -> bool:
        self._wants_lock, self._lock = True, PageLock.acquire(self.buffer, self.device)
        return self._lock is not None

    def unlock_pages(self) -> None:
        self._wants_lock = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def release(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def send(self, stream: CopyStream, target: torch.Tensor, after: Any) -> CopyHandle:
        if self._lock is not None or self.stager is None:
            return stream.send(target, self.buffer, after)
        return self.stager.send(stream, target, after, self._fill)

    def _fill(self, part: torch.Tensor) -> None:
        part.copy_(self.buffer)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors` are still views of the buffer."""
        return all(
            (tensor.dtype, tensor.shape, tensor.stride()) == (layout.dtype, layout.shape, layout.strides)
            and (tensor.is_meta or tensor.data_ptr() == self.buffer.data_ptr() + layout.offset)
            for tensor, layout in zip(tensors, self.layouts, strict=True)
        )

    def anew(self, tensors: Sequence[torch.Tensor]) -> HostStore:
        """Return a store for the current data of `tensors`, page-locked if this one should be."""
        locked = self._wants_lock
        self.unlock_pages()
        store = HostStore(tensors, self.device, self.stager)
        if locked:
            store.lock_pages()
        return store
