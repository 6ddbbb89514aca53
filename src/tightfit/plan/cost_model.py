"""How long a component's calls take on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from tightfit.catalog.cuda import PAGEABLE
from tightfit.plan.compute_segments import (
    ComputeSegment,
    StripRuns,
    StripStageTiming,
    merge_segments,
    seconds_without_weights,
    segment_of,
)
from tightfit.plan.layer_selection import group_layers
from tightfit.plan.strip_times import strip_seconds_without_weights
from tightfit.schema.footprint import (
    BlockUse,
    Component,
    ComponentCall,
    Footprint,
    StripProfile,
    StripStageProfile,
)
from tightfit.schema.machine import Accelerator, KernelGroup, LayerWork
from tightfit.schema.plan import Granularity

__all__ = ["CostModel"]


class CostModel:
    """Segments and times of `component`'s calls on `device`, each computed once."""

    def __init__(self, component: Component, device: Accelerator) -> None:
        self._device = device
        self._groups = {granularity: _groups(component, granularity) for granularity in ("layer", "block")}
        # what ids belong to is kept, so that they are not used again
        self._plain_segments: dict[int, tuple[Sequence[KernelGroup], ComputeSegment]] = {}  # by id() of layers' work
        self._segments: dict[tuple[int, Granularity], tuple[ComponentCall, list[ComputeSegment]]] = {}
        self._foretold: dict[tuple[int, Granularity], tuple[ComponentCall, list[str]]] = {}
        self._timings: dict[tuple[int, float, Granularity | None], tuple[StripProfile, list[StripStageTiming]]] = {}
        self._resident_seconds: dict[tuple[int, float, Granularity | None], tuple[StripProfile, float]] = {}

    def segments(self, call: ComponentCall, granularity: Granularity = "layer") -> list[ComputeSegment]:
        """Return the segments of a call in execution order, by the weight group that each needs.

        With granularity "block", a block's group is needed from the beginning of the block on.
        """
        key = id(call), granularity
        if key not in self._segments:
            self._segments[key] = call, self._joined(call, granularity)
        return self._segments[key][1]

    def foretold(self, call: ComponentCall, granularity: Granularity) -> list[str]:
        """Return the weight groups that a call announces when it begins, in order; none unless it shares its rows."""
        key = id(call), granularity
        if key not in self._foretold:
            segments = self.segments(call, granularity) if call.shares_rows else []
            self._foretold[key] = call, [segment.group for segment in segments if segment.group]
        return self._foretold[key][1]

    def decided_after(self, call: ComponentCall, granularity: Granularity) -> int:
        """Return how many segments of a call run before it is known that it leaves something out."""
        before = call.model_copy(update={"block_uses": call.block_uses[: call.left_out_from]})
        return len(self._joined(before, granularity))

    def halves(
        self, call: ComponentCall, granularity: Granularity = "layer"
    ) -> tuple[list[ComputeSegment], list[ComputeSegment]]:
        """Return the segments of a call's forward pass, and those of its backward pass."""
        forward, backward = call.block_uses[: call.backward_from], call.block_uses[call.backward_from :]
        first, second = (call.model_copy(update={"block_uses": half}) for half in (forward, backward))
        return self._joined(first, granularity), self._joined(second, granularity)

    def _joined(self, call: ComponentCall, granularity: Granularity) -> list[ComputeSegment]:
        groups = self._groups[granularity]
        uses = ((work, _group(groups, use, work.layer)) for use in call.block_uses for work in use.layer_work)
        plain = (self._segment(work, group, granularity)._replace(waits=work.host_waits) for work, group in uses)
        crossing = [self._crossing(call.crossing_bytes)] if call.crossing_bytes else []
        return [*crossing, *merge_segments(plain, call.time_scale)]

    def _crossing(self, size: int) -> ComputeSegment:
        """Return the copies of `size` bytes between two devices: out of one, through the host, into the other."""
        link, out = self._device.link_rate, self._device.link_rate_out or self._device.link_rate
        return ComputeSegment("", size / link + size / out if link and out else 0.0, 0.0)

    def timings(
        self, strip_profile: StripProfile, time_scale: float, granularity: Granularity | None
    ) -> list[StripStageTiming]:
        """Return the stages of a call with `strip_profile`; without a `granularity`, as if it needed no weights.

        `time_scale` is that of the call.
        """
        key = id(strip_profile), time_scale, granularity
        if key not in self._timings:
            self._timings[key] = (
                strip_profile,
                [self._timing(stage, time_scale, granularity) for stage in strip_profile.stages],
            )
        return self._timings[key][1]

    def seconds_without_weights(
        self, call: ComponentCall, strip_profile: StripProfile | None = None, granularity: Granularity | None = None
    ) -> float:
        """Return the seconds of a call that waits for no weights, with `strip_profile` (None: as a whole).

        With a `granularity`, weights are loaded before it, and each use of a group costs the host `resident_overhead`.
        """
        overhead = self._device.resident_overhead if granularity else 0.0
        if strip_profile is None:
            return seconds_without_weights(self.segments(call, granularity or "layer"), overhead)
        granularity = granularity if overhead else None
        key = id(strip_profile), call.time_scale, granularity
        if key not in self._resident_seconds:
            self._resident_seconds[key] = (
                strip_profile,
                strip_seconds_without_weights(
                    self.timings(strip_profile, call.time_scale, granularity), strip_profile.batch_items, overhead
                ),
            )
        return self._resident_seconds[key][1]

    def _timing(self, stage: StripStageProfile, time_scale: float, granularity: Granularity | None) -> StripStageTiming:
        groups = self._groups[granularity] if granularity else {}

        def segments(layer_work: Iterable[LayerWork], share: float) -> list[ComputeSegment]:
            found = (self._segment(work, groups.get(work.layer, ""), granularity) for work in layer_work)
            return merge_segments(found, share)

        runs = map(StripRuns, stage.strip_counts, stage.strip_ends)
        by_runs = groupby(zip(runs, stage.layer_work, strict=True), lambda both: both[0])
        link, out = self._device.link_rate, self._device.link_rate_out or self._device.link_rate
        return StripStageTiming(
            stage.strips,
            stage.prefetches,
            segments(stage.before_strips, time_scale),
            [
                (runs, found)
                for runs, some in by_runs
                for found in segments((work for _, work in some), time_scale / runs.strips)
            ],
            time_scale * stage.copies * self._device.launch_overhead / stage.strips,
            stage.bytes_in / link / stage.strips if link else 0.0,
            stage.bytes_out / out / stage.strips if out else 0.0,
        )

    def _segment(self, layer_work: LayerWork, group: str, granularity: Granularity | None) -> ComputeSegment:
        gate = layer_work.layer if group and granularity == "layer" else ""
        key = id(layer_work.work)  # that of equal work is the same
        if key not in self._plain_segments:
            self._plain_segments[key] = layer_work.work, segment_of(layer_work.work, self._device)
        segment = self._plain_segments[key][1]._replace(group=group, layer=gate, holds=layer_work.holds)
        link = self._device.link_rate
        if not (layer_work.copied_in and link):
            return segment
        launching = segment.launching + self._device.launch_overhead
        return segment._replace(launching=launching, copying=layer_work.copied_in / (link * PAGEABLE))

    def expected(self, granularity: Granularity) -> list[str]:
        """Return the weight groups in the order of the model: for "layer" once per layer of a group, else once."""
        groups = list(self._groups[granularity].values())
        return groups if granularity == "layer" else list(dict.fromkeys(groups))

    def layer_seconds(self, footprint: Footprint, component: Component) -> dict[str, float] | None:
        """Return by layer the seconds from when it is needed until the next one is, summed over all kinds of calls.

        None if the footprint has no call of `component`.
        """
        passes = [call for phase in footprint.phases for call in phase.calls if call.component == component.name]
        if not passes:
            return None
        spent = dict.fromkeys((layer.name for layer in component.layers), 0.0)
        for call in passes:
            needed = None
            for segment in self.segments(call):
                needed = segment.group or needed
                if needed is not None:
                    spent[needed] += segment.seconds + segment.copying
        return spent


def _groups(component: Component, granularity: Granularity) -> dict[str, str]:
    """Return the weight group of each layer."""
    return {layer: group for group, layers in group_layers(component, granularity).items() for layer in layers}


def _group(groups: dict[str, str], use: BlockUse, layer: str) -> str:
    return use.block if use.block in groups.values() else groups.get(layer, "")
