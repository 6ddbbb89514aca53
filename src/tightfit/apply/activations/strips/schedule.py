"""A stage and a number of strips → which rows each node makes in which strip, what it holds, and the peak.

Integers only: no tensor is touched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.stages import Graph, Stage

__all__ = ["Keeping", "Kept", "Peak", "Step", "make_schedule", "peak_of"]


class Step(NamedTuple):
    """Rows `span` of `node` are made (or fetched, where they were kept); what it held begins at `held`.

    Then each of `trims` lets go of all rows before the given one.
    """

    node: int
    span: Span
    held: int
    trims: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Keeping:
    """Where the maps wait that stages keep for each other: those in `host` in host memory, the others on the device."""

    host: frozenset[int] = frozenset()


def make_schedule(graph: Graph, stage: Stage, count: int, first: int | None = None) -> list[list[Step]]:
    """`stage` in `count` strips; only the `first` of them, where that is given.

    The first rows of what is wanted need more rows of what it is made of than later ones: so there are fewer of them.
    """
    lead = _Walk(graph, stage, count, 1).lead() if count > 1 else 0.0
    return _Walk(graph, stage, count, min(first or count, count), lead).strips()


class _Walk:
    """Which rows every node makes in each strip, from what is wanted back to what is there."""

    def __init__(self, graph: Graph, stage: Stage, count: int, first: int, lead: float = 0.0) -> None:
        self._graph, self._stage, self._count, self._first, self._lead = graph, stage, count, first, lead
        self._nodes = graph.program.nodes
        self._targets = {*stage.stores, *stage.measured, *stage.outputs} & {*stage.strips, *stage.reads}
        self._order = self._ordered()
        self._takers = self._find_takers()
        self._spans: dict[int, list[Span]] = {}  # which rows there are made in each strip
        self._needed: dict[int, list[int]] = {}  # after each strip, from which row something is still needed
        for index in reversed(self._order):
            self._find_rows(index)

    def lead(self) -> float:
        """By what share of all rows some nodes are ahead of what is wanted, after the first strip."""
        ahead = (spans[0].hi / max(self._nodes[index].rows, 1) for index, spans in self._spans.items())
        return max(ahead, default=0.0) - 1 / self._count

    def _wanted(self, rows: int, strip: int) -> int:
        """How many rows of what is wanted there are after a strip."""
        done = (strip + 1) / self._count
        behind = (1 - done) * (1 + self._lead * self._count / max(self._count - 1, 1))
        return min(rows, max(strip + 1, math.ceil(rows * (1 - behind) - 1e-9)))

    def _ordered(self) -> list[int]:
        """The nodes of a strip, what was kept just before it is taken."""
        order: list[int] = []
        fetched: set[int] = set()
        for index in self._stage.strips:
            for source in self._sources(index):
                if source in self._stage.reads and source not in fetched:
                    fetched.add(source)
                    order.append(source)
            order.append(index)
        return order + [index for index in self._stage.reads if index not in fetched]

    def _sources(self, index: int) -> Iterator[int]:
        for place, source in enumerate(self._nodes[index].sources):
            if self._graph.taken_by_rows(index, place):
                yield source

    def _find_takers(self) -> dict[int, list[tuple[int, Callable[[Span], Span]]]]:
        """For each node, who takes which rows of it in this stage."""
        takers: dict[int, list[tuple[int, Callable[[Span], Span]]]] = {index: [] for index in self._order}
        for index in self._stage.strips:
            rule = self._graph.rules[index]
            assert rule is not None
            for place, source in enumerate(self._nodes[index].sources):
                needs = rule.needs[place]
                if needs is not None and self._graph.taken_by_rows(index, place):
                    takers[source].append((index, needs))
        return takers

    def _find_rows(self, index: int) -> None:
        asked = [self._asked(index, strip) for strip in range(self._first)]
        if index in self._targets or index in self._stage.reads or not self._graph.done_again(index):
            self._spans[index], self._needed[index] = self._once(index, asked)
        else:
            self._spans[index] = [span or Span(0, 0) for span in asked]
            self._needed[index] = [span.hi for span in self._spans[index]]

    def _asked(self, index: int, strip: int) -> Span | None:
        """Which rows others take in a strip."""
        lo, hi, rows = sys.maxsize, -1, self._nodes[index].rows
        for taker, needs in self._takers[index]:
            span = self._spans[taker][strip]
            if span.lo < span.hi:
                own = needs(span).within(rows)
                if own.lo < own.hi:
                    lo, hi = min(lo, own.lo), max(hi, own.hi)
        return Span(lo, hi) if hi >= 0 else None

    def _once(self, index: int, asked: list[Span | None]) -> tuple[list[Span], list[int]]:
        """Every row is made once, and held until nobody takes it any more."""
        rows, wanted = self._nodes[index].rows, index in self._targets
        first = 0 if wanted else min((span.lo for span in asked if span), default=0)
        spans, reach = [], first
        for strip, span in enumerate(asked):
            before = reach
            reach = max(reach, self._wanted(rows, strip) if wanted else 0, span.hi if span else 0)
            spans.append(Span(before, reach))
        needed, least = [0] * len(asked), rows
        for strip in range(len(asked) - 1, -1, -1):
            needed[strip] = min(least, spans[strip].hi)
            span = asked[strip]
            least = min(least, span.lo) if span else least
        return spans, needed

    def strips(self) -> list[list[Step]]:
        places = {index: place for place, index in enumerate(self._order)}
        after: dict[int, list[int]] = {}  # at which place of the order who is no longer taken in this strip
        for index, place in places.items():
            last = max((places[taker] for taker, _ in self._takers[index]), default=place)
            after.setdefault(last, []).append(index)
        return [self._strip(strip, after) for strip in range(self._first)]

    def _strip(self, strip: int, after: dict[int, list[int]]) -> list[Step]:
        steps = []
        for place, index in enumerate(self._order):
            span = self._spans[index][strip]
            held = self._needed[index][strip - 1] if strip else span.lo
            trims = tuple((other, self._needed[other][strip]) for other in after.get(place, ()))
            steps.append(Step(index, span, min(held, span.lo), trims))
        return steps


class Peak(NamedTuple):
    """Bytes of maps at most, inputs aside: on the device, and in host memory. What has no rows is small beside them."""

    device: int
    host: int

    def higher(self, other: Peak) -> Peak:
        """The higher of the two, on the device and in host memory."""
        return Peak(max(self.device, other.device), max(self.host, other.host))


class Kept(NamedTuple):
    """What stages keep for each other: bytes, and which strips the maps on the device lie in (None: not known)."""

    bytes: Peak
    strips: Mapping[int, Sequence[Span]] | None


def peak_of(
    graph: Graph, stage: Stage, strips: Sequence[Sequence[Step]], keeping: Keeping, start: Kept
) -> tuple[Peak, Kept]:
    """The peak while `stage` runs in `strips`, where `start` is kept already, and what is kept after it.

    Where it is not known in which strips maps lie, their rows count as if each went by itself. What kernels hold for
    themselves while they run comes on top.
    """
    count = _Count(graph, stage, keeping, start)
    for strip in strips:
        for step in strip:
            count.do(step)
    return Peak(count.most, count.most_host), count.end()


@dataclass
class _Memory:
    """What one tensor takes, and how many look at it."""

    bytes: int
    users: int = 1


class _Count:
    """What the runner holds, step by step."""

    def __init__(self, graph: Graph, stage: Stage, keeping: Keeping, start: Kept) -> None:
        self._graph, self._stage, self._keeping = graph, stage, keeping
        self._nodes = graph.program.nodes
        self._live, self._host = start.bytes
        self.most, self.most_host = start.bytes
        self._strips: dict[int, list[tuple[Span, _Memory]]] | None = None  # of maps on the device
        if start.strips is not None:
            self._strips = {index: [self._strip(index, span) for span in start.strips[index]] for index in start.strips}
        self._windows: dict[int, Span] = {}  # the rows each node holds
        self._memory: dict[int, _Memory] = {}  # and where
        self._going = set(stage.drops)
        self._whole = {index for index in stage.stores if graph.needed_whole(index)}
        for index in (*stage.whole, *stage.outputs, *self._whole):
            self._add(self._nodes[index].bytes)

    def _strip(self, index: int, span: Span) -> tuple[Span, _Memory]:
        return span, _Memory((span.hi - span.lo) * self._nodes[index].row_bytes)

    def _add(self, size: int) -> None:
        self._live += size
        self.most = max(self.most, self._live)

    def _hold_for_a_moment(self, size: int) -> None:
        self._add(size)
        self._live -= size

    def do(self, step: Step) -> None:
        index, span = step.node, step.span
        made = (span.hi - span.lo) * self._nodes[index].row_bytes
        if made:
            held = (span.lo - step.held) * self._nodes[index].row_bytes if index in self._windows else 0
            self._make(index, span, made, held)
            if index in self._stage.measured:  # in float32
                self._hold_for_a_moment(made // self._nodes[index].dtype.itemsize * 4)
            self._windows[index] = Span(step.held if held else span.lo, span.hi)
            self._keep(index, span, made)
        for other, first in step.trims:
            self._trim(other, first)

    def _make(self, index: int, span: Span, made: int, held: int) -> None:
        """`made` bytes are made, and joined to those that are `held`."""
        shared = self._looked_at(index, span)
        if shared is not None and not held:
            shared.users += 1
            self._memory[index] = shared
            return
        self._add(made)
        if held:
            self._add(held + made)
            self._live -= made
            self._leave(self._memory.pop(index))
        self._memory[index] = _Memory(made + held)

    def _looked_at(self, index: int, span: Span) -> _Memory | None:
        """The memory in which the output lies, where it is not its own."""
        if self._nodes[index].op == "input":
            return _Memory(0)
        if index in self._stage.reads:
            kept = (self._strips or {}).get(index, [])
            return next((memory for has, memory in kept if has.lo <= span.lo and span.hi <= has.hi), None)
        return self._memory.get(self._nodes[index].sources[0]) if self._graph.is_view(index) else None

    def _leave(self, memory: _Memory) -> None:
        memory.users -= 1
        if not memory.users:
            self._live -= memory.bytes

    def _keep(self, index: int, span: Span, made: int) -> None:
        host = index in self._keeping.host
        if index in self._stage.reads and host:  # it comes in the strips in which it went, which are joined then
            self._hold_for_a_moment(made)
        if index in self._stage.stores and index not in self._whole:
            if host:
                self._host += made
                self.most_host = max(self.most_host, self._host)
            else:
                self._add(made)
                if self._strips is not None:
                    self._strips.setdefault(index, []).append(self._strip(index, span))
        if index in self._stage.reads and index in self._going and not self._graph.needed_whole(index):
            if host:
                self._host -= made
            elif self._strips is None:
                self._live -= made
            else:
                self._forget(self._strips.get(index, []), span.hi)

    def _forget(self, strips: list[tuple[Span, _Memory]], before: int) -> None:
        while strips and strips[0][0].hi <= before:
            self._leave(strips.pop(0)[1])

    def _trim(self, index: int, first: int) -> None:
        if index not in self._windows:
            return
        lo, hi = self._windows[index]
        if first >= hi:
            del self._windows[index]
            self._leave(self._memory.pop(index))
        elif first > lo:
            rest = (hi - first) * self._nodes[index].row_bytes
            self._add(rest)
            self._leave(self._memory.pop(index))
            self._memory[index] = _Memory(rest)
            self._windows[index] = Span(first, hi)

    def end(self) -> Kept:
        """What is kept when the stage is over."""
        for memory in self._memory.values():
            self._leave(memory)
        for index in self._going:
            taken = index in self._stage.reads and not self._graph.needed_whole(index)
            if index in self._keeping.host:
                self._host -= 0 if taken else self._nodes[index].bytes
            elif self._strips is not None and index in self._strips:
                self._forget(self._strips.pop(index), self._nodes[index].rows)
            else:
                self._live -= 0 if taken else self._nodes[index].bytes
        strips = None if self._strips is None else {i: [span for span, _ in kept] for i, kept in self._strips.items()}
        return Kept(Peak(self._live, self._host), strips)
