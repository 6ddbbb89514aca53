"""Weights that are in files and nowhere else: in their modules stand shapes, and here is which file has each.

So a pipeline is loaded without what its plan reads as it is used, and goes on under another plan without all of it
being read first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from tightfit.apply.weights.disk import FileTensor, SpillFile, read_like
from tightfit.devices.disk import DiskReader

__all__ = ["FileBackedWeights"]


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
        self.stays = False  # whether what is in files is left there, because another plan follows

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
