"""How long work takes on an accelerator: a footprint's counts by that accelerator's rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tightfit.records import Accelerator, KernelGroup

__all__ = ["ComputeSegment", "StripStageTiming", "in_order", "merge_segments", "seconds_without_weights", "segment_of"]


class ComputeSegment(NamedTuple):
    """What is done while one leaf, or what it moves together with, is needed, or nothing that moves ("")."""

    parcel: str
    seconds: float  # of the device
    launching: float  # seconds of the host, ahead of that
    waits: bool = False  # whether the host waits for it at its end
    gate: str = ""  # which of several layers that move together is at work


def segment_of(work: Iterable[KernelGroup], device: Accelerator, parcel: str = "") -> ComputeSegment:
    """Kernels one after another on `device`; what has no rate takes no time."""
    seconds = launching = 0.0
    for kernels in work:
        rate = device.arithmetic_rate(kernels.kind, kernels.dtype)
        arithmetic = kernels.operations / rate if rate else 0.0
        seconds += max(arithmetic, kernels.traffic / device.memory_rate if device.memory_rate else 0.0)
        launching += kernels.kernels * device.launch_overhead
    return ComputeSegment(parcel, seconds + launching if device.is_cpu else seconds, launching)


def seconds_without_weights(stretches: Iterable[ComputeSegment], overhead: float = 0.0) -> float:
    """The seconds of a pass that waits for no weights; the host takes `overhead` for each use of what could move."""
    seconds = launching = 0.0
    for stretch in stretches:
        seconds, launching = seconds + stretch.seconds, launching + stretch.launching
        launching += overhead if stretch.parcel else 0.0
        if stretch.waits:
            seconds = launching = max(seconds, launching)
    return max(seconds, launching)


class StripStageTiming(NamedTuple):
    """A leg: what is done at its beginning, and strip by strip."""

    strips: int
    ahead: bool
    once: list[ComputeSegment]
    turns: list[tuple[int, ComputeSegment]]  # in how many strips, and what is done in each of these
    launching: float  # seconds of the host for copies, for each strip
    coming: float  # seconds of the link
    going: float

    @property
    def even(self) -> bool:
        """Whether all is done in every strip."""
        return all(runs == self.strips for runs, _ in self.turns)

    def strip(self, number: int) -> list[ComputeSegment]:
        """What is done in one of them: in the first all of it."""
        return [
            stretch
            for runs, stretch in self.turns
            if not number or number * runs // self.strips > (number - 1) * runs // self.strips
        ]


def in_order(laps: Iterable[StripStageTiming]) -> Iterator[ComputeSegment]:
    """All that is done, one after another."""
    for lap in laps:
        yield from lap.once
        for number in range(lap.strips):
            yield from lap.strip(number)


def merge_segments(stretches: Iterable[ComputeSegment], pace: float) -> list[ComputeSegment]:
    """Neighbours that need the same are one; their arithmetic and launches take `pace` times as long as they say."""
    found = list[ComputeSegment]()
    for parcel, seconds, launching, waits, gate in stretches:
        paced = ComputeSegment(parcel, seconds * pace, launching * pace, waits, gate)
        if found and (found[-1].parcel, found[-1].gate) == (parcel, gate) and not found[-1].waits:
            before = found.pop()
            paced = ComputeSegment(
                parcel, before.seconds + paced.seconds, before.launching + paced.launching, waits, gate
            )
        found.append(paced)
    return found
