"""Costs of operations and feature maps on a card: each is tried once per layout, on a simulated card."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tightfit.apply.activations.attention_dispatch import AttentionDispatcher
from tightfit.devices.pinned_pool import PAGE
from tightfit.devices.simulated import SimulatedDevice
from tightfit.measure.passes import KernelCounter
from tightfit.plan.default_rates import ANY_CARD
from tightfit.schema.footprint import StripStageProfile
from tightfit.schema.machine import KernelGroup, LayerWork
from tightfit.simulator.backend import SIMULATOR_LOCK, cards_in_use, use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.kernel_costs import KernelCost
from tightfit.simulator.timeline import Host

__all__ = [
    "ANYTHING",
    "OpCostCache",
    "OpLayout",
    "Outcome",
    "StageCost",
    "cloning",
    "copying",
    "dense",
    "joining",
]


def copying(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Prepare copying the second tensor into the first."""
    return lambda: tensors[0].copy_(tensors[1])


def cloning(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return tensors[0].clone


def joining(axis: int) -> Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]:
    return lambda tensors: lambda: torch.cat(list(tensors), axis)


ENDLESS = 2**60  # bytes of the simulated card: trials never run out of memory
FEW = 2**16  # elements; the card keeps only the shapes of larger tensors

Prepare = Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor | None]]


class OpLayout(NamedTuple):
    """Layout of a tensor in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    memory: int  # bytes of the storage, which may hold more than this tensor

    def narrowed(self, axis: int, rows: int) -> OpLayout:
        """Return the layout of `rows` of its rows along `axis`."""
        if rows == self.shape[axis]:
            return self
        shape = (*self.shape[:axis], rows, *self.shape[axis + 1 :])
        return OpLayout(shape, self.strides, self.dtype, self.memory)

    @property
    def alone(self) -> bool:
        """Whether its storage holds nothing else."""
        return self.memory <= math.prod(self.shape) * self.dtype.itemsize


def dense(shape: Sequence[int], dtype: torch.dtype) -> OpLayout:
    """Return the contiguous layout of a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return OpLayout(tuple(shape), tuple(reversed(strides)), dtype, math.prod(shape) * dtype.itemsize)


ANYTHING = dense((), torch.float32)  # of a tensor that is only given for its device, that of new tensors


@dataclass(frozen=True, eq=False)
class Outcome:
    """Layout of a trial's result, and the kernels that ran."""

    layout: OpLayout
    works: tuple[KernelCost, ...]


class OpCostCache:
    """Operations tried on a simulated card of their own, with attention as in an autoencoder; results are cached."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Outcome] = {}

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Add the simulated card to those in use: operations are only tried inside."""
        with SIMULATOR_LOCK:
            before = cards_in_use()
            self._card = SimulatedCard(len(before), ANY_CARD.model_copy(update={"bytes": ENDLESS}), Host())
            use_cards((*before, self._card))
            try:
                device = SimulatedDevice(self._card.index)
                self._place = device.torch_device
                self._anything = torch.zeros((), device=self._place)
                with torch.no_grad(), AttentionDispatcher("auto", device).working():
                    yield
            finally:
                use_cards(before)

    def outcome(self, key: Hashable, layouts: Sequence[OpLayout], prepare: Prepare) -> Outcome:
        """Return the outcome of the operation that `prepare` makes of tensors with these `layouts`; cached by `key`."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._tried(layouts, prepare)
        return found

    def _tried(self, layouts: Sequence[OpLayout], prepare: Prepare) -> Outcome:
        tensors = [self._tensor(layout) for layout in layouts]
        run, works = prepare(tensors), list[KernelCost]()
        self._card.kernel_callbacks.append(works.append)
        try:
            result = run()
        finally:
            self._card.kernel_callbacks.clear()
        return Outcome(_layout_of(tensors[0] if result is None else result), tuple(works))

    def _tensor(self, layout: OpLayout) -> torch.Tensor:
        if layout is ANYTHING:
            return self._anything
        count = layout.memory // layout.dtype.itemsize
        few = count <= FEW or not layout.dtype.is_floating_point  # their values exist and may be read
        whole = (torch.zeros if few else torch.empty)(count, dtype=layout.dtype, device=self._place)
        return whole.as_strided(layout.shape, layout.strides)


def _layout_of(tensor: torch.Tensor) -> OpLayout:
    return OpLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes())


class StageCost:
    """Work of the current stage, by layer work."""

    def __init__(self, trials: OpCostCache) -> None:
        self._trials = trials
        self.begin()

    def begin(self) -> None:
        """Begin a stage."""
        self._turn, self._times = 0, 1
        self._strips: dict[int, set[int]] = defaultdict(set)  # strips that each layer work runs in
        self._done: dict[int, Counter[Outcome]] = defaultdict(Counter)
        self._copies = self._bytes_in = self._bytes_out = 0

    def at(self, turn: int, strips: Iterable[int] = (0,)) -> None:
        """Assign the operations that follow to layer work number `turn` of `strips`."""
        self._turn = turn
        self._strips[turn].update(strips)

    @contextlib.contextmanager
    def times(self, times: int) -> Iterator[None]:
        """Count each operation within the block so many times; copies once."""
        self._times = times
        yield
        self._times = 1

    def do(self, key: Hashable, layouts: Sequence[OpLayout], prepare: Prepare) -> OpLayout:
        """Count an operation; return the layout of its result."""
        return self.count(self._trials.outcome(key, layouts, prepare))

    def count(self, outcome: Outcome) -> OpLayout:
        """Count an operation with this outcome; return the layout of its result."""
        self._done[self._turn][outcome] += self._times
        return outcome.layout

    def bring(self, start: int, size: int) -> None:
        """Count a copy of `size` bytes from host memory, where they begin at `start`."""
        self._bytes_in += size
        self._copies += _pages(start, size)

    def send(self, start: int, size: int) -> None:
        """Count a copy in the other direction."""
        self._bytes_out += size
        self._copies += _pages(start, size)

    def stage(self, once: Sequence[str], layers: Sequence[str], strips: int, *, ahead: bool) -> StripStageProfile:
        """Return the profile: first the layer work of `once`, then that of `layers` in `strips` strips."""
        turns = {
            number: LayerWork(layer=layer, work=self._workloads(number))
            for number, layer in enumerate((*once, *layers))
            if number in self._strips
        }
        first = len(once)
        return StripStageProfile(
            strips=strips,
            prefetches=ahead,
            before_strips=tuple(turn for number, turn in turns.items() if number < first),
            layer_work=tuple(turn for number, turn in turns.items() if number >= first),
            strip_counts=tuple(len(self._strips[number]) for number in turns if number >= first),
            strip_ends=tuple(max(self._strips[number]) + 1 for number in turns if number >= first),
            copies=self._copies,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
        )

    def _workloads(self, turn: int) -> tuple[KernelGroup, ...]:
        tally = KernelCounter()
        for outcome, count in self._done[turn].items():
            for work in outcome.works:
                tally.add(work, count)
        return tally.workloads()


def _pages(start: int, size: int) -> int:
    """Number of host memory pages that the bytes span: each page is copied by itself."""
    return (start + size - 1) // PAGE - start // PAGE + 1 if size else 0
