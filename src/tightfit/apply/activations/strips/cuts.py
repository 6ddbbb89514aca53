"""Minimum cut through a graph: the cheapest nodes to keep so that nothing else is needed between source and sink.

Of several with the same cost it is the one nearest to the sink. Most nodes of a program cannot be
part of it, and are merged with a neighbour first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tightfit.apply.activations.strips.max_flow import FlowGraph

__all__ = ["NEVER", "Network"]

NEVER = 1 << 62  # cost of an edge that must not be cut


@dataclass(slots=True)
class _CutNode:
    price: int = 0  # cost of keeping it
    given: int = 0  # cost of getting it otherwise: NEVER if it is available, 0 if it is only made from its arguments
    asked: bool = False  # whether the sink takes it
    takes: set[int] = field(default_factory=set)
    takers: set[int] = field(default_factory=set)


class Network:
    """Nodes by number, each with a cost, and their arguments."""

    def __init__(self) -> None:
        self._nodes: defaultdict[int, _CutNode] = defaultdict(_CutNode)

    def add(self, number: int, price: int) -> None:
        """Add a node that costs `price` to keep."""
        self._nodes[number].price = price

    def connect_source(self, number: int, price: int) -> None:
        """Connect the source to a node, with capacity `price`."""
        self._nodes[number].given += price

    def connect_sink(self, number: int) -> None:
        """Connect a node to the sink."""
        self._nodes[number].asked = True

    def add_edge(self, number: int, source: int) -> None:
        """Connect an argument to a node."""
        self._nodes[number].takes.add(source)
        self._nodes[source].takers.add(number)

    def cheapest_cut(self) -> set[int]:
        """Return the nodes to keep. The network is used up."""
        self._join()
        places = {number: 2 * (place + 1) for place, number in enumerate(self._nodes)}  # begins; ends are next to them
        flow = FlowGraph(2 * len(places) + 2)
        for number, node in self._nodes.items():
            begin = places[number]
            flow.add_edge(begin, begin + 1, node.price)
            if node.given:
                flow.add_edge(0, begin, min(node.given, NEVER))
            if node.asked:
                flow.add_edge(begin + 1, 1, NEVER)
            for taker in node.takers:
                flow.add_edge(begin + 1, places[taker], NEVER)
        flow.maximize()
        behind = flow.reaching_sink()
        return {number for number, begin in places.items() if begin not in behind and begin + 1 in behind}

    def _join(self) -> None:
        """Merge nodes that need not be cut with a neighbour, until no such node is left."""
        left = set(self._nodes)
        while left:
            number = left.pop()
            node = self._nodes[number]
            if len(node.takers) == 1 and not node.asked:
                (taker,) = node.takers
                if self._nodes[taker].price <= node.price:  # keeping the consumer costs no more
                    left |= self._into_taker(number, taker)
                    continue
            if len(node.takes) == 1 and not node.given:
                (source,) = node.takes
                if self._nodes[source].price < node.price:  # keeping the argument costs less
                    left |= self._into_source(number, source)

    def _into_taker(self, number: int, taker: int) -> set[int]:
        """Merge a node into its only consumer; return the nodes whose edges changed."""
        node, other = self._nodes.pop(number), self._nodes[taker]
        other.takes.discard(number)
        other.takes |= node.takes
        other.given += node.given
        for source in node.takes:
            self._nodes[source].takers.discard(number)
            self._nodes[source].takers.add(taker)
        return {taker, *node.takes}

    def _into_source(self, number: int, source: int) -> set[int]:
        node, other = self._nodes.pop(number), self._nodes[source]
        other.takers.discard(number)
        other.takers |= node.takers
        other.asked |= node.asked
        for taker in node.takers:
            self._nodes[taker].takes.discard(number)
            self._nodes[taker].takes.add(source)
        return {source, *node.takers}
