"""Nodes with their memory, and requests with their predicted peaks → which workers to start. Without Ray and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["NodeCapacity", "Placement", "RequestGroup", "place_workers"]


@dataclass(frozen=True)
class NodeCapacity:
    """What one node of a cluster has left for workers."""

    node: str
    bytes: int
    cpus: int
    cards: int  # 0: its workers use no card
    card_bytes: int | None = None  # of each of its cards
    cards_each: int = 0  # cards that each worker uses

    def holds(self, size: int) -> bool:
        """Whether one more worker that needs `size` bytes can be started."""
        has_cards = self.cards >= self.cards_each
        on_cards = self.card_bytes is None or size <= self.card_bytes * self.cards_each
        return self.cpus >= 1 and has_cards and on_cards and size <= self.bytes

    def less(self, size: int) -> NodeCapacity:
        """Return what is left after a worker with `size` bytes is started."""
        return replace(self, bytes=self.bytes - size, cpus=self.cpus - 1, cards=self.cards - self.cards_each)


class RequestGroup(NamedTuple):
    """Requests that are alike, of which some are `waiting` for a worker."""

    waiting: int
    peaks: Mapping[str, int]  # predicted bytes by node; nodes that cannot run them are left out

    @property
    def largest(self) -> int:
        return max(self.peaks.values(), default=0)


class Placement(NamedTuple):
    """A worker to start, and the bytes that it reserves."""

    node: str
    bytes: int


def place_workers(
    nodes: Sequence[NodeCapacity], groups: Sequence[RequestGroup], spare: Sequence[Placement] = ()
) -> list[Placement]:
    """Return the workers to start: for the largest requests first, each on the node with the most bytes left.

    Not more than requests that wait; `spare` are the workers that wait for requests, or are being started.
    """
    left, unused = {node.node: node for node in nodes}, sorted(spare, key=lambda worker: worker.bytes)
    placements = []
    for group in sorted(groups, key=lambda group: -group.largest):
        count = group.waiting
        for worker in list(unused):
            if count and worker.node in group.peaks and group.peaks[worker.node] <= worker.bytes:
                unused.remove(worker)
                count -= 1
        for _ in range(count):
            able = [node for node in left.values() if node.node in group.peaks and node.holds(group.peaks[node.node])]
            if not able:
                break
            best = max(able, key=lambda node: (node.bytes, node.node))
            placements.append(Placement(best.node, group.peaks[best.node]))
            left[best.node] = best.less(group.peaks[best.node])
    return placements
