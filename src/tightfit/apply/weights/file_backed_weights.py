"""Weights that are only in files: what modules have in their place, and where their values are."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from tightfit.apply.weights.disk_store import SpillFile, read_like
from tightfit.apply.weights.shared_host_store import KeptRegions
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.devices.disk import DiskReader

__all__ = ["FileBackedWeights"]


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
