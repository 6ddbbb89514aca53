"""How long a component's passes take on an accelerator, by what of its weights each moment of them needs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from tightfit.plan.streaming import group_layers
from tightfit.plan.stretches import (
    ComputeSegment,
    StripStageTiming,
    merge_segments,
    seconds_without_weights,
    segment_of,
)
from tightfit.plan.strips import strip_seconds_without_weights
from tightfit.records import (
    Accelerator,
    BlockUse,
    Component,
    ComponentCall,
    Footprint,
    Granularity,
    LayerWork,
    StripProfile,
    StripStageProfile,
)

__all__ = ["CostModel"]


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
