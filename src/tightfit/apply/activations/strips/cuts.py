"""The cheapest cut through a graph: which nodes to keep so that nothing else is needed between a beginning and an end.

Of several that cost the same it is the one nearest to the end. networkx finds it; most nodes of a program cannot be
part of it, and are joined with a neighbour first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import networkx
from networkx.algorithms.flow import shortest_augmenting_path

__all__ = ["NEVER", "Network"]

NEVER = 1 << 62  # the price of what must not be done
_BEGIN, _END = "there", "later"


@dataclass
class _Node:
    price: int = 0  # of keeping it
    given: int = 0  # price of having it otherwise: NEVER for what is there, 0 for what is only made of others
    asked: bool = False  # by the end
    takes: set[int] = field(default_factory=set)
    takers: set[int] = field(default_factory=set)


class Network:
    """Nodes by number, each with a price, made of each other."""

    def __init__(self) -> None:
        self._nodes: defaultdict[int, _Node] = defaultdict(_Node)

    def add(self, number: int, price: int) -> None:
        """A node that costs `price` to keep."""
        self._nodes[number].price = price

    def give(self, number: int, price: int) -> None:
        """The beginning gives a node, unless that is cut for `price`, too."""
        self._nodes[number].given += price

    def ask(self, number: int) -> None:
        """The end takes a node."""
        self._nodes[number].asked = True

    def take(self, number: int, source: int) -> None:
        """A node is made of a source, among others."""
        self._nodes[number].takes.add(source)
        self._nodes[source].takers.add(number)

    def cheapest_cut(self) -> set[int]:
        """The nodes to keep. What was added is used up by this."""
        self._join()
        flow: Any = networkx.DiGraph()
        flow.add_nodes_from((_BEGIN, _END))
        for number, node in self._nodes.items():
            flow.add_edge((number, 0), (number, 1), capacity=node.price)
            if node.given:
                flow.add_edge(_BEGIN, (number, 0), capacity=min(node.given, NEVER))
            if node.asked:
                flow.add_edge((number, 1), _END, capacity=NEVER)
            for taker in node.takers:
                flow.add_edge((number, 1), (taker, 0), capacity=NEVER)
        _, (near, _) = networkx.minimum_cut(flow, _BEGIN, _END, flow_func=shortest_augmenting_path)
        return {number for number in self._nodes if (number, 0) in near and (number, 1) not in near}

    def _join(self) -> None:
        """Joins nodes that need not be cut with a neighbour, as long as there are any."""
        left = set(self._nodes)
        while left:
            number = left.pop()
            node = self._nodes[number]
            if len(node.takers) == 1 and not node.asked:
                (taker,) = node.takers
                if self._nodes[taker].price <= node.price:  # to keep what is made of it costs no more
                    left |= self._into_taker(number, taker)
                    continue
            if len(node.takes) == 1 and not node.given:
                (source,) = node.takes
                if self._nodes[source].price < node.price:  # to keep what it is made of costs less
                    left |= self._into_source(number, source)

    def _into_taker(self, number: int, taker: int) -> set[int]:
        """Returns the nodes for which something has changed."""
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
