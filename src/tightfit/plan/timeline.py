"""Compute segments and weight transfers of one component over time, in seconds."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.plan.compute_segments import ComputeSegment
from tightfit.plan.prefetch import Lease, PrefetchOrder, Ring
from tightfit.plan.prefetch_policy import PrefetchPolicy

__all__ = ["Clocks", "HostOverheads", "TransferSimulator"]


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
        self._held: list[str] = []  # groups of segments that hold them
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
        foretold: Sequence[str] = (),
    ) -> float:
        """Simulate a call that consists of `segments`; return its seconds.

        `foretold`: the groups that it uses, in order, if it announces them when it begins.

        From the segment number `after` on, it is known that none of the groups `left_out` is needed in this call; from
        the beginning on, that none of the groups `then` is needed in the next one.
        """
        began = self.now
        self.begin()
        if self._usual is not None or then or (left_out and not after):
            self.leave_out(None if after else left_out or None, then or None)
        if foretold:
            self.expect_uses(foretold)
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
        if segment.exchanging:
            self.copy_in(segment.exchanging)
        self.now = max(self.now + segment.seconds, self._host)
        if segment.copying:
            self.now = self._fed = self.copy_in(segment.copying)
        if segment.waits:
            self._host = self.now
        if group and segment.holds:
            self._held.append(group)
        elif group:
            for used in dict.fromkeys((*self._held, group)):
                self._used_up(used)
            self._held.clear()

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
    def contents(self) -> tuple[Hashable, ...]:
        """What is loaded, where in the ring buffer, and how many future uses have been looked at."""
        return self._order.ahead, *self._loaded, *self._ring.places

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.now, self._host, self._link)

    def skip(self, groups: Sequence[str], most: int, later: Clocks) -> int:
        """Repeat the work that needs `groups`, in order, up to `most` times at once; return how many times.

        Each time advances the clocks by `later`. Unless all `groups` are resident and loaded, as many repetitions are
        left out as have been looked at ahead, so that what follows them has not been looked at yet.
        """
        resident = all(group in self._resident and group in self._loaded for group in groups)
        times = most if resident else max(most - math.ceil(self._order.ahead / len(groups)), 0)
        if times:
            self._order.skip(times * len(groups), times * len(groups) * (not resident))
            self.now, self._host, self._link = (a + times * b for a, b in zip(self.clocks, later, strict=True))
            for group in self._loaded.keys() & set(groups):  # others arrive when they did
                self._loaded[group].handle += times * later.now
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
        return (group for group in self._loaded if group not in self._resident and group not in self._held)
