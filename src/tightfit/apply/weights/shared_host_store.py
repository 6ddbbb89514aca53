"""Weights in memory that the processes of one computer share: nobody writes to it once the values are there.

Modules have placeholders for such weights, as for those in files, so what one process does to a weight (a fused LoRA, a
cast) stays in that process, and needs memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.apply.weights.weight_store import TensorLayout
from tightfit.devices.device import Device
from tightfit.devices.memory import copy_with_alignment
from tightfit.devices.memory_file import MemoryFile

__all__ = ["KeptRegions", "SharedHostStore", "SharedRegion"]


class SharedRegion(NamedTuple):
    """`size` bytes from `offset` on in a file in memory, in which there are tensors."""

    file: MemoryFile
    offset: int
    size: int

    @property
    def data(self) -> torch.Tensor:
        """The bytes, uint8 of shape (size,), for all processes; only read them."""
        return self.file.shared(self.offset, self.size)


class SharedHostStore(HostStore):
    """A buffer in shared memory, which has the same bytes as the HostStore that it replaces.

    It maps the memory as shared, not as private: a driver that locks pages of a private mapping, to write to them as
    far as it knows, makes the kernel copy each of them first. Each process locks the pages for itself.
    """

    writable = False

    def __init__(
        self, region: SharedRegion, layouts: tuple[TensorLayout, ...], device: Device, stager: Stager | None
    ) -> None:
        """`layouts` are of the tensors in `region`."""
        self.size, self.layouts, self.region = region.size, layouts, region
        self.device, self.stager, self.buffer = device, stager, region.data
        self._wants_lock, self._lock = False, None

    def values(self) -> list[torch.Tensor]:
        """Return views of the shared memory, to be copied."""
        return [layout.view(self.buffer) for layout in self.layouts]

    def kept(self) -> list[torch.Tensor]:
        """Return tensors with the values that take no memory until they are written to, which others do not see."""
        region = self.region.file.private(self.region.offset, self.size)
        return [layout.view(region) for layout in self.layouts]


class KeptRegions:
    """Source parameters that have their values in shared memory between two plans: the next one's stores may be there.

    What is written to them then is in this process alone.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _KeptRegion] = {}  # by address of the first tensor

    def keep(self, store: SharedHostStore, plain: Sequence[torch.Tensor]) -> None:
        """Give the values of `store` to the `plain` tensors of source parameters, without memory for them."""
        views = store.kept()
        for tensor, view in zip(plain, views, strict=True):
            tensor.data = view
        self._kept[views[0].data_ptr()] = _KeptRegion(store.region, store.layouts, views, plain)

    def store_of(
        self, tensors: Sequence[torch.Tensor], device: Device, stager: Stager | None
    ) -> SharedHostStore | None:
        """Return a store in shared memory for the plain `tensors`, if they have what `keep` gave them for one."""
        found = self._kept.get(tensors[0].data_ptr()) if tensors and not tensors[0].is_meta else None
        if found is None or not _are_same(tensors, found.views):
            return None
        return SharedHostStore(found.region, found.layouts, device, stager)

    def clear(self) -> None:
        """Give memory of their own to the tensors whose stores were not asked for."""
        while self._kept:
            _, kept = self._kept.popitem()
            for tensor, view in zip(kept.plain, kept.views, strict=True):
                if not tensor.is_meta and tensor.nbytes and tensor.data_ptr() == view.data_ptr():
                    tensor.data = copy_with_alignment(tensor.data)


class _KeptRegion(NamedTuple):
    """What tensors have of a region."""

    region: SharedRegion
    layouts: tuple[TensorLayout, ...]
    views: list[torch.Tensor]
    plain: Sequence[torch.Tensor]


def _are_same(tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> bool:
    """Whether `tensors` are at the addresses of `kept`, in the same layout."""
    return len(tensors) == len(kept) and all(
        (own.data_ptr(), own.dtype, own.shape, own.stride()) == (its.data_ptr(), its.dtype, its.shape, its.stride())
        for own, its in zip(tensors, kept, strict=True)
    )
