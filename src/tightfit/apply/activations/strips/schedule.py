"""A stage and a number of strips → which rows each node makes in which strip, and what it holds.

Integers only: no tensor is touched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.stages import Graph, Stage

__all__ = ["Step", "make_schedule"]

TRIAL = 3  # strips that tell what is held from one to the next
SHARE = 0.5  # of a strip's rows that are made again rather than held


class Step(NamedTuple):
    """Rows `span` of `node` are made (or fetched, where they were kept); what it held begins at `held`.

    Then each of `trims` lets go of all rows before the given one.
    """

    node: int
    span: Span
    held: int
    trims: tuple[tuple[int, int], ...]


def make_schedule(graph: Graph, stage: Stage, count: int, first: int | None = None) -> list[list[Step]]:
    """`stage` in `count` strips; only the `first` of them, where that is given.

    The first rows of what is wanted need more rows of what it is made of than later ones: so there are fewer of them.
    """
    if count == 1:
        return _Walk(graph, stage, count, count).strips()
    trial = _Walk(graph, stage, count, min(count, TRIAL))
    return _Walk(graph, stage, count, min(first or count, count), trial.lead(), trial.derived()).strips()


class _Walk:
    """Which rows every node makes in each strip, from what is wanted back to what is there."""

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        count: int,
        first: int,
        lead: float = 0.0,
        derived: AbstractSet[int] = frozenset(),
    ) -> None:
        """The `first` of `count` strips; `derived` are not held, as what they are made of is."""
        self._graph, self._stage, self._count, self._first, self._lead = graph, stage, count, first, lead
        self._derived = derived
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

    def derived(self) -> set[int]:
        """What need not be held from strip to strip, because all that it takes is held and little work makes it again.

        Where a norm's input waits for a shortcut's sum, the norm's output need not be held beside it, for instance.
        """
        there: set[int] = set()
        found: set[int] = set()
        for index in self._order:
            (lo, hi), needed = self._spans[index][-2], self._needed[index][-2]
            held, sources = hi - needed, list(self._sources(index))
            light = not self._is_kept(index) and not self._graph.heavy(index) and held <= SHARE * (hi - lo)
            if light and sources and there.issuperset(sources):
                there.add(index)
                found.add(index)
            elif held:
                there.add(index)
        return found

    def _is_kept(self, index: int) -> bool:
        return index in self._targets or index in self._stage.reads

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
        again = index in self._derived or self._graph.only_moves(index)
        if self._is_kept(index) or not again:
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
