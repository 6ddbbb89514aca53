"""How long a component's calls take on an accelerator, in strips or as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from itertools import groupby

from tightfit.plan.layer_selection import group_layers
from tightfit.plan.timeline import (
    Clocks,
    ComputeSegment,
    HostOverheads,
    StripStageTiming,
    TransferSimulator,
    in_order,
    merge_segments,
    seconds_without_weights,
    segment_of,
)
from tightfit.schema.footprint import (
    BlockUse,
    Component,
    ComponentCall,
    Footprint,
    LayerWork,
    Phase,
    StripProfile,
    StripStageProfile,
)
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import Granularity, VaePlan

__all__ = ["CostModel", "strip_profile_of", "strip_seconds_without_weights", "work_in_strips"]


class CostModel:
    """The passes of `component` on `device`, each worked out once."""

    def __init__(self, component: Component, device: Accelerator) -> None:
        self._device = device
        self._parcels = {grain: _parcels(component, grain) for grain in ("layer", "block")}
        self._known: dict[tuple[int, Granularity], tuple[ComponentCall, list[ComputeSegment]]] = {}
        self._laps: dict[tuple[int, float, Granularity | None], tuple[StripProfile, list[StripStageTiming]]] = {}
        self._alone: dict[tuple[int, float, Granularity | None], tuple[StripProfile, float]] = {}

    def stretches(self, done: ComponentCall, grain: Granularity = "layer") -> list[ComputeSegment]:
        """A pass from its beginning to its end, with all weights there, by what moves together.

        A block's layers are needed from its beginning on.
        """
        key = id(done), grain
        if key not in self._known:
            self._known[key] = done, self._joined(done, grain)  # with the pass, whose id stays its own
        return self._known[key][1]

    def _joined(self, done: ComponentCall, grain: Granularity) -> list[ComputeSegment]:
        parcels = self._parcels[grain]
        turns = ((turn, _parcel(parcels, use, turn.layer)) for use in done.block_uses for turn in use.layer_work)
        plain = (self._stretch(turn, parcel, grain)._replace(waits=turn.host_waits) for turn, parcel in turns)
        return merge_segments(plain, done.time_scale)

    def laps(self, way: StripProfile, pace: float, grain: Granularity | None) -> list[StripStageTiming]:
        """A pass done in this way, at the pass's own `pace`; without a `grain`, with all weights there."""
        key = id(way), pace, grain
        if key not in self._laps:
            self._laps[key] = way, [self._lap(leg, pace, grain) for leg in way.stages]
        return self._laps[key][1]

    def seconds_without_weights(
        self, done: ComponentCall, way: StripProfile | None = None, grain: Granularity | None = None
    ) -> float:
        """The seconds of a pass that waits for no weights, if it is done in this way.

        With a `grain` weights came before it, and are told of each use.
        """
        overhead = self._device.resident_overhead if grain else 0.0
        if way is None:
            return seconds_without_weights(self.stretches(done, grain or "layer"), overhead)
        grain = grain if overhead else None
        key = id(way), done.time_scale, grain
        if key not in self._alone:
            self._alone[key] = (
                way,
                strip_seconds_without_weights(self.laps(way, done.time_scale, grain), way.batch_items, overhead),
            )
        return self._alone[key][1]

    def _lap(self, leg: StripStageProfile, pace: float, grain: Granularity | None) -> StripStageTiming:
        parcels = self._parcels[grain] if grain else {}

        def stretches(turns: Iterable[LayerWork], share: float) -> list[ComputeSegment]:
            return merge_segments((self._stretch(turn, parcels.get(turn.layer, ""), grain) for turn in turns), share)

        by_runs = groupby(zip(leg.strip_counts, leg.layer_work, strict=True), lambda both: both[0])
        link, out = self._device.link_rate, self._device.link_rate_out or self._device.link_rate
        return StripStageTiming(
            leg.strips,
            leg.prefetches,
            stretches(leg.before_strips, pace),
            [(runs, found) for runs, some in by_runs for found in stretches((t for _, t in some), pace / runs)],
            pace * leg.copies * self._device.launch_overhead / leg.strips,
            leg.bytes_in / link / leg.strips if link else 0.0,
            leg.bytes_out / out / leg.strips if out else 0.0,
        )

    def _stretch(self, turn: LayerWork, parcel: str, grain: Granularity | None) -> ComputeSegment:
        gate = turn.layer if parcel and grain == "layer" else ""
        return segment_of(turn.work, self._device, parcel)._replace(gate=gate)

    def expected(self, grain: Granularity) -> list[str]:
        """What moves together, in the order of the model, as often as it is told to be needed."""
        parcels = list(self._parcels[grain].values())
        return parcels if grain == "layer" else list(dict.fromkeys(parcels))

    def leaf_seconds(self, footprint: Footprint, component: Component) -> dict[str, float] | None:
        """Seconds from the time when a leaf is needed until the next one is, in all kinds of passes together.

        None where the footprint was measured for no request.
        """
        passes = [done for phase in footprint.phases for done in phase.calls if done.component == component.name]
        if not passes:
            return None
        spent = dict.fromkeys((leaf.name for leaf in component.layers), 0.0)
        for done in passes:
            needed = None
            for stretch in self.stretches(done):
                needed = stretch.parcel or needed
                if needed is not None:
                    spent[needed] += stretch.seconds
        return spent


def _parcels(component: Component, grain: Granularity) -> dict[str, str]:
    """What each leaf moves together with."""
    return {leaf: parcel for parcel, leaves in group_layers(component, grain).items() for leaf in leaves}


def _parcel(parcels: dict[str, str], use: BlockUse, leaf: str) -> str:
    return use.block if use.block in parcels.values() else parcels.get(leaf, "")


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
