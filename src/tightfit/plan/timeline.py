"""Compute segments and weight transfers of one component over time, in seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.plan.prefetch import Lease, PrefetchOrder, Ring
from tightfit.plan.prefetch_policy import PrefetchPolicy
from tightfit.schema.kernel_time import kernel_seconds
from tightfit.schema.machine import EXCHANGES, Accelerator, KernelGroup

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
    """Work that needs one weight group, or none ("")."""

    group: str
    seconds: float  # of the device
    launching: float  # seconds of the host, before that
    waits: bool = False  # whether the host waits for its end
    layer: str = ""  # the layer that runs, of several in the group
    copying: float = 0.0  # seconds of the link for what its own code copies to the device then, while the host waits


def segment_of(work: Iterable[KernelGroup], device: Accelerator, group: str = "") -> ComputeSegment:
    """Return the kernels of `work`, one after another on `device`, as one segment; what has no rate takes no time.

    Exchanges of a ring run beside attention: of n parts of it, all but the last.
    """
    seconds = launching = attention = ring = rings = 0.0
    for kernels in work:
        if kernels.kind in EXCHANGES:
            exchange = device.exchange_seconds(kernels.kind, kernels.kernels, kernels.traffic)
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
    return ComputeSegment(group, seconds + launching if device.is_cpu else seconds, launching)


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


class StripStageTiming(NamedTuple):
    """Work and copies of one strip stage."""

    strips: int  # number of strips
    prefetches: bool  # whether feature maps are copied while another strip computes
    before_strips: list[ComputeSegment]  # before the first strip
    layer_work: list[tuple[int, ComputeSegment]]  # in how many strips a segment runs, and its work in each of these
    launching: float  # seconds of the host for copies, for each strip
    load_seconds: float  # seconds of the link to load feature maps, for each strip
    offload_seconds: float  # seconds of the link to offload feature maps, for each strip

    @property
    def even(self) -> bool:
        """Whether every segment runs in every strip."""
        return all(runs == self.strips for runs, _ in self.layer_work)

    def strip(self, number: int) -> list[ComputeSegment]:
        """Return the segments of strip `number`; the first strip (0) has all of them."""
        return [
            segment
            for runs, segment in self.layer_work
            if not number or number * runs // self.strips > (number - 1) * runs // self.strips
        ]


def in_order(timings: Iterable[StripStageTiming]) -> Iterator[ComputeSegment]:
    """Yield all segments of the stages in execution order."""
    for timing in timings:
        yield from timing.before_strips
        for number in range(timing.strips):
            yield from timing.strip(number)


def merge_segments(segments: Iterable[ComputeSegment], time_scale: float) -> list[ComputeSegment]:
    """Merge adjacent segments of the same group and layer; arithmetic and launches take `time_scale` times as long."""
    found = list[ComputeSegment]()
    for segment in segments:
        seconds, launching = segment.seconds * time_scale, segment.launching * time_scale
        if found and (found[-1].group, found[-1].layer) == (segment.group, segment.layer) and not found[-1].waits:
            before = found.pop()
            seconds, launching = before.seconds + seconds, before.launching + launching
        found.append(segment._replace(seconds=seconds, launching=launching))
    return found


class HostOverheads(NamedTuple):
    """Seconds of the host for each layer that is loaded and used, and for each use of a layer on the device."""

    streamed: float = 0.0
    resident: float = 0.0


NO_OVERHEADS = HostOverheads()


class Clocks(NamedTuple):
    """Times, in seconds, at which all work issued so far is finished."""

    now: float  # computed
    host: float  # launched
    link: float  # copied to the device


@dataclass
class _SimulatedArrival:
    """A weight group that is on the device, or is being loaded."""

    handle: float  # time at which it is loaded
    lease: Lease | None  # its place in the ring buffer; None: it is resident, or has memory of its own


class TransferSimulator(PrefetchPolicy[str]):
    """Simulation of a component's calls, with weight groups of `sizes` bytes loaded at `link_rate` bytes per second.

    Groups in `resident` are loaded once, others for each use, through a ring buffer of `ring` bytes. `guess` is the
    expected order of use until the order is known. The host takes `launch` seconds for each copy, and `overheads` for
    each use. The compute stream is idle from `now` on (seconds).
    """

    _loaded: dict[str, _SimulatedArrival]

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
        super().__init__(PrefetchOrder(guess), set(resident))
        self._sizes, self._rate, self._launch, self._overheads = sizes, link_rate, launch, overheads
        self._ring = Ring(ring)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to load: all groups in use are resident, and loaded."""
        return self._order.known and all(group in self._resident and group in self._loaded for group in self._order)

    @property
    def idle(self) -> float:
        """Seconds at the end of the last call in which the link had nothing to load for it."""
        return self.now - self._fed

    def work(
        self,
        segments: Iterable[ComputeSegment],
        *,
        left_out: Collection[str] = (),
        after: int = 0,
        then: Collection[str] = (),
    ) -> float:
        """Simulate a call that consists of `segments`; return its seconds.

        From the segment number `after` on, it is known that none of the groups `left_out` is needed in this call; from
        the beginning on, that none of the groups `then` is needed in the next one.
        """
        began = self.now
        self.begin()
        if self._usual is not None or then or (left_out and not after):
            self.leave_out(None if after else left_out or None, then or None)
        for number, segment in enumerate(segments):
            if left_out and number == after > 0:
                self.leave_out(left_out, then or None)
            self.run(segment)
        self.end()
        return self.now - began

    def begin(self) -> None:
        """Begin a call: start to load what is needed first.

        The host begins it when the last one has ended: most schedulers wait for the denoiser's prediction.
        """
        self._fed = self.now
        self._host = max(self._host, self.now)
        self._order.begin()
        self._send_ahead()

    def end(self) -> None:
        """End the call: start to load what the next one needs."""
        self._end_call()

    def run(self, segment: ComputeSegment) -> None:
        """Run `segment` as soon as the weights that it needs are loaded."""
        group = segment.group
        if group:
            self._host += self._overheads.resident
            self._need(group)
        self._host += segment.launching
        self.now = max(self.now + segment.seconds, self._host)
        if segment.copying:
            self.now = self._fed = self.copy_in(segment.copying)
        if segment.waits:
            self._host = self.now
        if group:
            self._used_up(group)

    def launch(self, seconds: float) -> None:
        """Keep the host busy for `seconds`."""
        self._host += seconds

    def copy_in(self, seconds: float) -> float:
        """Copy something else, in `seconds` of the link after what was sent before; return when it is on the device."""
        self._link = max(self._link, self.now) + seconds
        return self._link

    def wait(self, until: float) -> None:
        """Delay all further computation to the time `until`."""
        self.now = max(self.now, until)

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.now, self._host, self._link)

    def skip(self, groups: Sequence[str], most: int, later: Clocks) -> int:
        """Repeat the work that needs `groups`, in order, up to `most` times at once; return how many times.

        Each time advances the clocks by `later`. Unless all `groups` are resident and loaded, as many repetitions are
        left out as have been looked at ahead, so that what follows them has not been looked at yet.
        """
        resident = all(group in self._resident and group in self._loaded for group in groups)
        times = most if resident else max(most - self._order.ahead // len(groups), 0)
        if times:
            self._order.skip(times * len(groups), times * len(groups) * (not resident))
            self.now, self._host, self._link = (a + times * b for a, b in zip(self.clocks, later, strict=True))
            for arrival in self._loaded.values():
                arrival.handle += times * later.now
        return times

    def _need(self, group: str) -> None:
        self._use(group)
        handle = self._loaded[group].handle
        self.now, self._fed = max(self.now, handle), max(self._fed, handle)

    def _send_beside(self, group: str) -> None:
        self._send(group, self.now, None)

    def _send_if_room(self, group: str) -> bool:
        if group in self._loaded:
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
        self._loaded[group] = _SimulatedArrival(self._link, lease)

    def _release(self, group: str) -> None:
        lease = self._loaded.pop(group).lease
        if lease is not None:
            self._ring.give_back(lease, self.now)

    def _idle_in_ring(self) -> Iterator[str]:
        return (group for group in self._loaded if group not in self._resident)
