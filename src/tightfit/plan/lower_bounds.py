"""The least time of a component's calls, whichever of its weights are resident: known before anything is simulated."""

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

__all__ = ["LowerBounds", "Runs", "two_in_a_row"]


Runs = Sequence[
    tuple[ComponentCall, int, StripProfile | None]
]  # passes of one phase, how often each is done at a time, and how

PIECES = 24  # between which a pass may be cut


class LowerBounds:
    """What all plans have in common for weights at one home, and what each takes at the least."""

    def __init__(
        self,
        part: ComponentCost,
        groups: Mapping[Granularity, WeightGroupSizes],
        work: Sequence[Runs],
        time_scale: CostModel,
    ) -> None:
        """`part` is there by phases."""
        self._part, self._groups, self._work, self._cost_model = part, groups, work, time_scale
        self._small = small_tensor_bytes(part.component)
        self._known: dict[Granularity, _StoreBounds] = {}

    def of(self, plan: ComponentPlan) -> tuple[float, int]:
        """Seconds, and bytes that come."""
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
            least = max(room - groups.largest, 0)  # that may be left over
        else:
            room = least = sum(groups.sizes[name] for name in plan.resident_layers) + (plan.ring_buffer or 0)
        return self._known[granularity].seconds(room), least + (0 if self._part.on_cpu else self._small)

    def of_part(self, part: ComponentCost) -> float:
        """Seconds, where `part` decides which weights stay."""
        if part.plan.placement == "offload":
            return self.of(part.plan)[0]
        return self._known[part.plan.granularity or "layer"].settled(part)


class _StoreBounds:
    """The same, for what moves together."""

    def __init__(
        self,
        part: ComponentCost,
        sizes: Mapping[str, int],
        work: Sequence[Runs],
        time_scale: CostModel,
        granularity: Granularity,
    ) -> None:
        def pieces(done: ComponentCall, way: StripProfile | None, most: float = 0.0) -> _CallSegments | _StripBounds:
            if way is None:
                return _CallSegments(time_scale.segments(done, granularity), sizes)
            return _StripBounds(time_scale.timings(way, done.time_scale, granularity), way.batch_items, sizes, most)

        self._rate = part.rate
        self._first = 0.0  # seconds until all that phases need has come once
        self._again: list[
            tuple[_CallSegments | _StripBounds, int]
        ] = []  # later passes, and all in strips, and how many
        for (first, count, way), *later in work:
            self._first += part.come(0.0)
            if way is None:
                self._first += _coming(time_scale.segments(first, granularity), sizes, part)
            else:
                coming = _coming(
                    _one_after_another(time_scale.timings(way, first.time_scale, granularity)), sizes, part
                )
                self._again.append((pieces(first, way, max(coming, time_scale.seconds_without_weights(first, way))), 1))
            others = [(first, count - 1, way), *later]
            self._again += [(pieces(done, how), runs) for done, runs, how in others if runs]

    def seconds(self, room: int) -> float:
        """Where `room` bytes can be there at a time."""
        return self._first + sum(runs * pieces.seconds(room, self._rate) for pieces, runs in self._again)

    def settled(self, part: ComponentCost) -> float:
        """Where `part` decides which weights stay."""
        return self._first + sum(pieces.settled(part, runs) for pieces, runs in self._again)


def _coming(segments: Sequence[ComputeSegment], sizes: Mapping[str, int], part: ComponentCost) -> float:
    """Seconds of a first pass: by the time something begins, all that was needed until then has come."""
    came, now, there = part.launch * part.rate, 0.0, set[str]()
    for segment in segments:
        if segment.group not in there:
            there.add(segment.group)
            came += sizes.get(segment.group, 0)
        now = max(now, came / part.rate) + segment.seconds
    return now


class _CallSegments:
    """A later pass in pieces. Its host may have launched all of it while weights of the first were awaited."""

    def __init__(self, segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> None:
        self._segments = segments
        pieces = _pieces(segments, sizes)
        self._works = [sum(segment.seconds for segment in piece) for piece in pieces]
        self._wants = [_wanted(pieces[first:], sizes) for first in range(len(pieces))]

    def seconds(self, room: int, rate: float) -> float:
        """What it takes where `room` bytes can be there, and others come at `rate`."""
        least = [0.0]  # until each cut
        for end in range(1, len(self._works) + 1):
            work, longest = 0.0, 0.0
            for first in range(end - 1, -1, -1):
                work += self._works[first]
                coming = (self._wants[first][end - first - 1] - room) / rate
                longest = max(longest, least[first] + max(work, coming))
            least.append(longest)
        return least[-1]

    def settled(self, part: ComponentCost, runs: int) -> float:
        """What `runs` of them take, one after another, where `part` decides which weights stay.

        Those that are not played take as long as the last two that are.
        """
        one, two = two_in_a_row(self._segments, part.passing, part.plan.ring_buffer or 0, part.rate)
        return one + (runs - 1) * two / 2


def _one_after_another(timings: Sequence[StripStageTiming]) -> list[ComputeSegment]:
    """A pass in strips, with the first of each lap in full."""
    segments: list[ComputeSegment] = []
    for timing in timings:
        others = sum((runs - 1) * segment.seconds for runs, segment in timing.turns)
        segments += [*timing.once, *timing.strip(0), ComputeSegment("", others, 0.0)]
    return segments


class _StripBounds:
    """A pass in strips, so many items of a batch one after another, which takes `most` at the least for all else.

    It is cut wherever something is needed again that was needed since the last cut.
    """

    def __init__(
        self, timings: Sequence[StripStageTiming], items: int, sizes: Mapping[str, int], most: float = 0.0
    ) -> None:
        self._items, self._most = items, most
        self._rounds: Counter[tuple[float, int]] = Counter()  # seconds, and bytes that are needed
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
        """What it takes where `room` bytes can be there, and others come at `rate`."""
        rounds = (count * max(work, (wanted - room) / rate) for (work, wanted), count in self._rounds.items())
        return max(self._most, self._items * sum(rounds))

    def settled(self, part: ComponentCost, runs: int) -> float:
        """What `runs` of them take, where `part` decides which weights stay."""
        return runs * self.seconds(part.room, part.rate)


def _pieces(segments: Sequence[ComputeSegment], sizes: Mapping[str, int]) -> list[list[ComputeSegment]]:
    """Cut wherever another equal share of all arithmetic and of all that is needed has been done."""
    work = sum(segment.seconds for segment in segments) or math.inf
    needed = sum(sizes.get(segment.group, 0) for segment in segments) or math.inf
    pieces: list[list[ComputeSegment]] = []
    done = 0.0  # of 2
    for segment in segments:
        if len(pieces) <= done / 2 * PIECES:
            pieces.append([])
        pieces[-1].append(segment)
        done += segment.seconds / work + sizes.get(segment.group, 0) / needed
    return pieces


def _wanted(pieces: Sequence[Sequence[ComputeSegment]], sizes: Mapping[str, int]) -> list[int]:
    """Bytes that are needed from the first piece until the end of each."""
    there: set[str] = set()
    wanted, whole = list[int](), 0
    for piece in pieces:
        new = {segment.group for segment in piece} - there
        there |= new
        whole += sum(sizes.get(name, 0) for name in new)
        wanted.append(whole)
    return wanted


class _Use(NamedTuple):
    """Of what comes; and all that is done from then until the next."""

    group: str
    size: int  # bytes
    needed: float  # seconds for which it is at work
    later: float  # seconds


def two_in_a_row(
    segments: Sequence[ComputeSegment], passing: Mapping[str, int], ring: int, rate: float
) -> tuple[float, float]:
    """Seconds until a pass is done, and two of them, at the least.

    `passing` weights, of so many bytes each, come through a ring of `ring` bytes at `rate` bytes a second, in the order
    of their use. What fits into the ring is there at the beginning, and what is to be used again before others need its
    place stays in it.
    """
    lead, uses = _uses(segments, passing)
    following = [*uses, *uses]
    following.reverse()
    handles: deque[float] = deque()  # of what is in the ring, use by use
    arrived, awaited = dict.fromkeys(passing, 0.0), dict.fromkeys(passing, 0)
    now = link = -math.inf  # all that comes before the beginning is there in time
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
    """Seconds until something is needed that comes, and all that does."""
    lead, uses = 0.0, list[_Use]()
    for segment in segments:
        if segment.group in passing:
            uses.append(_Use(segment.group, passing[segment.group], segment.seconds, 0.0))
        elif uses:
            uses[-1] = uses[-1]._replace(later=uses[-1].later + segment.seconds)
        else:
            lead += segment.seconds
    return lead, uses
