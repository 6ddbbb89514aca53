"""A call in strips → its seconds, while weights and feature maps are copied.

Strips that repeat what those before them did are counted at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tightfit.plan.compute_segments import ComputeSegment, StripStageTiming, in_order
from tightfit.plan.timeline import Clocks, HostOverheads, TransferSimulator

__all__ = ["strip_seconds_without_weights", "work_in_strips"]

TOLERANCE = 1e-6  # relative difference up to which strips count as equally long
PERIOD = 8  # most strips that are looked at for a repetition


def strip_seconds_without_weights(timings: Sequence[StripStageTiming], items: int, overhead: float = 0.0) -> float:
    """Return the seconds of a call in strips that waits for no weights; a use of a group costs the host `overhead`."""
    groups = list(dict.fromkeys(segment.group for segment in in_order(timings) if segment.group))
    overheads = HostOverheads(resident=overhead)
    flow = TransferSimulator(groups, dict.fromkeys(groups, 0), groups, 0, float("inf"), overheads=overheads)
    return work_in_strips(timings, items, flow)


def work_in_strips(timings: Sequence[StripStageTiming], items: int, flow: TransferSimulator) -> float:
    """Simulate a call in strips, of `items` batch items one after another, while weights are loaded.

    Return its seconds.
    """
    began, needed = flow.now, [segment.group for segment in in_order(timings) if segment.group]
    flow.begin()
    for _ in range(items):
        flow.expect_uses(needed)
        maps = _FeatureMapTraffic(flow)
        for timing, then in itertools.zip_longest(timings, timings[1:]):
            maps.work(timing, then)
        maps.wait_for_offload()
    flow.end()
    return flow.now - began


class _FeatureMapTraffic:
    """Copies of feature maps between host and device for the strips of a call."""

    def __init__(self, flow: TransferSimulator) -> None:
        self._flow = flow
        self._offloaded_at = flow.now  # time at which all feature maps offloaded so far have arrived
        self._loaded_at: float | None = None  # time at which the next strip's inputs are loaded; None: not requested

    def work(self, timing: StripStageTiming, then: StripStageTiming | None) -> None:
        """Simulate all strips of a stage. If it prefetches, the last one requests the next stage's first inputs."""
        for segment in timing.before_strips:
            self._flow.run(segment)
        number, last = 0, timing.strips - 1
        while number < last:
            end = min(timing.alike_until(number), last)
            self._equal_strips(timing, timing.strip(number), end - number)
            number = end
        self._strip(timing, timing.strip(last), then)

    def _equal_strips(self, timing: StripStageTiming, strip: Sequence[ComputeSegment], count: int) -> None:
        """Simulate `count` strips with the same segments; at once those that take as long as the ones before them."""
        needed = [segment.group for segment in strip if segment.group]
        clocks = [self._clocks]
        seen: tuple[int, int, object] | None = None  # strips left, period, and contents where times first repeated
        while count:
            self._strip(timing, strip, timing)
            count -= 1
            clocks.append(self._clocks)
            period = _period(clocks)
            if not period or period >= count:  # the last strip may drop what the next ones do not need
                continue
            contents = self._flow.contents
            if seen == (count + period, period, contents):
                *later, offloaded_at, loaded_at = _between(clocks[-1 - period], clocks[-1])
                skipped = self._flow.skip(period * needed, (count - 1) // period, Clocks(*later))
                self._offloaded_at += skipped * offloaded_at
                self._loaded_at = self._loaded_at and self._loaded_at + skipped * loaded_at
                count, clocks = count - skipped * period, [self._clocks]
            if seen is None or seen[0] - count >= period:
                seen = count, period, contents

    def _strip(
        self, timing: StripStageTiming, strip: Sequence[ComputeSegment], following: StripStageTiming | None
    ) -> None:
        """Simulate one strip. If its stage prefetches, it requests the inputs of the strip after it."""
        self._flow.launch(timing.launching)
        self._flow.wait(self._load(timing) if self._loaded_at is None else self._loaded_at)
        self._loaded_at = self._load(following) if timing.prefetches and following else None
        for segment in strip:
            self._flow.run(segment)
        self._flow.wait(self._offloaded_at)  # at most one strip is being offloaded
        if timing.offload_seconds:
            self._offloaded_at = self._flow.now + timing.offload_seconds
        if not timing.prefetches:
            self.wait_for_offload()

    def _load(self, timing: StripStageTiming) -> float:
        """Request the inputs of a strip; return when they are loaded."""
        return self._flow.copy_in(timing.load_seconds) if timing.load_seconds else self._flow.now

    def wait_for_offload(self) -> None:
        """Wait until all feature maps are offloaded."""
        self._flow.wait(self._offloaded_at)

    @property
    def _clocks(self) -> tuple[float, ...]:
        """Seconds, those of the arithmetic first."""
        return *self._flow.clocks, self._offloaded_at, self._loaded_at or 0.0


def _period(clocks: Sequence[tuple[float, ...]]) -> int:
    """Return after how many strips their times repeat, as they have once; 0: they do not.

    They took longest on the clock of their arithmetic. What is in a ring buffer may repeat after several strips only.
    """
    now = clocks[-1][0]
    for period in range(1, min(PERIOD, (len(clocks) - 1) // 2) + 1):
        middle, start = clocks[-1 - period], clocks[-1 - 2 * period]
        if abs(now + start[0] - 2 * middle[0]) > TOLERANCE * (now - middle[0]):
            continue
        computing, *others = _between(middle, clocks[-1])
        took = [_between(*pair) for pair in itertools.pairwise(clocks[-1 - 2 * period :])]
        if max(others) <= (1 + TOLERANCE) * computing and all(map(_equal, took[:period], took[period:])):
            return period
    return 0


def _between(before: tuple[float, ...], after: tuple[float, ...]) -> list[float]:
    return [end - start for start, end in zip(before, after, strict=True)]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two strips took equally long on all clocks."""
    close = TOLERANCE * one[0]
    return all(abs(a - b) <= close for a, b in zip(one, other, strict=True))
