"""Lower bounds on the time of a component's calls, whichever of its weights are resident, without a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from tightfit.plan.component_cost import ComponentCost
from tightfit.plan.compute_segments import ComputeSegment, StripStageTiming, in_order
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import WeightGroupSizes, small_tensor_bytes
from tightfit.schema.footprint import ComponentCall, StripProfile
from tightfit.schema.plan import ComponentPlan, Granularity

__all__ = ["LowerBounds", "Runs"]


# calls each time that a component is loaded: kind of call, number of consecutive ones, and their strip option
Runs = Sequence[tuple[ComponentCall, int, StripProfile | None]]

PIECES = 24  # pieces into which a call is cut


class LowerBounds:
    """Lower bounds on seconds and bytes of all plans that offload a component's weights to one place."""

    def __init__(
        self,
        cost: ComponentCost,
        groups: Mapping[Granularity, WeightGroupSizes],
        work: Sequence[Runs],
        cost_model: CostModel,
    ) -> None:
        """`cost` has the placement "offload"; `cost_model` is its cost model."""
        self._cost, self._groups, self._work, self._cost_model = cost, groups, work, cost_model
        self._small_bytes = small_tensor_bytes(cost.component)
        self._bounds: dict[Granularity, _StoreBounds] = {}

    def for_plan(self, plan: ComponentPlan) -> tuple[float, int]:
        """Return lower bounds for `plan`: seconds, and bytes loaded."""
        granularity: Granularity = plan.granularity or "layer"
        if granularity not in self._bounds:
            self._bounds[granularity] = _StoreBounds(
                self._cost, self._groups[granularity].sizes, self._work, self._cost_model, granularity
            )
        groups = self._groups[granularity]
        if plan.placement == "offload":
            capacity = min_bytes = groups.whole
        elif plan.resident_layers is None:
            capacity = max((plan.weight_memory or 0) - self._small_bytes, 0)
            min_bytes = max(capacity - groups.largest, 0)  # less than `largest` may be left over
        else:
            capacity = min_bytes = sum(groups.sizes[name] for name in plan.resident_layers) + (plan.ring_buffer or 0)
        return self._bounds[granularity].seconds(capacity), min_bytes + (0 if self._cost.on_cpu else self._small_bytes)


class _StoreBounds:
    """Lower bounds on seconds for one granularity."""

    def __init__(
        self,
        cost: ComponentCost,
        sizes: Mapping[str, int],
        work: Sequence[Runs],
        cost_model: CostModel,
        granularity: Granularity,
    ) -> None:
        def pieces(
            call: ComponentCall, strip_profile: StripProfile | None, most: float = 0.0
        ) -> _CallSegments | _StripBounds:
            if strip_profile is None:
                return _CallSegments(cost_model.segments(call, granularity), sizes)
            return _StripBounds(
                cost_model.timings(strip_profile, call.time_scale, granularity), strip_profile.batch_items, sizes, most
            )

        self._rate = cost.rate
        self._first_calls = 0.0  # seconds of the first call of each load, in which all weights are loaded
        self._later_calls: list[
            tuple[_CallSegments | _StripBounds, int]
        ] = []  # later calls, all in strips, and their number
        for (first, count, strip_profile), *later in work:
            self._first_calls += cost.begin_load(0.0)
            if strip_profile is None:
                self._first_calls += _first_call_seconds(cost_model.segments(first, granularity), sizes, cost)
            else:
                load_seconds = _first_call_seconds(
                    _one_after_another(cost_model.timings(strip_profile, first.time_scale, granularity)), sizes, cost
                )
                most = max(load_seconds, cost_model.seconds_without_weights(first, strip_profile))
                self._later_calls.append((pieces(first, strip_profile, most), 1))
            others = [(first, count - 1, strip_profile), *later]
            self._later_calls += [(pieces(call, how), runs) for call, runs, how in others if runs]

    def seconds(self, capacity: int) -> float:
        """Return the lower bound if `capacity` bytes of weights can be on the device at a time."""
        later = sum(runs * pieces.seconds(capacity, self._rate) for pieces, runs in self._later_calls)
        return self._first_calls + later


def _first_call_seconds(segments: Sequence[ComputeSegment], sizes: Mapping[str, int], cost: ComponentCost) -> float:
    """Return the least seconds of a first call: before a segment begins, all weights needed so far are loaded."""
    loaded, now, on_device = cost.launch * cost.rate, 0.0, set[str]()
    for segment in segments:
        if segment.group not in on_device:
            on_device.add(segment.group)
            loaded += sizes.get(segment.group, 0)
        now = max(now, loaded / cost.rate) + segment.seconds
    return now


class _CallSegments:
    """A later call in pieces. The host may have launched all of it while weights of the first call were loaded."""

    def __init__(self, segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> None:
        pieces = _pieces(segments, sizes)
        self._piece_seconds = [sum(segment.seconds for segment in piece) for piece in pieces]
        self._needed_bytes = [_cumulative_bytes(pieces[first:], sizes) for first in range(len(pieces))]

    def seconds(self, capacity: int, rate: float) -> float:
        """Return its least seconds if `capacity` bytes fit, and others are loaded at `rate` bytes/s."""
        min_seconds = [0.0]  # seconds until each cut
        for end in range(1, len(self._piece_seconds) + 1):
            work, longest = 0.0, 0.0
            for first in range(end - 1, -1, -1):
                work += self._piece_seconds[first]
                load_seconds = (self._needed_bytes[first][end - first - 1] - capacity) / rate
                longest = max(longest, min_seconds[first] + max(work, load_seconds))
            min_seconds.append(longest)
        return min_seconds[-1]


def _one_after_another(timings: Sequence[StripStageTiming]) -> list[ComputeSegment]:
    """Return the segments of a call in strips: of each stage the first strip in full, the others as one segment."""
    segments: list[ComputeSegment] = []
    for timing in timings:
        others = sum((runs.strips - 1) * segment.seconds for runs, segment in timing.layer_work)
        segments += [*timing.before_strips, *timing.strip(0), ComputeSegment("", others, 0.0)]
    return segments


class _StripBounds:
    """A call in strips for `items` items of a batch, one after another, with another lower bound of `most` seconds.

    It is cut wherever a weight group is needed again that was needed since the last cut.
    """

    def __init__(
        self, timings: Sequence[StripStageTiming], items: int, sizes: Mapping[str, int], most: float = 0.0
    ) -> None:
        self._items, self._other_bound = items, most
        self._rounds: Counter[tuple[float, int]] = Counter()  # seconds and needed bytes of each piece
        work, needed, on_device, last = 0.0, 0, set[str](), ""
        for segment in in_order(timings):
            if segment.group in on_device and segment.group != last:
                self._rounds[work, needed] += 1
                work, needed, on_device = 0.0, 0, set()
            if segment.group:
                if segment.group not in on_device:
                    needed += sizes.get(segment.group, 0)
                on_device.add(segment.group)
                last = segment.group
            work += segment.seconds
        self._rounds[work, needed] += 1

    def seconds(self, capacity: int, rate: float) -> float:
        """Return its least seconds if `capacity` bytes fit, and others are loaded at `rate` bytes/s."""
        rounds = (count * max(work, (needed - capacity) / rate) for (work, needed), count in self._rounds.items())
        return max(self._other_bound, self._items * sum(rounds))


def _pieces(segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> list[list[ComputeSegment]]:
    """Cut a call into about PIECES pieces of equal shares of compute time and needed bytes together."""
    work = sum(segment.seconds for segment in segments) or math.inf
    needed = sum(sizes.get(segment.group, 0) for segment in segments) or math.inf
    pieces: list[list[ComputeSegment]] = []
    share = 0.0  # share of the time plus share of the bytes: at most 2
    for segment in segments:
        if len(pieces) <= share / 2 * PIECES:
            pieces.append([])
        pieces[-1].append(segment)
        share += segment.seconds / work + sizes.get(segment.group, 0) / needed
    return pieces


def _cumulative_bytes(pieces: Sequence[Sequence[ComputeSegment]], sizes: Mapping[str, int]) -> list[int]:
    """Return the bytes of weights needed from the first piece to the end of each."""
    on_device: set[str] = set()
    needed, whole = list[int](), 0
    for piece in pieces:
        new = {segment.group for segment in piece} - on_device
        on_device |= new
        whole += sum(sizes.get(name, 0) for name in new)
        needed.append(whole)
    return needed
