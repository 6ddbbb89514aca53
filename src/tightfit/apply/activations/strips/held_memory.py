"""Bytes that the runner holds while it computes a stage, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass

from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.schedule import ScheduleStep
from tightfit.apply.activations.strips.stages import Stage, StageGraph
from tightfit.apply.activations.strips.strip_peaks import BoundaryState, StripPeak

__all__ = ["HeldMemory"]


@dataclass
class _Memory:
    """Bytes of one storage, and the number of its users."""

    bytes: int
    users: int = 1


class HeldMemory:
    """Bytes that the runner holds, step by step."""

    def __init__(
        self,
        graph: StageGraph,
        stage: Stage,
        in_host: frozenset[int],
        start: BoundaryState,
        ahead: bool,
        moves: MutableSequence[int] | None,
    ) -> None:
        self._graph, self._stage, self._in_host, self._ahead = graph, stage, in_host, ahead
        self._nodes, self._moves = graph.program.nodes, moves
        self._reads, self._stores, self._measured = set(stage.reads), set(stage.stores), set(stage.measured)
        self._leaving, self._coming = dict(start.leaving), dict(start.coming)
        self._there = {index: self._nodes[index].rows for index in in_host - set(stage.stores)}  # rows in host memory
        self._live, self._host = start.bytes
        self._live += sum(self._leaving.values()) + sum(self._coming.values())
        self.most, self.most_host = self._live, self._host
        self._strips: dict[int, list[tuple[Span, _Memory]]] | None = None  # strips of kept maps on the device
        if start.strips is not None:
            self._strips = {index: [self._strip(index, span) for span in start.strips[index]] for index in start.strips}
        self._windows: dict[int, Span] = {}  # rows that each node holds
        self._slices: set[int] = set()  # those of them whose rows are a slice of a larger tensor
        self._memory: dict[int, _Memory] = {}  # storage of those rows
        self._going = set(stage.drops)
        self._whole = {index for index in stage.stores if graph.needed_whole(index)}
        for index, used_up in zip(stage.whole, graph.used_up(stage), strict=True):
            self._add(self._nodes[index].bytes)
            self._kernel(index, Span(0, self._nodes[index].rows))
            for other in used_up:
                self._drop(self._nodes[other].bytes)
            self._going -= set(used_up)
        for index in (*stage.outputs, *self._whole):
            self._add(self._nodes[index].bytes)

    def _strip(self, index: int, span: Span) -> tuple[Span, _Memory]:
        return span, _Memory((span.hi - span.lo) * self._nodes[index].row_bytes)

    def _add(self, size: int) -> None:
        self._live += size
        self.most = max(self.most, self._live)
        if self._moves is not None and size:
            self._moves.append(size)

    def _drop(self, size: int) -> None:
        self._live -= size
        if self._moves is not None and size:
            self._moves.append(-size)

    def _hold_for_a_moment(self, size: int) -> None:
        self._add(size)
        self._drop(size)

    def _kernel(self, index: int, span: Span) -> None:
        """Record the workspace of a convolution on a card that computes the rows `span`.

        First a contiguous copy of its input, if that is a slice of a larger tensor; then channels-last copies of input,
        output and weights.
        """
        if self._moves is None or index not in self._graph.convolutions:
            return
        node = self._nodes[index]
        sources = [self._nodes[source] for source in node.sources]
        data, fixed = sources[0], sum(source.bytes for source in sources if source.op == "weight")
        rule = self._graph.rules[index]
        needs = rule.needs[0] if rule is not None else None
        if needs is None:
            given, before = data.bytes, 0
        else:
            reach = needs(span)
            has = reach.within(data.rows)
            given = (has.hi - has.lo) * data.row_bytes
            before = given if self._is_slice(node.sources[0], has) else 0
        held = fixed + given + node.bytes * (span.hi - span.lo) // max(node.rows, 1)
        self._moves.extend((before, held, -held, -before) if before else (held, -held))

    def _is_slice(self, index: int, span: Span) -> bool:
        """Whether the rows `span`, read from the held rows of a node, are not contiguous."""
        node = self._nodes[index]
        if math.prod(node.shape[: node.axis or 0]) == 1:  # rows are the outermost dimension
            return False
        return index in self._slices or self._windows.get(index, Span(0, node.rows)) != span

    def _lies_among_others(self, index: int, span: Span) -> bool:
        """Whether the rows `span`, as they are computed or read, are a slice of a larger tensor."""
        node, kept = self._nodes[index], (self._strips or {}).get(index, ())
        if node.op == "input" or self._graph.needed_whole(index):
            return span != Span(0, node.rows)
        if index in self._reads:
            return any(has != span and has.lo <= span.lo and span.hi <= has.hi for has, _ in kept)
        if node.is_view:
            return index in self._graph.program.scattered or node.sources[0] in self._slices
        return self._is_cut_out(index, span)

    def expect(self, now: Mapping[int, Span], then: Mapping[int, Span]) -> None:
        """Begin a strip that reads the rows `now`; also prefetch what only the next strip reads, of `then`."""
        for index, span in now.items():
            self._come(index, span)
        for index in then.keys() - now.keys():
            self._come(index, then[index])

    def _come(self, index: int, span: Span) -> None:
        if self._ahead and index not in self._coming and span.hi <= self._there.get(index, 0):
            self._coming[index] = (span.hi - span.lo) * self._nodes[index].row_bytes
            self._add(self._coming[index])

    def sent(self) -> None:
        """Free what earlier stages were still sending."""
        for index in self._leaving.keys() - self._stores:
            self._drop(self._leaving.pop(index))

    def do(self, step: ScheduleStep, then: Mapping[int, Span]) -> None:
        index, span = step.node, step.span
        made = (span.hi - span.lo) * self._nodes[index].row_bytes
        if made:
            held = (span.lo - step.held) * self._nodes[index].row_bytes if index in self._windows else 0
            rows = self._make(index, span, made, held)
            self._kernel(index, span)
            if index in self._measured:  # a contiguous copy, in float32
                apart = made if self._is_cut_out(index, span) else 0
                self._hold_for_a_moment(made // self._nodes[index].dtype.itemsize * 4 + apart)
            self._windows[index] = Span(step.held if held else span.lo, span.hi)
            if index in self._reads and not self._graph.needed_whole(index):
                self._take(index, span, made, then)
            if index not in self._stores:
                self._leave(rows)
        for other, first in step.trims:
            self._trim(other, first)
        if made and index in self._stores:
            if index not in self._whole:
                self._put(index, span, made)
            self._leave(rows)

    def _make(self, index: int, span: Span, made: int, held: int) -> _Memory:
        """Allocate `made` bytes and join them to the `held` ones; return the storage of the new rows."""
        shared = self._looked_at(index, span)
        rows = shared or _Memory(made, 0)
        if shared is None:
            self._add(made)
        rows.users += 1
        if held:
            self._add(held + made)
            self._leave(self._memory.pop(index))
            self._memory[index] = _Memory(made + held)
            self._slices.discard(index)
        else:
            rows.users += 1
            self._memory[index] = rows
            if self._moves is not None and self._lies_among_others(index, span):
                self._slices.add(index)
            else:
                self._slices.discard(index)
        return rows

    def _is_cut_out(self, index: int, span: Span) -> bool:
        """Whether the rows are a slice: at a border, a convolution computes a few rows more than are needed."""
        rule = self._graph.rules[index]
        if rule is None or index in self._reads or not self._graph.is_compute(index):
            return False
        for source, needs in zip(self._nodes[index].sources, rule.needs, strict=True):
            if needs is not None and (reach := needs(span)).within(self._nodes[source].rows) != reach:
                return True
        return False

    def _looked_at(self, index: int, span: Span) -> _Memory | None:
        """Return the storage that the output shares with another tensor; None if it has its own."""
        if self._nodes[index].op == "input":
            return _Memory(0)
        if index in self._reads:
            kept = (self._strips or {}).get(index, [])
            return next((memory for has, memory in kept if has.lo <= span.lo and span.hi <= has.hi), None)
        node = self._nodes[index]
        return self._memory.get(node.sources[0]) if node.is_view else None

    def _leave(self, memory: _Memory) -> None:
        memory.users -= 1
        if not memory.users:
            self._drop(memory.bytes)

    def _take(self, index: int, span: Span, made: int, then: Mapping[int, Span]) -> None:
        """Read kept rows; free them where no later stage needs them."""
        if index in self._in_host:
            self._hold_for_a_moment(0 if index in self._coming else made)  # in the host's row order
            self._drop(self._coming.pop(index, 0))
            if index in then:
                self._come(index, then[index])
        if index not in self._going:
            return
        if index in self._in_host:
            self._host -= made
        elif self._strips is None:
            self._drop(made)
        else:
            self._forget(self._strips.get(index, []), span.hi)

    def _put(self, index: int, span: Span, made: int) -> None:
        """Keep rows, on the device or in host memory."""
        if index not in self._in_host:
            self._add(made)
            if self._strips is not None:
                self._strips.setdefault(index, []).append(self._strip(index, span))
            return
        self._drop(self._leaving.pop(index, 0))
        self._hold_for_a_moment(made)
        self._host += made
        self.most_host = max(self.most_host, self._host)
        self._there[index] = span.hi
        if self._ahead:
            self._leaving[index] = made
            self._add(made)

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
            self._slices.discard(index)

    def end(self) -> BoundaryState:
        """Free what the stage drops; return what is kept after it."""
        for memory in self._memory.values():
            self._leave(memory)
        for index in self._going:
            taken = index in self._reads and not self._graph.needed_whole(index)
            if index in self._in_host:
                self._host -= 0 if taken else self._nodes[index].bytes
            elif self._strips is not None and index in self._strips:
                self._forget(self._strips.pop(index), self._nodes[index].rows)
            else:
                self._drop(0 if taken else self._nodes[index].bytes)
        strips = None if self._strips is None else {i: [span for span, _ in kept] for i, kept in self._strips.items()}
        self._live -= sum(self._leaving.values()) + sum(self._coming.values())
        return BoundaryState(StripPeak(self._live, self._host), strips, self._leaving, self._coming)
