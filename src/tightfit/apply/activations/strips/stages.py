"""A Program → the passes over its rows that it takes, and what is kept from one pass for the next.

What needs all rows of something at once (the statistics of a group norm, the keys of an attention) ends a stage:
all that it needs is computed strip by strip, then it is known, and the next stage begins. What a later stage needs
of an earlier one is kept, or computed again from something else that is kept: the cheapest cut through the graph
between the two, by bytes, with a price on arithmetic that would be done twice.
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

__all__ = ["Stage", "StageArgument", "StageGraph", "find_stages"]

# operations whose arithmetic is worth remembering; what others do is about as much work as to fetch it
_HEAVY = ("conv", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
# operations that only move numbers: it costs less to do them again for rows that two strips share than to hold those
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
    """One pass over the rows. All are indices of nodes."""

    whole: tuple[int, ...]  # done at once before it, in this order
    strips: tuple[int, ...]  # done strip by strip, in this order
    reads: tuple[int, ...]  # kept by earlier stages and taken by this one's strips (inputs too)
    stores: tuple[int, ...]  # kept from now on
    measured: tuple[int, ...]  # of which the statistics are taken
    outputs: tuple[int, ...]  # what the method gives back
    drops: tuple[int, ...]  # kept until now, or done at once, and needed no longer


class StageArgument(NamedTuple):
    """What a node takes at one place of its arguments."""

    source: int
    axis: int
    rows: int
    needs: Needs | None  # None: all of it
    by_rows: bool  # whether it is made by rows too


class StageGraph:
    """A program with its rules, and the stage at which each node can be done first."""

    def __init__(self, program: Program, *, in_order: bool = False) -> None:
        """With `in_order` nothing is done before what the program does before it."""
        self.program, self.in_order = program, in_order
        self.found: dict[Any, Any] = {}  # what others work out of it once: it never changes
        self.rules: list[Rule | None] = [rule_for(program, index) for index in range(len(program.nodes))]
        self.level = [0] * len(program.nodes)
        latest = 0
        for index, node in enumerate(program.nodes):
            if node.op in ("input", "weight", "constant"):
                continue
            ready = [self._ready(index, place) for place in range(len(node.sources))]
            self.level[index] = max(ready, default=0)
            if in_order:
                latest = self.level[index] = max(latest, self.level[index])

    @cached_property
    def arguments(self) -> list[list[StageArgument]]:
        """For each node, what it takes."""
        places = (range(len(node.sources)) for node in self.program.nodes)
        return [[self._argument(index, place) for place in some] for index, some in enumerate(places)]

    def _argument(self, index: int, place: int) -> StageArgument:
        number, rule = self.program.nodes[index].sources[place], self.rules[index]
        source = self.program.nodes[number]
        needs = None if rule is None or source.axis is None else rule.needs[place]
        return StageArgument(number, source.axis or 0, source.rows, needs, self.taken_by_rows(index, place))

    def by_rows(self, index: int) -> bool:
        """Whether the node is done row by row."""
        return self.rules[index] is not None

    def taken_by_rows(self, index: int, place: int) -> bool:
        """Whether the node takes its argument row by row, and that is made row by row or an input."""
        rule, source = self.rules[index], self.program.nodes[index].sources[place]
        return rule is not None and rule.needs[place] is not None and self.has_strips(source)

    def has_strips(self, index: int) -> bool:
        return self.by_rows(index) or self.program.nodes[index].op == "input"

    def measures(self, index: int, place: int) -> bool:
        """Whether the node needs the statistics of its argument."""
        rule = self.rules[index]
        return rule is not None and rule.statistics and place == 0

    def groups(self, index: int) -> int:
        """In how many groups the statistics of a node's output are taken."""
        for taker in self.program.consumers[index]:
            if self.by_rows(taker) and self.measures(taker, 0):
                return int(self.program.nodes[taker].args[1])
        raise AssertionError(index)  # nobody would have asked for them

    def needed_whole(self, index: int) -> bool:
        """Whether anybody takes all of the node's output at once."""
        return any(
            source == index and not self.taken_by_rows(taker, place)
            for taker in self.program.consumers[index]
            for place, source in enumerate(self.program.nodes[taker].sources)
        )

    def heavy(self, index: int) -> bool:
        return self.program.nodes[index].word.startswith(_HEAVY)

    def only_moves(self, index: int) -> bool:
        """Whether the node only moves numbers: the rows that two strips share are made for each of them."""
        return self.program.nodes[index].word in _MOVING

    def operations(self, index: int) -> int:
        """About how many additions and multiplications a heavy node takes."""
        node = self.program.nodes[index]
        shapes = [self.program.nodes[source].shape for source in node.sources]
        if "conv" in node.op:
            deep = math.prod(shapes[1][1:])
        elif "attention" in node.op:
            deep = 2 * shapes[1][-2]
        else:
            deep = shapes[0 if "linear" in node.op else -2][-1]
        return 2 * math.prod(node.shape) * deep

    def _ready(self, index: int, place: int) -> int:
        """From which stage on the node's argument is there as it needs it."""
        source = self.program.nodes[index].sources[place]
        if self.program.nodes[source].op == "input":
            return int(self.measures(index, place))
        at_once = self.by_rows(source) and (not self.taken_by_rows(index, place) or self.measures(index, place))
        return self.level[source] + at_once

    @cached_property
    def stages(self) -> list[Stage]:
        """Those in which no arithmetic is done twice."""
        return find_stages(self)

    @property
    def last(self) -> int:
        return max(self.level)

    def used_up(self, stage: Stage) -> list[list[int]]:
        """For each node that `stage` does whole, what nobody needs once that is done."""
        if not stage.whole:
            return []
        nodes = self.program.nodes
        by_strips = {source for index in stage.strips for source in nodes[index].sources}.union(stage.reads)
        last: dict[int, int] = {}
        for place, index in enumerate(stage.whole):
            last |= dict.fromkeys(set(nodes[index].sources).intersection(stage.drops) - by_strips, place)
        return [[index for index, at in last.items() if at == place] for place in range(len(stage.whole))]


def find_stages(graph: StageGraph, price: float = math.inf) -> list[Stage]:
    """The stages of a program. `price` is what one operation that is done again costs, in bytes kept instead."""
    return _Planner(graph, price).stages()


class _Planner:
    def __init__(self, graph: StageGraph, price: float) -> None:
        self._graph, self._price = graph, price
        self._program = graph.program
        self._nodes = graph.program.nodes
        self._there = set(self._program.inputs)  # kept, or given
        self._done: set[int] = set()  # computed before, kept or not

    def stages(self) -> list[Stage]:
        return [self._stage(level) for level in range(self._graph.last + 1)]

    def _stage(self, level: int) -> Stage:
        graph, program = self._graph, self._program
        here = [index for index, at in enumerate(graph.level) if at == level]
        whole = tuple(
            i for i in here if not graph.by_rows(i) and self._nodes[i].op not in ("input", "weight", "constant")
        )
        before = set(self._there)
        self._there.update(whole)
        measured = self._measured(level)
        outputs = {i for i in program.outputs if graph.level[i] == level and graph.by_rows(i)}
        self._done |= self._made_for(measured | outputs | self._wanted_whole(level))
        kept = self._kept(level)
        strips = self._made_for(measured | outputs | (kept - self._there))
        self._done |= strips
        reads = {
            source
            for i in strips
            for p, source in enumerate(self._nodes[i].sources)
            if graph.taken_by_rows(i, p) and source in self._there
        }
        reads |= measured & self._there
        gone = before.union(whole) - kept - set(program.inputs)
        stores = kept - self._there
        self._there = kept | set(program.inputs)
        return Stage(whole, *(tuple(sorted(some)) for some in (strips, reads, stores, measured, outputs, gone)))

    def _measured(self, level: int) -> set[int]:
        """Of what the statistics are taken in this stage."""
        graph = self._graph
        return {
            node.sources[0]
            for index, node in enumerate(self._nodes)
            if graph.by_rows(index) and graph.measures(index, 0) and graph.level[node.sources[0]] == level
        }

    def _wanted_whole(self, level: int) -> set[int]:
        """What the next stage needs all at once."""
        graph = self._graph
        return {
            source
            for index, node in enumerate(self._nodes)
            if graph.level[index] == level + 1
            for place, source in enumerate(node.sources)
            if graph.by_rows(source) and not graph.taken_by_rows(index, place)
        }

    def _made_for(self, targets: Iterable[int]) -> set[int]:
        """What has to be computed by rows for `targets`, from what is there."""
        found: set[int] = set()
        left = [target for target in targets if target not in self._there]
        while left:
            index = left.pop()
            if index in found:
                continue
            found.add(index)
            for place, source in enumerate(self._nodes[index].sources):
                if self._graph.taken_by_rows(index, place) and source not in self._there:
                    left.append(source)
        return found

    def _kept(self, level: int) -> set[int]:
        """What is kept after this stage for later ones: the cheapest cut between what is there and what is to come.

        Each node is an edge, as dear as its bytes. An edge leads to whatever takes its output, and from "there" to
        what could be computed again, as dear as that is.
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
                network.give(index, NEVER)
                continue
            if index in self._done:
                again = self._again(index)
                network.give(index, again)
                if again == NEVER:  # so it is as if it were there: no cut lies between what it is made of and it
                    continue
            for place, source in enumerate(nodes[index].sources):
                if nodes[source].op not in ("weight", "constant"):
                    network.take(index, source)
                    left.append(source)
                    if not graph.taken_by_rows(index, place):
                        network.give(source, NEVER)
        for index in asked:
            network.ask(index)
        return {index for index in network.cheapest_cut() if nodes[index].op != "input"}

    def _asked_for(self, level: int) -> Iterator[int]:
        """What there is after this stage and later ones take, or the method gives back."""
        graph, nodes = self._graph, self._nodes
        for index, node in enumerate(nodes):
            if graph.level[index] > level:
                for source in node.sources:
                    if graph.level[source] <= level and nodes[source].op not in ("weight", "constant"):
                        yield source
        for index in self._program.outputs:  # what is done at once is kept to the end
            if not graph.by_rows(index) and graph.level[index] <= level and nodes[index].op != "input":
                yield index

    def _again(self, index: int) -> int:
        """The price of computing a node again, in bytes."""
        node = self._nodes[index]
        if not self._graph.heavy(index):
            return node.bytes // 1000
        if math.isinf(self._price):
            return NEVER
        return int(self._price * self._graph.operations(index))
