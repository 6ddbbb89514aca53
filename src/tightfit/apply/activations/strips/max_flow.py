"""Maximum flow through a directed graph by Dinic's algorithm, and the minimum cut that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FlowGraph"]


class FlowGraph:
    """Nodes 0 to `count` - 1, of which 0 is the source and 1 the sink, and edges with integer capacities.

    networkx makes objects of nodes and edges: a clip's cuts took it five times as long.
    """

    def __init__(self, count: int) -> None:
        # edges by number; that with number ^ 1 is the same in the other direction
        self._heads: list[int] = []
        self._capacities: list[int] = []  # left
        self._edges: list[list[int]] = [[] for _ in range(count)]  # from each node

    def add_edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge of that capacity from one node to another."""
        for own, other, most in ((tail, head, capacity), (head, tail, 0)):
            self._edges[own].append(len(self._heads))
            self._heads.append(other)
            self._capacities.append(most)

    def maximize(self) -> None:
        """Find a maximum flow; what is left of the capacities is kept."""
        while (distances := self._distances()) is not None:
            self._send_along(distances)

    def reaching_sink(self) -> set[int]:
        """Return the nodes from which more could flow to the sink: those behind the minimum cut nearest to it."""
        found, left = {1}, [1]
        while left:
            for edge in self._edges[left.pop()]:
                tail = self._heads[edge]
                if self._capacities[edge ^ 1] and tail not in found:
                    found.add(tail)
                    left.append(tail)
        return found

    def _distances(self) -> Sequence[int] | None:
        """Return the edges between each node and the sink, as far as the source; None if that cannot be reached.

        Nodes from which the sink cannot be reached have none (-1), so that nobody looks for a path there.
        """
        heads, capacities = self._heads, self._capacities
        distances, far = [-1] * len(self._edges), 0
        distances[1] = 0
        frontier = [1]
        while frontier and distances[0] < 0:
            far += 1
            reached = []
            for node in frontier:
                for edge in self._edges[node]:
                    tail = heads[edge]
                    if distances[tail] < 0 and capacities[edge ^ 1]:
                        distances[tail] = far
                        reached.append(tail)
            frontier = reached
        return None if distances[0] < 0 else distances

    def _send_along(self, distances: Sequence[int]) -> None:
        """Send flow along paths on which the distances fall by one, until there is no such path."""
        heads, capacities = self._heads, self._capacities
        tried = dict[int, int]()  # of each node's edges, how many no longer lead to the sink
        path: list[int] = []
        node = 0
        while True:
            if node == 1:
                sent = min(capacities[edge] for edge in path)
                for edge in path:
                    capacities[edge] -= sent
                    capacities[edge ^ 1] += sent
                full = next(place for place, edge in enumerate(path) if not capacities[edge])
                node = heads[path[full] ^ 1]
                del path[full:]
            edges, place, far = self._edges[node], tried.get(node, 0), distances[node] - 1
            while place < len(edges) and not (capacities[edges[place]] and distances[heads[edges[place]]] == far):
                place += 1
            tried[node] = place
            if place < len(edges):
                path.append(edges[place])
                node = heads[edges[place]]
            elif path:
                node = heads[path.pop() ^ 1]
                tried[node] += 1
            else:
                return
