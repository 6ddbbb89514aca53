"""Lower bounds on the time of a component's calls, whichever of its weights are resident, without a simulation."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tightfit.plan.component_cost import ComponentCost
from tightfit.plan.cost_model import CostModel
from tightfit.plan.layer_selection import WeightGroupSizes, small_tensor_bytes
from tightfit.plan.timeline import ComputeSegment, StripStageTiming, in_order
from tightfit.schema.footprint import ComponentCall, StripProfile
from tightfit.schema.plan import ComponentPlan, Granularity

__all__ = ["LowerBounds", "Runs", "two_call_bound"]


# calls each time that a component is loaded: kind of call, number of consecutive ones, and their strip option
Runs = Sequence[tuple[ComponentCall, int, StripProfile | None]]

PIECES = 24  # pieces into which a call is cut


class LowerBounds:
    """Lower bounds on seconds and bytes of all plans that offload a component's weights to one place."""

    def __init__(
        self,
        part: ComponentCost,
        groups: Mapping[Granularity, WeightGroupSizes],
        work: Sequence[Runs],
        cost_model: CostModel,
    ) -> None:
        """`part` has the placement "offload"; `cost_model` is its cost model."""
        self._part, self._groups, self._work, self._cost_model = part, groups, work, cost_model
        self._small = small_tensor_bytes(part.component)
        self._known: dict[Granularity, _StoreBounds] = {}

    def of(self, plan: ComponentPlan) -> tuple[float, int]:
        """Return lower bounds for `plan`: seconds, and bytes loaded."""
        granularity: Granularity = plan.granularity or "layer"
        if granularity not in self._known:
            self._known[granularity] = _StoreBounds(
                self._part, self._groups[granularity].sizes, self._work, self._cost_model, granularity
            )
        groups = self._groups[granularity]
        if plan.placement == "offload":
            room = least = groups.whole
        elif plan.resident_layers is None:
            room = max((plan.weight_memory or 0) - self._small, 0)
            least = max(room - groups.largest, 0)  # less than `largest` may be left over
        else:
            room = least = sum(groups.sizes[name] for name in plan.resident_layers) + (plan.ring_buffer or 0)
        return self._known[granularity].seconds(room), least + (0 if self._part.on_cpu else self._small)

    def of_part(self, part: ComponentCost) -> float:
        """Return the lower bound in seconds for `part`, in which resident weights are resolved."""
        if part.plan.placement == "offload":
            return self.of(part.plan)[0]
        return self._known[part.plan.granularity or "layer"].settled(part)


class _StoreBounds:
    """Lower bounds on seconds for one granularity."""

    def __init__(
        self,
        part: ComponentCost,
        sizes: Mapping[str, int],
        work: Sequence[Runs],
        cost_model: CostModel,
        granularity: Granularity,
    ) -> None:
        def pieces(done: ComponentCall, way: StripProfile | None, most: float = 0.0) -> _CallSegments | _StripBounds:
            if way is None:
                return _CallSegments(cost_model.segments(done, granularity), sizes)
            return _StripBounds(cost_model.timings(way, done.time_scale, granularity), way.batch_items, sizes, most)

        self._rate = part.rate
        self._first = 0.0  # seconds of the first call each time that it is loaded, in which all weights are loaded
        self._later_calls: list[
            tuple[_CallSegments | _StripBounds, int]
        ] = []  # later calls, all in strips, and their number
        for (first, count, way), *later in work:
            self._first += part.begin_load(0.0)
            if way is None:
                self._first += _coming(cost_model.segments(first, granularity), sizes, part)
            else:
                coming = _coming(
                    _one_after_another(cost_model.timings(way, first.time_scale, granularity)), sizes, part
                )
                self._later_calls.append(
                    (pieces(first, way, max(coming, cost_model.seconds_without_weights(first, way))), 1)
                )
            others = [(first, count - 1, way), *later]
            self._later_calls += [(pieces(done, how), runs) for done, runs, how in others if runs]

    def seconds(self, room: int) -> float:
        """Return the lower bound if `room` bytes of weights can be on the device at a time."""
        return self._first + sum(runs * pieces.seconds(room, self._rate) for pieces, runs in self._later_calls)

    def settled(self, part: ComponentCost) -> float:
        """Return the lower bound for `part`, in which resident weights are resolved."""
        return self._first + sum(pieces.settled(part, runs) for pieces, runs in self._later_calls)


def _coming(segments: Sequence[ComputeSegment], sizes: Mapping[str, int], part: ComponentCost) -> float:
    """Return the least seconds of a first call: before a segment begins, all weights needed so far are loaded."""
    came, now, there = part.launch * part.rate, 0.0, set[str]()
    for segment in segments:
        if segment.group not in there:
            there.add(segment.group)
            came += sizes.get(segment.group, 0)
        now = max(now, came / part.rate) + segment.seconds
    return now


class _CallSegments:
    """A later call in pieces. The host may have launched all of it while weights of the first call were loaded."""

    def __init__(self, segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> None:
        self._segments = segments
        pieces = _pieces(segments, sizes)
        self._works = [sum(segment.seconds for segment in piece) for piece in pieces]
        self._wants = [_wanted(pieces[first:], sizes) for first in range(len(pieces))]

    def seconds(self, room: int, rate: float) -> float:
        """Return its least seconds if `room` bytes can be on the device, and others are loaded at `rate` bytes/s."""
        least = [0.0]  # seconds until each cut
        for end in range(1, len(self._works) + 1):
            work, longest = 0.0, 0.0
            for first in range(end - 1, -1, -1):
                work += self._works[first]
                coming = (self._wants[first][end - first - 1] - room) / rate
                longest = max(longest, least[first] + max(work, coming))
            least.append(longest)
        return least[-1]

    def settled(self, part: ComponentCost, runs: int) -> float:
        """Return the least seconds of `runs` consecutive calls for `part`, in which resident weights are resolved.

        After the first, each counts as half of two consecutive calls.
        """
        one, two = two_call_bound(self._segments, part.passing, part.plan.ring_buffer or 0, part.rate)
        return one + (runs - 1) * two / 2


def _one_after_another(timings: Sequence[StripStageTiming]) -> list[ComputeSegment]:
    """Return the segments of a call in strips: of each stage the first strip in full, the others as one segment."""
    segments: list[ComputeSegment] = []
    for timing in timings:
        others = sum((runs - 1) * segment.seconds for runs, segment in timing.layer_work)
        segments += [*timing.before_strips, *timing.strip(0), ComputeSegment("", others, 0.0)]
    return segments


class _StripBounds:
    """A call in strips for `items` items of a batch, one after another, with another lower bound of `most` seconds.

    It is cut wherever a weight group is needed again that was needed since the last cut.
    """

    def __init__(
        self, timings: Sequence[StripStageTiming], items: int, sizes: Mapping[str, int], most: float = 0.0
    ) -> None:
        self._items, self._most = items, most
        self._rounds: Counter[tuple[float, int]] = Counter()  # seconds and needed bytes of each piece
        work, wanted, there, last = 0.0, 0, set[str](), ""
        for segment in in_order(timings):
            if segment.group in there and segment.group != last:
                self._rounds[work, wanted] += 1
                work, wanted, there = 0.0, 0, set()
            if segment.group:
                if segment.group not in there:
                    wanted += sizes.get(segment.group, 0)
                there.add(segment.group)
                last = segment.group
            work += segment.seconds
        self._rounds[work, wanted] += 1

    def seconds(self, room: int, rate: float) -> float:
        """Return its least seconds if `room` bytes can be on the device, and others are loaded at `rate` bytes/s."""
        rounds = (count * max(work, (wanted - room) / rate) for (work, wanted), count in self._rounds.items())
        return max(self._most, self._items * sum(rounds))

    def settled(self, part: ComponentCost, runs: int) -> float:
        """Return the least seconds of `runs` calls for `part`, in which resident weights are resolved."""
        return runs * self.seconds(part.weight_memory, part.rate)


def _pieces(segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> list[list[ComputeSegment]]:
    """Cut a call into about PIECES pieces of equal shares of compute time and needed bytes together."""
    work = sum(segment.seconds for segment in segments) or math.inf
    needed = sum(sizes.get(segment.group, 0) for segment in segments) or math.inf
    pieces: list[list[ComputeSegment]] = []
    done = 0.0  # share of the time plus share of the bytes: at most 2
    for segment in segments:
        if len(pieces) <= done / 2 * PIECES:
            pieces.append([])
        pieces[-1].append(segment)
        done += segment.seconds / work + sizes.get(segment.group, 0) / needed
    return pieces


def _wanted(pieces: Sequence[Sequence[ComputeSegment]], sizes: Mapping[str, int]) -> list[int]:
    """Return the bytes of weights needed from the first piece to the end of each."""
    there: set[str] = set()
    wanted, whole = list[int](), 0
    for piece in pieces:
        new = {segment.group for segment in piece} - there
        there |= new
        whole += sum(sizes.get(name, 0) for name in new)
        wanted.append(whole)
    return wanted


class _Use(NamedTuple):
    """One use of a streamed weight group, with the work until the next use."""

    group: str
    size: int  # bytes
    needed: float  # seconds of work that need the group
    later: float  # seconds of work from then until the next use


def two_call_bound(
    segments: Sequence[ComputeSegment], passing: Mapping[str, int], ring: int, rate: float
) -> tuple[float, float]:
    """Return the least seconds until one call, and until two consecutive calls, have ended.

    `passing` weight groups (bytes by name) pass through a ring buffer of `ring` bytes at `rate` bytes per second, in
    order of use. What fits the ring buffer is loaded at the beginning, and a group that is used again before its bytes
    are needed for others remains in it.
    """
    lead, uses = _uses(segments, passing)
    following = [*uses, *uses]
    following.reverse()
    handles: deque[float] = deque()  # arrival times of what is in the ring buffer, by use
    arrived, awaited = dict.fromkeys(passing, 0.0), dict.fromkeys(passing, 0)
    now = link = -math.inf  # what is loaded before the beginning arrives in time
    free = ring

    def send() -> None:
        nonlocal link, free
        while following and (awaited[following[-1].group] or following[-1].size <= free):
            group, size, _, _ = following.pop()
            if not awaited[group]:
                free -= size
                link = (now if now > link else link) + size / rate
                arrived[group] = link
            awaited[group] += 1
            handles.append(arrived[group])

    send()
    now, ends = 0.0, list[float]()
    for _ in range(2):
        now += lead
        for group, size, needed, later in uses:
            handle = handles.popleft()
            now = (now if now > handle else handle) + needed
            awaited[group] -= 1
            if not awaited[group]:
                free += size
                send()
            now += later
        ends.append(now)
    return ends[0], ends[1]


def _uses(segments: Sequence[ComputeSegment], passing: Mapping[str, int]) -> tuple[float, list[_Use]]:
    """Return the seconds until the first streamed weight group is needed, and all uses of such groups."""
    lead, uses = 0.0, list[_Use]()
    for segment in segments:
        if segment.group in passing:
            uses.append(_Use(segment.group, passing[segment.group], segment.seconds, 0.0))
        elif uses:
            uses[-1] = uses[-1]._replace(later=uses[-1].later + segment.seconds)
        else:
            lead += segment.seconds
    return lead, uses
