"""Weights that are only in files, and the factory of stores for offloaded weights: host buffers or files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from tightfit.apply.weights.disk_store import DiskStore, SpillFile, read_like, read_stored
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.apply.weights.quantized_tensor import StoredWeight
from tightfit.apply.weights.shared_store import KeptRegions
from tightfit.apply.weights.weight_store import FileTensor, HostStore, WeightStore, plain_parts
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.schema.plan import ComponentPlan

__all__ = ["STORE_MAKERS", "FileBackedWeights", "MakeStore", "StoreFactory"]


class _FileEntry(NamedTuple):
    shape: nn.Parameter  # on "meta", in place of the weight
    stored: FileTensor
    weight: nn.Parameter  # replaces `shape` once it has values, or is read on use


class FileBackedWeights:
    """Weights of one pipeline that are only in files, across plans; modules have "meta" parameters for them."""

    def __init__(self) -> None:
        self._entries: dict[int, _FileEntry] = {}  # by id of the shape
        self._left_in_files: set[int] = set()  # of these, those that the current plan leaves in files
        self._spills: list[SpillFile] = []
        self._earlier: list[SpillFile] = []  # of earlier plans
        self.shared = KeptRegions()  # what of shared memory source parameters have until the next plan is followed
        self.keep_in_files = False  # whether weights are left in files, because another plan follows

    def put(self, shape: nn.Parameter, stored: FileTensor, weight: nn.Parameter | None = None) -> nn.Parameter:
        """Register and return `shape` for the tensor in `stored`; `weight` (None: a new one) will replace it."""
        if weight is None:
            weight = nn.Parameter(torch.empty(0, dtype=shape.dtype), shape.requires_grad)
        self._entries[id(shape)] = _FileEntry(shape, stored, weight)
        self._left_in_files.add(id(shape))
        return shape

    def shape_of(self, weight: nn.Parameter, like: torch.Tensor, stored: FileTensor) -> nn.Parameter:
        """Register and return a "meta" parameter, laid out as `like`, for `weight`, whose values are in `stored`."""
        shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return self.put(nn.Parameter(shape, weight.requires_grad), stored, weight)

    def where(self, shape: torch.Tensor) -> FileTensor | None:
        """Return the file tensor that `shape` stands for; None if `shape` has values."""
        entry = self._entries.get(id(shape))
        if entry is None:
            return None
        self._left_in_files.add(id(shape))
        return entry.stored

    def weight_of(self, shape: nn.Parameter) -> nn.Parameter:
        """Return the parameter that replaces `shape`, not loaded; `shape` itself if it has values."""
        entry = self._entries.get(id(shape))
        return shape if entry is None else entry.weight

    def filled(self, shape: nn.Parameter, reader: DiskReader) -> nn.Parameter:
        """Return the parameter that replaces `shape`, loaded."""
        entry = self._entries.get(id(shape))
        if entry is None:
            return shape
        if not entry.weight.numel():
            entry.weight.data = read_like(shape, entry.stored, reader)
        return entry.weight

    def fill(self, module: nn.Module, but: Collection[int] = ()) -> None:
        """Load all weights of `module`, except shapes whose ids are in `but`."""
        tables = [owner._parameters for owner in module.modules()]
        waiting = [
            (table, name, shape)
            for table in tables
            for name, shape in table.items()
            if shape is not None and id(shape) in self._entries and id(shape) not in but
        ]
        if waiting:
            with DiskReader() as reader:
                for table, name, shape in waiting:
                    table[name] = self.filled(shape, reader)

    def spill(self) -> SpillFile:
        """Create a file for weights that no file has in the layout and dtype used."""
        self._spills.append(SpillFile())
        return self._spills[-1]

    def begin(self) -> None:
        """Begin to apply a plan: record which weights it asks for, and which files it writes."""
        self._left_in_files.clear()
        self._earlier, self._spills = [*self._earlier, *self._spills], []

    def tidy(self) -> None:
        """Finish applying a plan: forget weights that it did not ask for, and delete files that are not needed."""
        self._entries = {key: self._entries[key] for key in self._left_in_files}
        needed = {entry.stored.path for entry in self._entries.values()}
        for spill in self._earlier:
            if spill.path in needed:
                self._spills.append(spill)
            else:
                spill.close()
        self._earlier.clear()
        self.shared.clear()

    def close(self) -> None:
        """Delete the temporary files, once all weights are loaded."""
        for spill in (*self._earlier, *self._spills):
            spill.close()
        self._entries.clear()
        self._earlier.clear()
        self._spills.clear()
        self.shared.clear()


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
