"""Finds a home for masters: a buffer in host memory, or the files in which they are, or are written to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.apply.weights.disk import DiskStore, FileTensor, SpillFile, read_like, read_stored
from tightfit.apply.weights.eight_bits import StoredWeight
from tightfit.apply.weights.homes import HostStore, WeightStore, plain_parts
from tightfit.apply.weights.shelf import FileBackedWeights
from tightfit.apply.weights.staging import Stager
from tightfit.devices.disk import DiskReader
from tightfit.devices.seam import Device
from tightfit.records import ComponentPlan

__all__ = ["StoreFactory"]


class StoreFactory:
    """Of the weights that come to `device`; the `shelf` has what is in files alone."""

    def __init__(self, device: Device, shelf: FileBackedWeights) -> None:
        self._device, self._shelf = device, shelf
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
        self._shelf.fill(module)
        if self._spill is not None:
            self._spill.finish()

    def homes(self, plan: ComponentPlan, undo: ExitStack) -> Callable[[list[nn.Parameter]], WeightStore]:
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

        def home(masters: list[nn.Parameter]) -> WeightStore:
            stored = [self._on_disk(part, reader) for part in _plain(masters)]
            return DiskStore(stored, reader, stager, aligned=aligned)

        return home

    def _on_disk(self, tensor: torch.Tensor, reader: DiskReader) -> FileTensor:
        """Where `tensor` is as it is used; it is written where it is in no file, or not like that."""
        if id(tensor) in self._aside:
            return self._aside.pop(id(tensor))[1]
        stored = self._shelf.where(tensor)
        if stored is None:
            return self._spilling().write(tensor)
        same_layout = tensor.ndim < 4 or stored.strides == tensor.stride()  # kernels may be channels-last
        if same_layout and stored.dtype == tensor.dtype:
            return stored
        return self._spilling().write(read_like(tensor, stored, reader))

    def _spilling(self) -> SpillFile:
        if self._spill is None:
            self._spill = self._shelf.spill()
        return self._spill

    def _staging(self, undo: ExitStack) -> Stager:
        if self._stager is None:
            self._stager = Stager(self._device)
            undo.callback(self._stager.close)
        return self._stager


def _plain(masters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [part for master in masters for part in plain_parts(master)]
