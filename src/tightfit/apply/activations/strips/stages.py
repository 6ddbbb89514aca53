"""A Program → its stages over all rows, and what is kept from one stage for later ones.

An operation that needs all rows at once (the statistics of a group norm, the keys of an attention) ends a stage: all
that it needs is computed strip by strip, and then the next stage begins. What a later stage needs of an earlier one is
kept, or recomputed from something else that is kept: the minimum cut through the graph between the two, by bytes, with
a price on arithmetic done twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tightfit.apply.activations.strips.cuts import NEVER, Network
from tightfit.apply.activations.strips.op_rules import rule_for
from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.rows import Needs, Rule

__all__ = ["FIXED", "Stage", "StageArgument", "StageGraph", "find_stages"]

FIXED = ("weight", "constant")  # operations that are the same in every call
_GIVEN = ("input", *FIXED)
# operations whose results are worth keeping; recomputing those of others takes about as long as fetching them
_HEAVY = ("conv", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
# operations that only move data: recomputing rows that two strips share costs less than holding them
_MOVING = {
    "slice", "select", "cat", "concat", "concatenate", "stack", "pad", "constant_pad_nd", "permute", "transpose", "t",
    "movedim", "unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten", "_unsafe_view", "expand", "repeat",
    "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "clone", "contiguous", "to", "_to_copy", "copy",
    "slice_scatter", "select_scatter",
    "empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full",
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One pass over all rows, strip by strip. All fields are indices of nodes."""

    whole: tuple[int, ...]  # computed at once before the strips, in this order
    strips: tuple[int, ...]  # computed strip by strip, in this order
    reads: tuple[int, ...]  # kept by earlier stages and read by this one's strips (inputs too)
    stores: tuple[int, ...]  # kept from this stage on
    measured: tuple[int, ...]  # whose statistics are computed
    outputs: tuple[int, ...]  # returned by the method
    drops: tuple[int, ...]  # kept until now, or computed at once, and not needed after it


class StageArgument(NamedTuple):
    """An argument of a node."""

    source: int
    axis: int
    rows: int
    needs: Needs | None  # None: all of it
    by_rows: bool  # whether it is computed by rows, too


class StageGraph:
    """A program with its rules, and the first stage in which each node can be computed."""

    def __init__(self, program: Program, *, in_order: bool = False) -> None:
        """With `in_order`, no node is in an earlier stage than a node before it in the program."""
        self.program, self.in_order = program, in_order
        self.found: dict[Any, Any] = {}  # cache of values derived from it: it never changes
        self.rules: list[Rule | None] = [rule_for(program, index) for index in range(len(program.nodes))]
        self.level = [0] * len(program.nodes)
        latest = 0
        for index, node in enumerate(program.nodes):
            if node.op in _GIVEN:
                continue
            ready = [self._ready(index, place) for place in range(len(node.sources))]
            self.level[index] = max(ready, default=0)
            if in_order:
                latest = self.level[index] = max(latest, self.level[index])

    @cached_property
    def arguments(self) -> list[list[StageArgument]]:
        """Arguments of each node."""
        places = (range(len(node.sources)) for node in self.program.nodes)
        return [[self._argument(index, place) for place in some] for index, some in enumerate(places)]

    def _argument(self, index: int, place: int) -> StageArgument:
        number, rule = self.program.nodes[index].sources[place], self.rules[index]
        source = self.program.nodes[number]
        needs = None if rule is None or source.axis is None else rule.needs[place]
        return StageArgument(number, source.axis or 0, source.rows, needs, self.taken_by_rows(index, place))

    def by_rows(self, index: int) -> bool:
        """Whether the node is computed by rows."""
        return self.rules[index] is not None

    def taken_by_rows(self, index: int, place: int) -> bool:
        """Whether the node takes its argument by rows, and that is computed by rows or an input."""
        rule, source = self.rules[index], self.program.nodes[index].sources[place]
        return rule is not None and rule.needs[place] is not None and self.has_strips(source)

    def has_strips(self, index: int) -> bool:
        return self.by_rows(index) or self.program.nodes[index].op == "input"

    def measures(self, index: int, place: int) -> bool:
        """Whether the node needs the statistics of its argument."""
        rule = self.rules[index]
        return rule is not None and rule.statistics and place == 0

    def groups(self, index: int) -> int:
        """Number of groups for the statistics of a node's output."""
        for taker in self.program.consumers[index]:
            if self.by_rows(taker) and self.measures(taker, 0):
                return int(self.program.nodes[taker].args[1])
        raise AssertionError(index)  # only called for nodes with such a consumer

    def needed_whole(self, index: int) -> bool:
        """Whether any node takes all of the node's output at once."""
        return index in self._taken_whole

    @cached_property
    def _taken_whole(self) -> frozenset[int]:
        return frozenset(
            source
            for taker, node in enumerate(self.program.nodes)
            for place, source in enumerate(node.sources)
            if not self.taken_by_rows(taker, place)
        )

    def is_compute(self, index: int) -> bool:
        return index in self._computes

    @cached_property
    def _computes(self) -> frozenset[int]:
        return frozenset(index for index, node in enumerate(self.program.nodes) if node.word.startswith(_HEAVY))

    @cached_property
    def convolutions(self) -> frozenset[int]:
        return frozenset(index for index in self._computes if self.program.nodes[index].word.startswith("conv"))

    def only_moves(self, index: int) -> bool:
        """Whether the node only moves data: rows that two strips share are computed for each of them."""
        return self.program.nodes[index].word in _MOVING

    def _ready(self, index: int, place: int) -> int:
        """Return the first stage in which the node's argument is available as it needs it."""
        source = self.program.nodes[index].sources[place]
        if self.program.nodes[source].op == "input":
            return int(self.measures(index, place))
        at_once = self.by_rows(source) and (not self.taken_by_rows(index, place) or self.measures(index, place))
        return self.level[source] + at_once

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages in which no arithmetic is done twice."""
        return find_stages(self)

    @property
    def last(self) -> int:
        return max(self.level)

    def used_up(self, stage: Stage) -> list[list[int]]:
        """For each node in `stage.whole`, the nodes that can be freed once it is computed."""
        if not stage.whole:
            return []
        nodes = self.program.nodes
        by_strips = {source for index in stage.strips for source in nodes[index].sources}.union(stage.reads)
        last: dict[int, int] = {}
        for place, index in enumerate(stage.whole):
            last |= dict.fromkeys(set(nodes[index].sources).intersection(stage.drops) - by_strips, place)
        return [[index for index, at in last.items() if at == place] for place in range(len(stage.whole))]


def find_stages(graph: StageGraph, price: float = math.inf) -> list[Stage]:
    """Return the stages of a program. `price` is the cost of one recomputed operation, in bytes kept instead."""
    return _Planner(graph, price).stages()


class _Planner:
    def __init__(self, graph: StageGraph, price: float) -> None:
        self._graph, self._price = graph, price
        self._program = graph.program
        self._nodes = graph.program.nodes
        self._sources = [  # of each node, but weights and constants: which, and whether they are taken by rows
            [
                (source, graph.taken_by_rows(index, place))
                for place, source in enumerate(node.sources)
                if self._nodes[source].op not in FIXED
            ]
            for index, node in enumerate(self._nodes)
        ]
        self._there = set(self._program.inputs)  # kept, or an input
        self._done: set[int] = set()  # computed before, kept or not
        self._at: list[list[int]] = [[] for _ in range(graph.last + 2)]  # nodes of each stage
        self._measured: list[set[int]] = [set() for _ in self._at]  # nodes whose statistics each stage computes
        self._taken_until: dict[int, int] = {}  # the last stage that takes each node
        for index, (level, node) in enumerate(zip(graph.level, self._nodes, strict=True)):
            self._at[level].append(index)
            if graph.by_rows(index) and graph.measures(index, 0):
                self._measured[graph.level[node.sources[0]]].add(node.sources[0])
            for source, _ in self._sources[index]:
                self._taken_until[source] = max(level, self._taken_until.get(source, 0))

    def stages(self) -> list[Stage]:
        return [self._stage(level) for level in range(self._graph.last + 1)]

    def _stage(self, level: int) -> Stage:
        graph, program = self._graph, self._program
        whole = tuple(i for i in self._at[level] if not graph.by_rows(i) and self._nodes[i].op not in _GIVEN)
        before = set(self._there)
        self._there.update(whole)
        measured = self._measured[level]
        outputs = {i for i in program.outputs if graph.level[i] == level and graph.by_rows(i)}
        self._done |= self._made_for(measured | outputs | self._wanted_whole(level))
        kept = self._kept(level)
        strips = self._made_for(measured | outputs | (kept - self._there))
        self._done |= strips
        reads = {source for i in strips for source, by_rows in self._sources[i] if by_rows and source in self._there}
        reads |= measured & self._there
        gone = before.union(whole) - kept - set(program.inputs)
        stores = kept - self._there
        self._there = kept | set(program.inputs)
        return Stage(whole, *(tuple(sorted(some)) for some in (strips, reads, stores, measured, outputs, gone)))

    def _wanted_whole(self, level: int) -> set[int]:
        """Return the nodes that the next stage needs whole."""
        return {
            source
            for index in self._at[level + 1]
            for source, by_rows in self._sources[index]
            if self._graph.by_rows(source) and not by_rows
        }

    def _made_for(self, targets: Iterable[int]) -> set[int]:
        """Return the nodes to compute by rows for `targets`, from what is available."""
        found: set[int] = set()
        left = [target for target in targets if target not in self._there]
        while left:
            index = left.pop()
            if index in found:
                continue
            found.add(index)
            left += [source for source, by_rows in self._sources[index] if by_rows and source not in self._there]
        return found

    def _kept(self, level: int) -> set[int]:
        """Return the nodes to keep after this stage: the minimum cut between what is available and what is needed
        later.

        Each node is an edge whose capacity is its bytes. Edges lead from a node to its consumers, and from the source
        to nodes that could be recomputed, with the cost of that as capacity.
        """
        graph, nodes = self._graph, self._nodes
        network = Network()
        forced = self._wanted_whole(level)
        asked = set(self._asked_for(level))
        left, seen = list(asked), set[int]()
        while left:
            index = left.pop()
            if index in seen:
                continue
            seen.add(index)
            network.add(index, 0 if nodes[index].op == "input" else nodes[index].bytes)
            if index in self._there or index in forced or not graph.by_rows(index):
                network.connect_source(index, NEVER)
                continue
            if index in self._done:
                again = self._again(index)
                network.connect_source(index, again)
                if again == NEVER:  # as if it were available: no cut between its arguments and it
                    continue
            for source, by_rows in self._sources[index]:
                network.add_edge(index, source)
                left.append(source)
                if not by_rows:
                    network.connect_source(source, NEVER)
        for index in asked:
            network.connect_sink(index)
        return {index for index in network.cheapest_cut() if nodes[index].op != "input"}

    def _asked_for(self, level: int) -> Iterator[int]:
        """Yield the nodes available after this stage that later stages take, or the method returns."""
        graph, nodes = self._graph, self._nodes
        for source, last in self._taken_until.items():
            if graph.level[source] <= level < last:
                yield source
        for index in self._program.outputs:  # outputs computed whole are kept to the end
            if not graph.by_rows(index) and graph.level[index] <= level and nodes[index].op != "input":
                yield index

    def _again(self, index: int) -> int:
        """Return the cost of recomputing a node, in bytes."""
        node = self._nodes[index]
        if not self._graph.is_compute(index):
            return node.bytes // 1000
        if math.isinf(self._price):
            return NEVER
        return int(self._price * self._program.operations(index))
