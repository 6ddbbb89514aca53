"""A call in strips → its seconds, while weights and feature maps are copied.

Strips that repeat what those before them did are counted at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

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
        needed, states = [segment.group for segment in strip if segment.group], [self._state]
        while count:
            self._strip(timing, strip, timing)
            count -= 1
            states = [*states[-3 * PERIOD :], self._state]
            if (period := _period(states)) and period < count:  # the last one may drop what the next do not need
                *later, offloaded_at, loaded_at = _seconds(states[-1 - period], states[-1])
                skipped = self._flow.skip(period * needed, (count - 1) // period, Clocks(*later))
                self._offloaded_at += skipped * offloaded_at
                self._loaded_at = self._loaded_at and self._loaded_at + skipped * loaded_at
                count -= skipped * period
                states = [self._state] if skipped else states

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
    def _state(self) -> _FlowState:
        return _FlowState(self._flow.contents, (*self._flow.clocks, self._offloaded_at, self._loaded_at or 0.0))


class _FlowState(NamedTuple):
    """State after a strip."""

    contents: tuple[Hashable, ...]  # of the ring buffer, and how far it is filled ahead
    clocks: tuple[float, ...]  # seconds, that of the arithmetic first


def _period(states: Sequence[_FlowState]) -> int:
    """Return after how many strips a state repeats what it did in them, as it has twice; 0: it does not.

    They took longest on the clock of their arithmetic. What is in a ring buffer may repeat after several strips only.
    """
    took = [_seconds(before, after) for before, after in itertools.pairwise(states)]
    for period in range(1, len(took) // 3 + 1):
        last, *earlier = (took[len(took) - turn * period :][:period] for turn in (1, 2, 3))
        if (
            states[-1].contents == states[-1 - period].contents == states[-1 - 2 * period].contents
            and all(_equal(*pair) for other in earlier for pair in zip(last, other, strict=True))
            and _computes_longest(_seconds(states[-1 - period], states[-1]))
        ):
            return period
    return 0


def _seconds(before: _FlowState, after: _FlowState) -> list[float]:
    return [end - start for start, end in zip(before.clocks, after.clocks, strict=True)]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two strips took equally long on all clocks."""
    return all(abs(a - b) <= TOLERANCE * one[0] for a, b in zip(one, other, strict=True))


def _computes_longest(took: Sequence[float]) -> bool:
    computing, *others = took
    return max(others) <= (1 + TOLERANCE) * computing
