"""Weights that are in files alone, and the store that is made for what is offloaded: a host buffer, or files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from tightfit.apply.weights.disk_store import DiskStore, FileTensor, SpillFile, read_like, read_stored
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.apply.weights.quantized_tensor import StoredWeight
from tightfit.apply.weights.weight_store import HostStore, WeightStore, plain_parts
from tightfit.devices.device import Device
from tightfit.devices.disk import DiskReader
from tightfit.schema.plan import ComponentPlan

__all__ = ["FileBackedWeights", "StoreFactory"]


class _Entry(NamedTuple):
    shape: nn.Parameter  # on "meta"
    stored: FileTensor
    weight: nn.Parameter  # what stands in its place once it has values, or is read as it is used


class FileBackedWeights:
    """Of one pipeline, whatever plans it follows."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by id of the shape
        self._asked: set[int] = set()  # of these, what the pipeline's plan needs there
        self._spills: list[SpillFile] = []
        self._earlier: list[SpillFile] = []  # of plans before
        self.resident = False  # whether what is in files is left there, because another plan follows

    def put(self, shape: nn.Parameter, stored: FileTensor, weight: nn.Parameter | None = None) -> nn.Parameter:
        """`shape` means what `stored` says, and becomes `weight` (None: a new parameter) when that is wanted."""
        if weight is None:
            weight = nn.Parameter(torch.empty(0, dtype=shape.dtype), shape.requires_grad)
        self._entries[id(shape)] = _Entry(shape, stored, weight)
        self._asked.add(id(shape))
        return shape

    def shape_of(self, weight: nn.Parameter, like: torch.Tensor, stored: FileTensor) -> nn.Parameter:
        """What means `weight`, laid out as `like`, that has no values any more."""
        shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return self.put(nn.Parameter(shape, weight.requires_grad), stored, weight)

    def where(self, shape: torch.Tensor) -> FileTensor | None:
        """Which file has what `shape` means; None of what has values."""
        entry = self._entries.get(id(shape))
        if entry is None:
            return None
        self._asked.add(id(shape))
        return entry.stored

    def weight_of(self, shape: nn.Parameter) -> nn.Parameter:
        """What takes the place of `shape`, without values; itself, if it has some."""
        entry = self._entries.get(id(shape))
        return shape if entry is None else entry.weight

    def filled(self, shape: nn.Parameter, reader: DiskReader) -> nn.Parameter:
        """What takes the place of `shape`, with its values."""
        entry = self._entries.get(id(shape))
        if entry is None:
            return shape
        if not entry.weight.numel():
            entry.weight.data = read_like(shape, entry.stored, reader)
        return entry.weight

    def fill(self, module: nn.Module, but: Collection[int] = ()) -> None:
        """Everything in `module` has its values, but for shapes whose ids are in `but`."""
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
        """A new file for weights that none has as they are used."""
        self._spills.append(SpillFile())
        return self._spills[-1]

    def begin(self) -> None:
        """A plan begins to be followed: what it asks for is needed, and what it has written."""
        self._asked.clear()
        self._earlier, self._spills = [*self._earlier, *self._spills], []

    def tidy(self) -> None:
        """The plan is followed: what it did not ask for is forgotten, and the files go that have nothing else."""
        self._entries = {key: self._entries[key] for key in self._asked}
        needed = {entry.stored.path for entry in self._entries.values()}
        for spill in self._earlier:
            if spill.path in needed:
                self._spills.append(spill)
            else:
                spill.close()
        self._earlier.clear()

    def close(self) -> None:
        """All has its values: the files go."""
        for spill in (*self._earlier, *self._spills):
            spill.close()
        self._entries.clear()
        self._earlier.clear()
        self._spills.clear()


class StoreFactory:
    """Of the weights that come to `device`; the `file_weights` has what is in files alone."""

    def __init__(self, device: Device, file_weights: FileBackedWeights) -> None:
        self._device, self._file_weights = device, file_weights
        self._aside: dict[int, tuple[torch.Tensor, FileTensor]] = {}  # which were written to the disk already, by id
        self._spill: SpillFile | None = None
        self._reader: DiskReader | None = None
        self._stager: Stager | None = None

    def set_aside(self, weight: StoredWeight) -> None:
        """`weight` goes to the disk right away: that is where it will be read from."""
        assert weight.nbytes  # it remembers them while its values are elsewhere
        for part in plain_parts(weight):
            self._aside[id(part)] = part, self._spilling().write(part)
            part.data = torch.empty(0, dtype=part.dtype)

    def settle(self, module: nn.Module) -> None:
        """All of `module` that goes to the disk is there; what is there but in no home, being small, is back."""
        if self._aside:
            with DiskReader() as reader:
                for part, stored in self._aside.values():
                    part.data = read_stored(stored, reader)
            self._aside.clear()
        self._file_weights.fill(module)
        if self._spill is not None:
            self._spill.finish()

    def stores(self, plan: ComponentPlan, undo: ExitStack) -> Callable[[list[nn.Parameter]], WeightStore]:
        """How to find a home for masters of a component that follows `plan`."""
        if plan.offload_to == "cpu":
            stager = self._staging(undo) if self._device.plain_copies_block else None
            return lambda masters: HostStore(_plain(masters), self._device, stager)
        stager = self._staging(undo) if self._device.separate and self._device.takes_threads else None
        if self._reader is None:
            self._reader = DiskReader()
            undo.callback(self._reader.close)
        reader = self._reader
        aligned = self._device.separate and self._device.torch_device.type != "cpu"

        def store(masters: list[nn.Parameter]) -> WeightStore:
            stored = [self._on_disk(part, reader) for part in _plain(masters)]
            return DiskStore(stored, reader, stager, aligned=aligned)

        return store

    def _on_disk(self, tensor: torch.Tensor, reader: DiskReader) -> FileTensor:
        """Where `tensor` is as it is used; it is written where it is in no file, or not like that."""
        if id(tensor) in self._aside:
            return self._aside.pop(id(tensor))[1]
        stored = self._file_weights.where(tensor)
        if stored is None:
            return self._spilling().write(tensor)
        same_layout = tensor.ndim < 4 or stored.strides == tensor.stride()  # kernels may be channels-last
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


def _plain(masters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [part for master in masters for part in plain_parts(master)]
