"""A stage in strips → how many bytes the runner holds at most. Integers only: no tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.schedule import Step
from tightfit.apply.activations.strips.stages import Graph, Stage

__all__ = ["Kept", "Peak", "peak_of"]


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
    graph: Graph, stage: Stage, strips: Sequence[Sequence[Step]], in_host: frozenset[int], start: Kept
) -> tuple[Peak, Kept]:
    """The peak while `stage` runs in `strips`, where `start` is kept already, and what is kept after it.

    What is `in_host` is kept in host memory.
    Where it is not known in which strips maps lie, their rows count as if each went by itself. What kernels hold for
    themselves while they run comes on top.
    """
    count = _Count(graph, stage, in_host, start)
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

    def __init__(self, graph: Graph, stage: Stage, in_host: frozenset[int], start: Kept) -> None:
        self._graph, self._stage, self._in_host = graph, stage, in_host
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
        host = index in self._in_host
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
            if index in self._in_host:
                self._host -= 0 if taken else self._nodes[index].bytes
            elif self._strips is not None and index in self._strips:
                self._forget(self._strips.pop(index), self._nodes[index].rows)
            else:
                self._live -= 0 if taken else self._nodes[index].bytes
        strips = None if self._strips is None else {i: [span for span, _ in kept] for i, kept in self._strips.items()}
        return Kept(Peak(self._live, self._host), strips)
