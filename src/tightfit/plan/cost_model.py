"""How long a component's calls take on an accelerator, in strips or as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from itertools import groupby

from tightfit.catalog.cuda import PAGEABLE
from tightfit.plan.compute_segments import (
    ComputeSegment,
    StripRuns,
    StripStageTiming,
    in_order,
    merge_segments,
    seconds_without_weights,
    segment_of,
)
from tightfit.plan.layer_selection import group_layers
from tightfit.plan.timeline import Clocks, HostOverheads, TransferSimulator
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

__all__ = ["CostModel", "strip_seconds_without_weights", "work_in_strips"]


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
            if (period := _period(states)) and period <= count:
                _, *later, offloaded_at, loaded_at = (
                    after - before for before, after in zip(states[-1 - period], states[-1], strict=True)
                )
                skipped = self._flow.skip(period * needed, count // period, Clocks(*later))
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
    def _state(self) -> tuple[float, ...]:
        """Number of future uses of weights that were looked at, and all clocks, that of the arithmetic first."""
        return self._flow.ahead, *self._flow.clocks, self._offloaded_at, self._loaded_at or 0.0


def _period(states: Sequence[tuple[float, ...]]) -> int:
    """Return after how many strips a state repeats what it did in them, as it has twice; 0: it does not.

    As much was looked at ahead, and the strips took longest on the clock of their arithmetic. What is in a ring buffer
    may repeat after several strips only.
    """
    took = [[after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(states)]
    for period in range(1, len(took) // 3 + 1):
        last, *earlier = (took[len(took) - turn * period :][:period] for turn in (1, 2, 3))
        if all(_equal(*pair) for other in earlier for pair in zip(last, other, strict=True)) and _repeats(last):
            return period
    return 0


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two strips took equally long on all clocks."""
    return all(abs(a - b) <= TOLERANCE * one[1] for a, b in zip(one, other, strict=True))


def _repeats(took: Sequence[Sequence[float]]) -> bool:
    ahead, computing, *others = map(sum, zip(*took, strict=True))
    return not ahead and max(others) <= (1 + TOLERANCE) * computing
