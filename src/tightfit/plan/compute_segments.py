"""Work of a component's calls in pieces, by the weights that each needs, and their seconds on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tightfit.schema.kernel_time import kernel_seconds
from tightfit.schema.machine import EXCHANGES, Accelerator, KernelGroup

__all__ = [
    "ComputeSegment",
    "StripRuns",
    "StripStageTiming",
    "in_order",
    "merge_segments",
    "seconds_without_weights",
    "segment_of",
]


class ComputeSegment(NamedTuple):
    """Work that needs one weight group, or none ("")."""

    group: str
    seconds: float  # of the device
    launching: float  # seconds of the host, before that
    waits: bool = False  # whether the host waits for its end
    layer: str = ""  # the layer that runs, of several in the group
    holds: bool = False  # whether the group's memory is free only when that of the next group is
    copying: float = 0.0  # seconds of the link for what its own code copies to the device then, while the host waits
    exchanging: float = 0.0  # seconds of the link that exchanges with other ranks take meanwhile


def segment_of(work: Iterable[KernelGroup], device: Accelerator, group: str = "") -> ComputeSegment:
    """Return the kernels of `work`, one after another on `device`, as one segment; what has no rate takes no time.

    Exchanges of a ring run beside attention: of n parts of it, all but the last.
    """
    seconds = launching = attention = ring = rings = link = 0.0
    for kernels in work:
        if kernels.kind in EXCHANGES:
            exchange = device.exchange_seconds(kernels.kind, kernels.kernels, kernels.traffic)
            link += device.exchange_link_seconds(kernels.kind, kernels.traffic)
            if kernels.kind.endswith("ring"):
                ring, rings = ring + exchange, rings + kernels.kernels
            else:
                seconds += exchange
            continue
        computing = kernel_seconds(device, kernels.kind, kernels.dtype, kernels.amounts, kernels.kernels)
        attention += computing if kernels.kind.endswith("attention") else 0.0
        seconds += computing
        launching += kernels.kernels * device.launch_overhead + kernels.module_calls * device.module_overhead
    seconds += max(ring - attention * rings / (rings + 1), 0.0)
    on_device = seconds + launching if device.is_cpu else seconds
    return ComputeSegment(group, on_device, launching, exchanging=link)


def seconds_without_weights(segments: Iterable[ComputeSegment], overhead: float = 0.0) -> float:
    """Return the seconds of a call that waits for no weights; the host takes `overhead` for each use of a group.

    No segment ends before the host has launched all of it, as in `TransferSimulator.run`.
    """
    seconds = launching = 0.0
    for segment in segments:
        launching += segment.launching + (overhead if segment.group else 0.0)
        seconds = max(seconds + segment.seconds, launching) + segment.copying
        if segment.waits:
            launching = seconds
    return seconds


class StripRuns(NamedTuple):
    """In which strips work runs: in the first one, and then at even intervals."""

    strips: int  # in how many
    end: int  # number of the strip after the last one

    def at(self, number: int) -> bool:
        """Whether it runs in strip `number` (from 0)."""
        strips, end = self
        return not number or (number < end and number * strips // end > (number - 1) * strips // end)


class StripStageTiming(NamedTuple):
    """Work and copies of one strip stage."""

    strips: int  # number of strips
    prefetches: bool  # whether feature maps are copied while another strip computes
    before_strips: list[ComputeSegment]  # before the first strip
    layer_work: list[tuple[StripRuns, ComputeSegment]]  # in which strips a segment runs, and its work in each of these
    launching: float  # seconds of the host for copies, for each strip
    load_seconds: float  # seconds of the link to load feature maps, for each strip
    offload_seconds: float  # seconds of the link to offload feature maps, for each strip

    def strip(self, number: int) -> list[ComputeSegment]:
        """Return the segments of strip `number`; the first strip (0) has all of them."""
        return [segment for runs, segment in self.layer_work if runs.at(number)]

    def alike_until(self, number: int) -> int:
        """Return the number of a strip up to which all from strip `number` on have the same segments."""
        left = [runs for runs, _ in self.layer_work if runs.end > number]
        if any(runs.strips < runs.end for runs in left):
            return number + 1
        return min((runs.end for runs in left), default=self.strips)


def in_order(timings: Iterable[StripStageTiming]) -> Iterator[ComputeSegment]:
    """Yield all segments of the stages in execution order."""
    for timing in timings:
        yield from timing.before_strips
        for number in range(timing.strips):
            yield from timing.strip(number)


def merge_segments(segments: Iterable[ComputeSegment], time_scale: float) -> list[ComputeSegment]:
    """Merge adjacent segments of the same group and layer; all but copies take `time_scale` times as long."""
    found = list[ComputeSegment]()
    for segment in segments:
        seconds, launching = segment.seconds * time_scale, segment.launching * time_scale
        exchanging = segment.exchanging * time_scale
        if found and (found[-1].group, found[-1].layer) == (segment.group, segment.layer) and not found[-1].waits:
            before = found.pop()
            seconds, launching = before.seconds + seconds, before.launching + launching
            exchanging += before.exchanging
        found.append(segment._replace(seconds=seconds, launching=launching, exchanging=exchanging))
    return found
