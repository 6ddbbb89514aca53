"""Where strips repeat each other, so that counting some of them is enough."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Needs, Span
from tightfit.apply.activations.strips.spatial_rules import rows_padded
from tightfit.apply.activations.strips.stages import StageGraph

__all__ = ["Repeat", "StripKinds", "StripRepeats"]

FEW = 6  # strips; of fewer, it is not worth while to find out which are alike
LONGEST = 8  # strips that are repeated together


class _Taken(NamedTuple):
    """Rows of an argument that a node takes in each strip."""

    spans: Sequence[Span]  # of the node
    needs: Needs
    rows: int  # of the argument
    computed: Sequence[Span] | None  # of the argument, in each strip
    padded: int  # by how many rows the node pads it


class StripKinds:
    """What each strip does, without where it is; from the `spans` of each node's rows that are computed in each strip,
    and the first row that is still `needed` after each strip.
    """

    def __init__(
        self,
        graph: StageGraph,
        order: Iterable[int],
        spans: Mapping[int, Sequence[Span]],
        needed: Mapping[int, Sequence[int]],
    ) -> None:
        nodes, kinds = graph.program.nodes, graph.program.kinds
        # nodes and arguments with equal rows count once: a clip's frames do the same
        self._computed = {(id(spans[i]), id(needed[i])): (spans[i], needed[i], nodes[i].rows) for i in order}
        self._taken: dict[Hashable, _Taken] = {}
        for index in spans:
            for place, (source, _, rows, needs, _) in enumerate(graph.arguments[index]):
                if needs is not None and graph.by_rows(index):
                    computed = spans.get(source)
                    key = id(spans[index]), kinds[index], place, id(computed)
                    self._taken[key] = _Taken(spans[index], needs, rows, computed, rows_padded(nodes[index]))

    def of(self, count: int) -> list[int]:
        """Return a number for each of `count` strips; equal ones do the same with other rows."""
        if count < FEW:
            return list(range(count))
        numbers = defaultdict[Hashable, int](itertools.count().__next__)
        return [numbers[tuple(self._kind(strip))] for strip in range(count)]

    def _kind(self, strip: int) -> list[int]:
        kind = [int(strip == 0)]
        for spans, needed, rows in self._computed.values():
            lo, hi = spans[strip]
            kind += hi - lo, hi - needed[strip], lo - min(lo, needed[strip - 1]), lo == 0, hi == rows
        for each in self._taken.values():
            span = each.spans[strip]
            if span.lo < span.hi:
                lo, hi = each.needs(span)
                there = each.computed[strip].lo if each.computed else lo
                kind += lo - there, hi - there, max(-lo, 0), max(hi - each.rows, 0)
                if each.padded:
                    kind += min(span.lo, each.padded), min(max(each.rows + each.padded - span.hi, 0), each.padded)
        return kind


class Repeat(NamedTuple):
    """The strips from `first` on: `period` of them, `times` times."""

    first: int
    period: int
    times: int

    @property
    def skipped(self) -> range:
        """The strips after the first `period`."""
        return range(self.first + self.period, self.end)

    @property
    def end(self) -> int:
        return self.first + self.period * self.times

    def like(self, strip: int) -> int:
        """Return which of the first `period` strips a skipped one repeats."""
        return self.first + (strip - self.first) % self.period


class StripRepeats:
    """Finds out when the state of a walk is the same as some strips before, and the next strips are alike.

    `kinds` has a value for each strip. Equal values mean that strips do the same with other rows.
    """

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        self._kinds = kinds
        self._states: dict[int, Hashable] = {}

    def at(self, strip: int, state: Hashable) -> Repeat:
        """Return how often the strips from this one on are repeated, if the walk has this `state` before it.

        One more strip than that is alike: what is prepared for the next strip is the same too.
        """
        kinds, self._states[strip] = self._kinds, state
        for period in range(1, min(LONGEST, strip - 1) + 1):
            before = strip - period
            if kinds[before - 1] != kinds[strip - 1] or self._states.get(before) != state:
                continue
            end = strip
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            times = (end - 1 - strip) // period
            if times > 1:
                return Repeat(strip, period, times)
        return Repeat(strip, 1, 1)
