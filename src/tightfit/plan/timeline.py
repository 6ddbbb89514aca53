"""Compute segments and weight transfers of one component over time, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.plan.prefetch import Lease, PrefetchOrder, Ring
from tightfit.schema.footprint import KernelGroup
from tightfit.schema.machine import Accelerator

__all__ = [
    "Clocks",
    "ComputeSegment",
    "HostOverheads",
    "StripStageTiming",
    "TransferSimulator",
    "in_order",
    "merge_segments",
    "seconds_without_weights",
    "segment_of",
]


class ComputeSegment(NamedTuple):
    """What is done while one leaf, or what it moves together with, is needed, or nothing that moves ("")."""

    group: str
    seconds: float  # of the device
    launching: float  # seconds of the host, ahead of that
    waits: bool = False  # whether the host waits for it at its end
    gate: str = ""  # which of several layers that move together is at work


def segment_of(work: Iterable[KernelGroup], device: Accelerator, group: str = "") -> ComputeSegment:
    """Kernels one after another on `device`; what has no rate takes no time."""
    seconds = launching = 0.0
    for kernels in work:
        rate = device.arithmetic_rate(kernels.kind, kernels.dtype)
        arithmetic = kernels.operations / rate if rate else 0.0
        seconds += max(arithmetic, kernels.traffic / device.memory_rate if device.memory_rate else 0.0)
        launching += kernels.kernels * device.launch_overhead
    return ComputeSegment(group, seconds + launching if device.is_cpu else seconds, launching)


def seconds_without_weights(segments: Iterable[ComputeSegment], overhead: float = 0.0) -> float:
    """The seconds of a pass that waits for no weights; the host takes `overhead` for each use of what could move."""
    seconds = launching = 0.0
    for segment in segments:
        seconds, launching = seconds + segment.seconds, launching + segment.launching
        launching += overhead if segment.group else 0.0
        if segment.waits:
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
            segment
            for runs, segment in self.turns
            if not number or number * runs // self.strips > (number - 1) * runs // self.strips
        ]


def in_order(timings: Iterable[StripStageTiming]) -> Iterator[ComputeSegment]:
    """All that is done, one after another."""
    for timing in timings:
        yield from timing.once
        for number in range(timing.strips):
            yield from timing.strip(number)


def merge_segments(segments: Iterable[ComputeSegment], time_scale: float) -> list[ComputeSegment]:
    """Merge neighbours that need the same weights; arithmetic and launches take `time_scale` times as long."""
    found = list[ComputeSegment]()
    for group, seconds, launching, waits, gate in segments:
        paced = ComputeSegment(group, seconds * time_scale, launching * time_scale, waits, gate)
        if found and (found[-1].group, found[-1].gate) == (group, gate) and not found[-1].waits:
            before = found.pop()
            paced = ComputeSegment(
                group, before.seconds + paced.seconds, before.launching + paced.launching, waits, gate
            )
        found.append(paced)
    return found


class HostOverheads(NamedTuple):
    """Seconds of the host for each layer that comes and is used, and for each use of what is there."""

    streamed: float = 0.0
    resident: float = 0.0


NO_OVERHEADS = HostOverheads()


class Clocks(NamedTuple):
    """When all that was asked for so far is computed, launched, and there."""

    now: float
    host: float
    link: float


@dataclass
class _SimulatedArrival:
    """A group that is there, or on its way."""

    handle: float
    lease: Lease | None  # its place in the ring; None: it stays, or has memory of its own


class TransferSimulator:
    """Groups of `sizes` bytes over a link of `link_rate` bytes a second: those in `resident` once, others for each use.

    `guess` is the order in which they are expected to be used, until that is known. The host takes `launch` seconds
    for each piece of work, and `overheads` for each use. The computing stream has done all that it was given by `now`.
    """

    def __init__(
        self,
        guess: Sequence[str],
        sizes: Mapping[str, int],
        resident: Collection[str],
        ring: int,
        link_rate: float,
        launch: float = 0.0,
        now: float = 0.0,
        overheads: HostOverheads = NO_OVERHEADS,
    ) -> None:
        self.now = self._link = self._began = self._host = self._fed = now
        self._sizes, self._resident, self._rate, self._launch = sizes, set(resident), link_rate, launch
        self._overheads = overheads
        self._order, self._ring = PrefetchOrder(guess), Ring(ring)
        self._here: dict[str, _SimulatedArrival] = {}

    @property
    def complete(self) -> bool:
        """Whether nothing comes any more: all that is used stays, and is there."""
        return self._order.known and all(group in self._resident and group in self._here for group in self._order)

    @property
    def idle(self) -> float:
        """Seconds at the end of the last pass for which the link had nothing to bring for it."""
        return self.now - self._fed

    def work(self, segments: Iterable[ComputeSegment]) -> float:
        """The seconds that a pass takes in which groups are needed for these stretches."""
        began = self.now
        self.begin()
        for segment in segments:
            self.do(segment)
        self.end()
        return self.now - began

    def begin(self) -> None:
        """A pass begins: what is first needed starts to come."""
        self._fed = self.now
        self._order.begin()
        self._send_ahead()

    def end(self) -> None:
        """The pass has come to its end."""
        self._order.end()
        self._send_ahead()

    def expect(self, groups: Sequence[str]) -> None:
        """Of this pass it is known that these are needed from now on, in this order."""
        if self._order.expect(groups):
            self._send_ahead()
            self._drop(lambda other: not self._order.awaited(other))
            self._send_ahead()

    def do(self, segment: ComputeSegment) -> None:
        """Work, as soon as what it needs is there."""
        group, seconds, launching, waits, _ = segment
        if group:
            self._host += self._overheads.resident
            self._need(group)
        self._host += launching
        self.now = max(self.now + seconds, self._host)
        if waits:
            self._host = self.now
        if group:
            self._done(group)

    def launch(self, seconds: float) -> None:
        """The host is busy for so long."""
        self._host += seconds

    def bring(self, seconds: float) -> float:
        """Something else comes from host memory, which takes so long: when it is there."""
        self._link = max(self._link, self.now) + seconds
        return self._link

    def wait(self, until: float) -> None:
        """Nothing more is computed before that."""
        self.now = max(self.now, until)

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.now, self._host, self._link)

    def skip(self, groups: Sequence[str], most: int, later: Clocks) -> int:
        """What needs `groups`, one after another, is done again up to `most` times; returns how often.

        Each time that makes the clocks so much `later`. What comes after it has not been looked at then, unless
        nothing of this has to come.
        """
        there = all(group in self._resident and group in self._here for group in groups)
        times = most if there else max(most - self._order.ahead // len(groups), 0)
        if times:
            self._order.skip(times * len(groups), times * len(groups) * (not there))
            self.now, self._host, self._link = (a + times * b for a, b in zip(self.clocks, later, strict=True))
            for here in self._here.values():
                here.handle += times * later.now
        return times

    def _need(self, group: str) -> None:
        expected = self._order.used(group)
        if not expected:
            self._drop(lambda other: self._order.passed(other) and other != group)
        if group not in self._here and not self._send_if_room(group):
            self._drop(lambda other: other != group)
            if not self._send_if_room(group):
                self._send(group, self.now, None)
        handle = self._here[group].handle
        self.now, self._fed = max(self.now, handle), max(self._fed, handle)

    def _done(self, group: str) -> None:
        if group not in self._resident and not self._order.awaited(group):
            self._release(group)
            self._send_ahead()

    def _send_ahead(self) -> None:
        self._order.look_ahead(self._send_if_room)

    def _send_if_room(self, group: str) -> bool:
        if group in self._here:
            return True
        if group in self._resident:
            self._send(group, self._began, None)
            return True
        lease = self._ring.take(self._sizes[group])
        if lease is None:
            return False
        self._send(group, self._began if lease.after is None else lease.after, lease)
        return True

    def _send(self, group: str, after: float, lease: Lease | None) -> None:
        self._host += self._launch
        if group not in self._resident:
            self._host += self._overheads.streamed - self._overheads.resident
        self._link = max(self._link, after, self._host) + self._sizes[group] / self._rate
        self._here[group] = _SimulatedArrival(self._link, lease)

    def _release(self, group: str) -> None:
        lease = self._here.pop(group).lease
        if lease is not None:
            self._ring.give_back(lease, self.now)

    def _drop(self, which: Callable[[str], bool]) -> None:
        idle = [group for group in self._here if group not in self._resident and which(group)]
        for group in idle:
            self._release(group)
        if idle:
            self._order.look_again()
