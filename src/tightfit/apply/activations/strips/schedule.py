"""A stage and a number of strips → the rows that each node computes in each strip, and the rows that it holds.

Integer arithmetic only: no tensor is used.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any, NamedTuple

from tightfit.apply.activations.strips.rows import Needs, Span
from tightfit.apply.activations.strips.stages import Stage, StageGraph
from tightfit.apply.activations.strips.strip_heights import StripHeights
from tightfit.apply.activations.strips.strip_repeats import Repeat, StripKinds

__all__ = ["ScheduleStep", "Share", "StripSchedules", "Strips", "taken", "whole"]

Share = Callable[[int], Span]  # of so many rows, those that are computed here


def whole(rows: int) -> Span:
    """The share of a run on one device: all rows."""
    return Span(0, rows)


TRIAL = 3  # strips that show what is held from one to the next
SHARE = 1.0  # of a strip's rows; up to that many are recomputed rather than held


class ScheduleStep(NamedTuple):
    """Compute (or read, if kept) the rows `span` of `node`, and hold them after its earlier rows from `held` on.

    Then each node in `trims` frees its rows before the given one.
    """

    node: int
    span: Span
    held: int
    trims: tuple[tuple[int, int], ...]


class Strips(list[list[ScheduleStep]]):
    """The steps of each strip, and what kind each is: those of the same kind do the same with other rows."""

    def __init__(self, strips: Iterable[list[ScheduleStep]], find_kinds: Callable[[], list[int]]) -> None:
        super().__init__(strips)
        self._find_kinds = find_kinds

    @cached_property
    def kinds(self) -> list[int]:
        return self._find_kinds()

    def moved(self, repeat: Repeat) -> Iterator[tuple[int, int]]:
        """Yield each node, and how many rows farther it is after `repeat` than after the strips that are repeated."""
        done, end = self[repeat.skipped.start - 1], self[repeat.end - 1]
        return ((after.node, after.span.lo - before.span.lo) for before, after in zip(done, end, strict=True))

    def skipped(self, repeat: Repeat, nodes: AbstractSet[int]) -> Iterator[tuple[ScheduleStep, Span]]:
        """Yield steps of `nodes` in the skipped strips of `repeat`, and the rows of the steps that they repeat."""
        places = [place for place, step in enumerate(self[repeat.first]) if step.node in nodes]
        for number, place in itertools.product(repeat.skipped, places):
            if (step := self[number][place]).span.hi > step.span.lo:
                yield step, self[repeat.like(number)][place].span


class StripSchedules:
    """The steps of `stage` in any number of strips.

    What the stage keeps, measures and returns is made for the rows of a `share`, and whatever rows these need.
    """

    def __init__(self, graph: StageGraph, stage: Stage, share: Share = whole) -> None:
        self._graph, self._stage, self._share = graph, stage, share
        kept = (graph.program.nodes[index].rows for index in {*_stage_nodes_of(graph, stage).targets, *stage.reads})
        self._heights = StripHeights(hi - lo for lo, hi in map(share, kept))
        self._lead = 0.0  # of the last number of strips
        self._found: dict[tuple[int, int], Strips] = {}

    def strips(self, count: int, first: int | None = None) -> Strips:
        """Return the steps in `count` strips; only of the `first` strips, if that is given.

        The first rows of an output need more rows of its inputs than later ones, so the first strip has fewer of them.
        """
        key = count, min(first or count, count)
        if key not in self._found:
            self._found[key] = self._planned(*key)
        return self._found[key]

    def near(self, count: int, most: int) -> int:
        """Return the number of strips, from `count` to a little above, that repeat after the fewest strips."""
        return self._heights.near(count, most, self._lead)

    def _planned(self, count: int, first: int) -> Strips:
        trial = self._planner(count, min(count, TRIAL))
        if count == 1:
            return trial.strips()
        self._lead = trial.lead()
        return self._planner(count, first, self._lead, trial.derived()).strips()

    def _planner(
        self, count: int, first: int, lead: float = 0.0, derived: AbstractSet[int] = frozenset()
    ) -> _StripPlanner:
        parts = self._heights.parts(count, lead)
        return _StripPlanner(self._graph, self._stage, parts, first, self._share, derived)


def taken(stage: Stage, strip: Sequence[ScheduleStep]) -> dict[int, Span]:
    """Return the rows that a strip reads of kept maps, by node."""
    reads = set(stage.reads)
    return {step.node: step.span for step in strip if step.node in reads and step.span.hi > step.span.lo}


class _StageNodes:
    """The nodes of a stage in order, and which takes what from which: the same for any number of strips."""

    def __init__(self, graph: StageGraph, stage: Stage) -> None:
        self._graph, self._stage, self._nodes = graph, stage, graph.program.nodes
        self.targets = {*stage.stores, *stage.measured, *stage.outputs} & {*stage.strips, *stage.reads}
        self.sources: dict[int, list[tuple[int, int]]] = {index: list(self._find(index)) for index in stage.strips}
        self.order = self._ordered()
        self.takers = self._find_takers()
        self.after = self._find_after()

    def _find(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the places of a node's arguments by rows, and their sources."""
        for place, source in enumerate(self._nodes[index].sources):
            if self._graph.taken_by_rows(index, place):
                yield place, source

    def _ordered(self) -> list[int]:
        """Return the nodes of a strip in order; a kept map is read just before its first use."""
        order: list[int] = []
        fetched: set[int] = set()
        reads = set(self._stage.reads)
        for index in self._stage.strips:
            for _, source in self.sources[index]:
                if source in reads and source not in fetched:
                    fetched.add(source)
                    order.append(source)
            order.append(index)
        return order + [index for index in self._stage.reads if index not in fetched]

    def _find_takers(self) -> dict[int, list[tuple[int, tuple[int, int], Needs]]]:
        """Return, for each node, its consumers in this stage and their needs; equal keys mean equal needs."""
        takers: dict[int, list[tuple[int, tuple[int, int], Needs]]] = {index: [] for index in self.order}
        kinds = self._graph.program.kinds
        for index in self._stage.strips:
            rule = self._graph.rules[index]
            assert rule is not None
            for place, source in self.sources[index]:
                needs = rule.needs[place]
                assert needs is not None
                takers[source].append((index, (kinds[index], place), needs))
        return takers

    def _find_after(self) -> list[list[int]]:
        """Return, for each place in the order, the nodes that nothing after it takes in a strip."""
        places = {index: place for place, index in enumerate(self.order)}
        after: list[list[int]] = [[] for _ in self.order]
        for index, place in places.items():
            last = max((places[taker] for taker, *_ in self.takers[index]), default=place)
            after[last].append(index)
        return after


def _stage_nodes_of(graph: StageGraph, stage: Stage) -> _StageNodes:
    key = "ways", stage
    if key not in graph.found:
        graph.found[key] = _StageNodes(graph, stage)
    ways: _StageNodes = graph.found[key]
    return ways


class _StripPlanner:
    """The rows that each node computes in each strip, from the targets back to the inputs."""

    def __init__(
        self,
        graph: StageGraph,
        stage: Stage,
        parts: Sequence[float],
        first: int,
        share: Share,
        derived: AbstractSet[int] = frozenset(),
    ) -> None:
        """Plan the `first` strips, after which there are `parts` of all rows.

        Nodes in `derived` are recomputed, because their arguments are held.
        """
        self._graph, self._parts, self._first, self._share = graph, parts, first, share
        self._derived = derived
        self._nodes = graph.program.nodes
        self._stage_nodes = _stage_nodes_of(graph, stage)
        self._kept = self._stage_nodes.targets.union(stage.reads)
        self._spans: dict[int, list[Span]] = {}  # rows of each node that are computed in each strip
        self._needed: dict[int, list[int]] = {}  # first row of each node that is still needed after each strip
        self._alike: dict[Any, int] = {}  # one node for each requirement: those of a clip's frames are equal
        self._same: dict[tuple[Span, ...], list[Span]] = {}
        for index in reversed(self._stage_nodes.order):
            self._find_rows(index)

    def lead(self) -> float:
        """Return by what part of its rows the foremost node is ahead of the targets after the first strip."""
        ahead = (self._part(index, spans[0].hi) for index, spans in self._spans.items())
        return max(ahead, default=0.0) - self._parts[0]

    def _part(self, index: int, reach: int) -> float:
        lo, hi = self._share(self._nodes[index].rows)
        return (reach - lo) / max(hi - lo, 1)

    def derived(self) -> set[int]:
        """Return nodes that need not be held between strips: their arguments are held, and recomputing takes little.

        If a norm's input is held for a shortcut's sum, for instance, the norm's output need not be held besides.
        """
        there: set[int] = set()
        found: set[int] = set()
        for index in self._stage_nodes.order:
            (lo, hi), needed = self._spans[index][-2], self._needed[index][-2]
            held, sources = hi - needed, self._stage_nodes.sources.get(index, ())
            light = index not in self._kept and not self._graph.is_compute(index) and held <= SHARE * (hi - lo)
            if light and sources and all(source in there for _, source in sources):
                there.add(index)
                found.add(index)
            elif held:
                there.add(index)
        return found

    def _wanted(self, rows: int, strip: int) -> int:
        """Return up to which row the targets must exist after a strip."""
        lo, hi = self._share(rows)
        return lo + min(hi - lo, max(1, math.ceil((hi - lo) * self._parts[strip] - 1e-9)))

    def _find_rows(self, index: int) -> None:
        again = index not in self._kept and (index in self._derived or self._graph.only_moves(index))
        takers, rows = self._stage_nodes.takers[index], self._nodes[index].rows
        asking = tuple((id(self._spans[taker]), kind) for taker, kind, _ in takers)
        question = rows, again, index in self._stage_nodes.targets, asking
        like = self._alike.setdefault(question, index)
        if like != index:
            self._spans[index], self._needed[index] = self._spans[like], self._needed[like]
            return
        asked = [self._asked(index, strip) for strip in range(self._first)]
        if not again:
            spans, self._needed[index] = self._once(index, asked)
        else:
            spans = []
            for span in asked:
                reach = spans[-1].hi if spans else 0
                spans.append(span or Span(reach, reach))
            self._needed[index] = [span.hi for span in spans]
        self._spans[index] = self._same.setdefault(tuple(spans), spans)

    def _asked(self, index: int, strip: int) -> Span | None:
        """Return the rows that consumers take in a strip."""
        lo, hi, rows = sys.maxsize, -1, self._nodes[index].rows
        for taker, _, needs in self._stage_nodes.takers[index]:
            span = self._spans[taker][strip]
            if span.lo < span.hi:
                own = needs(span).within(rows)
                if own.lo < own.hi:
                    lo, hi = min(lo, own.lo), max(hi, own.hi)
        return Span(lo, hi) if hi >= 0 else None

    def _once(self, index: int, asked: list[Span | None]) -> tuple[list[Span], list[int]]:
        """Compute each row once and hold it until its last use; return spans, and the first needed row, per strip."""
        rows, wanted = self._nodes[index].rows, index in self._stage_nodes.targets
        lowest = [span.lo for span in asked if span]
        first = min([self._share(rows).lo, *lowest] if wanted else lowest, default=0)
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

    def strips(self) -> Strips:
        def find_kinds() -> list[int]:
            return StripKinds(self._graph, self._stage_nodes.order, self._spans, self._needed).of(self._first)

        return Strips(map(self._strip, range(self._first)), find_kinds)

    def _strip(self, strip: int) -> list[ScheduleStep]:
        steps, needed = [], self._needed
        for index, after in zip(self._stage_nodes.order, self._stage_nodes.after, strict=True):
            span = self._spans[index][strip]
            held = min(needed[index][strip - 1], span.lo) if strip else span.lo
            trims = tuple([(other, needed[other][strip]) for other in after]) if after else ()
            steps.append(ScheduleStep(index, span, held, trims))
        return steps
