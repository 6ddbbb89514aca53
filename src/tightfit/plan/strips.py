"""How long an autoencoder takes in strips on an accelerator: a way's legs by that accelerator's rates.

This does with numbers what the runner does with maps (apply/activations/strips/runner.py, maps.py), while weights come
or are there (flow.py): what is computed, what comes from host memory and what goes there each have an engine of their
own, and the host launches ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tightfit.plan.flow import Clocks, HostOverheads, TransferSimulator
from tightfit.plan.stretches import ComputeSegment, StripStageTiming, in_order
from tightfit.records import Phase, StripProfile, VaePlan

__all__ = ["strip_profile_of", "strip_seconds_without_weights", "work_in_strips"]

ALIKE = 1e-6  # of its seconds, by which strips that take as long may differ


def strip_profile_of(phase: Phase, vae: VaePlan) -> StripProfile | None:
    """The way in which `vae` has the passes of `phase` done; None: as they were measured."""
    return next(
        (way for way in phase.strip_options if (way.strip_bytes, way.feature_maps) == (vae.strips, vae.feature_maps)),
        None,
    )


def strip_seconds_without_weights(laps: Sequence[StripStageTiming], items: int, overhead: float = 0.0) -> float:
    """The seconds of a pass that waits for no weights: the host takes `overhead` for each use of those in `laps`."""
    there = list(dict.fromkeys(stretch.parcel for stretch in in_order(laps) if stretch.parcel))
    overheads = HostOverheads(resident=overhead)
    flow = TransferSimulator(there, dict.fromkeys(there, 0), there, 0, float("inf"), overheads=overheads)
    return work_in_strips(laps, items, flow)


def work_in_strips(laps: Sequence[StripStageTiming], items: int, flow: TransferSimulator) -> float:
    """The seconds of a pass that is done like this, one of so many items after another, while weights come."""
    began, needed = flow.now, [stretch.parcel for stretch in in_order(laps) if stretch.parcel]
    flow.begin()
    for _ in range(items):
        flow.expect(needed)
        maps = _FeatureMapTraffic(flow)
        for lap, then in itertools.zip_longest(laps, laps[1:]):
            maps.work(lap, then)
        maps.settle()
    flow.end()
    return flow.now - began


class _FeatureMapTraffic:
    """Where what strips are made of comes from, and where they go."""

    def __init__(self, flow: TransferSimulator) -> None:
        self._flow = flow
        self._outward = flow.now  # when all that left so far has arrived
        self._there: float | None = None  # when what the next strip takes is there, if it was sent for

    def work(self, lap: StripStageTiming, then: StripStageTiming | None) -> None:
        """All strips of a lap. Where they go ahead, the last one sends for what the next lap takes first."""
        for stretch in lap.once:
            self._flow.do(stretch)
        even, number, clocks = lap.even, 0, [self._clocks]
        strip = lap.strip(0)
        needed = [stretch.parcel for stretch in strip if stretch.parcel]
        while number < lap.strips - 1:
            self._strip(lap, strip, lap)
            number += 1
            clocks = [*clocks[-3:], self._clocks]
            if even and _steady(clocks):
                *later, outward, there = (b - a for a, b in zip(*clocks[-2:], strict=True))
                skipped = self._flow.skip(needed, lap.strips - 1 - number, Clocks(*later))
                self._outward += skipped * outward
                self._there = self._there and self._there + skipped * there
                number, clocks = number + skipped, [self._clocks]
            strip = strip if even else lap.strip(number)
        self._strip(lap, strip, then)

    def _strip(
        self, lap: StripStageTiming, strip: Sequence[ComputeSegment], following: StripStageTiming | None
    ) -> None:
        """One of them. Where it goes ahead, it sends for what the one after it takes."""
        self._flow.launch(lap.launching)
        self._flow.wait(self._bring(lap) if self._there is None else self._there)
        self._there = self._bring(following) if lap.ahead and following else None
        for stretch in strip:
            self._flow.do(stretch)
        self._flow.wait(self._outward)  # one strip is on its way out at most
        if lap.going:
            self._outward = self._flow.now + lap.going
        if not lap.ahead:
            self.settle()

    def _bring(self, lap: StripStageTiming) -> float:
        """Sends for what a strip takes; when it is there."""
        return self._flow.bring(lap.coming) if lap.coming else self._flow.now

    def settle(self) -> None:
        """All that was kept has left."""
        self._flow.wait(self._outward)

    @property
    def _clocks(self) -> tuple[float, ...]:
        return *self._flow.clocks, self._outward, self._there or 0.0


def _steady(clocks: Sequence[tuple[float, ...]]) -> bool:
    """Whether each of three strips took as long for all, and for nothing longer than for its arithmetic."""
    if len(clocks) < 4:
        return False
    first, second, third = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(clocks))
    close = ALIKE * third[0]
    alike = all(max(each) - min(each) <= close for each in zip(first, second, third, strict=True))
    return alike and max(third) <= third[0] + close
