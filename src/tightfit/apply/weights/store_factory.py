"""Makes stores for offloaded weights, by the names in plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.apply.weights.disk_store import DiskStore, SpillFile, read_like, read_stored
from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.apply.weights.quantized_tensor import StoredWeight
from tightfit.apply.weights.weight_store import FileTensor, WeightStore, plain_parts
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.schema.plan import ComponentPlan

__all__ = ["STORE_MAKERS", "MakeStore", "StoreFactory"]


MakeStore = Callable[[list[torch.Tensor]], WeightStore]  # of plain tensors


class StoreFactory:
    """Makes stores of weights for `device`; `file_weights` has those that are only in files."""

    def __init__(self, device: Device, file_weights: FileBackedWeights) -> None:
        self._device, self._file_weights = device, file_weights
        self._aside: dict[int, tuple[torch.Tensor, FileTensor]] = {}  # plain tensors written to the disk already, by id
        self._spill: SpillFile | None = None
        self._reader: DiskReader | None = None
        self._stager: Stager | None = None

    def set_aside(self, weight: StoredWeight) -> None:
        """Write `weight` to the disk now, from where it will be read, and free its memory."""
        assert weight.nbytes  # cached by `nbytes`, which is needed when the values are gone
        for part in plain_parts(weight):
            self._aside[id(part)] = part, self._spilling().write(part)
            part.data = torch.empty(0, dtype=part.dtype)

    def finish(self, module: nn.Module) -> None:
        """Finish writing `module`'s weights; read back those that are in no store, because they are small."""
        if self._aside:
            with DiskReader() as reader:
                for part, stored in self._aside.values():
                    part.data = read_stored(stored, reader)
            self._aside.clear()
        self._file_weights.fill(module)
        if self._spill is not None:
            self._spill.finish()

    def stores(self, plan: ComponentPlan, undo: ExitStack) -> Callable[[list[nn.Parameter]], WeightStore]:
        """Return a function that makes a store for source parameters of a component that follows `plan`."""
        make = STORE_MAKERS[plan.offload_to](self, undo)
        return lambda source_params: make(
            [part for source_param in source_params for part in plain_parts(source_param)]
        )

    def host_stores(self, undo: ExitStack) -> MakeStore:
        """Return what makes a buffer in host memory."""
        stager = self._staging(undo) if self._device.plain_copies_block else None
        shared = self._file_weights.shared
        return lambda tensors: (
            shared.store_of(tensors, self._device, stager) or HostStore(tensors, self._device, stager)
        )

    def disk_stores(self, undo: ExitStack) -> MakeStore:
        """Return what makes a store that reads files."""
        stager = self._staging(undo) if self._device.separate and self._device.takes_threads else None
        if self._reader is None:
            self._reader = DiskReader()
            undo.callback(self._reader.close)
        reader = self._reader
        aligned = self._device.separate and self._device.torch_device.type != "cpu"
        return lambda tensors: DiskStore(
            [self._on_disk(tensor, reader) for tensor in tensors], reader, stager, aligned=aligned
        )

    def _on_disk(self, tensor: torch.Tensor, reader: DiskReader) -> FileTensor:
        """Return where `tensor` is in a file with its layout and dtype; write it where no file has it like that."""
        if id(tensor) in self._aside:
            return self._aside.pop(id(tensor))[1]
        stored = self._file_weights.where(tensor)
        if stored is None:
            return self._spilling().write(tensor)
        same_layout = tensor.ndim < 4 or stored.strides == tensor.stride()  # convolution kernels may be channels-last
        if same_layout and stored.dtype == tensor.dtype:
            return stored
        return self._spilling().write(read_like(tensor, stored, reader))

    def _spilling(self) -> SpillFile:
        if self._spill is None:
            self._spill = self._file_weights.spill()
        return self._spill

    def _staging(self, undo: ExitStack) -> Stager:
        if self._stager is None:
            self._stager = Stager(self._device)
            undo.callback(self._stager.close)
        return self._stager


# by names in `tightfit.schema.stores.STORES`; called with the factory and where to register what has to be closed
STORE_MAKERS: Mapping[str, Callable[[StoreFactory, ExitStack], MakeStore]] = {
    "cpu": StoreFactory.host_stores,
    "disk": StoreFactory.disk_stores,
}
