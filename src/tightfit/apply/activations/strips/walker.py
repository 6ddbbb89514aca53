"""A walk through a program's stages in strips, by their schedules; subclasses say what rows are and how they are made.

Rows are tensors in `runner.py`, and layouts of tensors in `cost_estimate.py`. `memory_estimate.py` does not walk: it
counts bytes stage by stage for thousands of possible schedules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.schedule import ScheduleStep
from tightfit.apply.activations.strips.stages import FIXED, Stage, StageGraph

__all__ = ["FeatureMapBuffer", "StripWalker"]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Rows = TypeVar("Rows", bound=_Shaped)


class FeatureMapBuffer(ABC, Generic[Rows]):
    """Kept rows of one node's output, along its axis."""

    whole: Rows | None = None  # all rows in one piece, if they are kept like that

    @abstractmethod
    def put(self, rows: Rows, span: Span) -> None:
        """Keep `rows`, which are those of `span`; called in order."""

    @abstractmethod
    def take(self, span: Span) -> Rows:
        """Return these rows, on the device."""

    def expect(self, span: Span) -> None:
        """Start copying these rows, the next to be taken, to the device if they are stored."""

    def sent(self) -> None:
        """Make later device work wait until all rows put so far are stored."""

    def forget(self, before: int) -> None:
        """Free the rows before this one."""


class StripWalker(ABC, Generic[Rows]):
    """One walk through the program of `graph`: what is held, kept and measured, stage by stage and step by step."""

    def __init__(self, graph: StageGraph) -> None:
        self._graph, self._nodes = graph, graph.program.nodes
        self._maps: dict[int, FeatureMapBuffer[Rows]] = {}
        self._values: dict[int, Rows] = {}  # inputs, and outputs of nodes computed whole
        self._outputs: dict[int, Rows] = {}
        self._held: dict[int, tuple[int, Rows]] = {}  # for each node, the first row that is held, and the held rows
        self._groups: dict[int, int] = {}  # group count of each node whose statistics are measured in this stage
        self._reads: frozenset[int] = frozenset()  # of the current stage
        self._stores: frozenset[int] = frozenset()
        self._drops: frozenset[int] = frozenset()

    def begin(self, stage: Stage) -> None:
        """Compute what the stage needs whole; make place for what it keeps and outputs."""
        self._reads, self._stores, self._drops = map(frozenset, (stage.reads, stage.stores, stage.drops))
        for index, used_up in zip(stage.whole, self._graph.used_up(stage), strict=True):
            self._values[index] = self._make_whole(index)
            self._drop(used_up)
        for index in stage.stores:
            self._maps[index] = self._new_map(index)
        for index in stage.outputs:
            self._outputs[index] = self._new_output(self._nodes[index])
        self._groups = {index: self._graph.groups(index) for index in stage.measured}

    def do(self, step: ScheduleStep) -> None:
        """Compute or read the rows of a step, and free what no later step needs."""
        rows = self._rows(step) if step.span.hi > step.span.lo else None
        if step.node not in self._stores:
            rows = None
        for other, first in step.trims:
            self._trim(other, first)
        if rows is not None:  # last: their inputs have been freed
            self._maps[step.node].put(rows, step.span)

    def end(self, stage: Stage) -> None:
        """Complete the statistics that the stage measured; free what no later stage needs."""
        for index in self._groups:
            self._complete_statistics(index)
        self._held.clear()
        self._drop(stage.drops)

    def _rows(self, step: ScheduleStep) -> Rows:
        """Compute or read the rows of a step, and pass them to all that use them in this stage."""
        index, span = step.node, step.span
        rows = self._take(index, span) if index in self._reads else self._make(index, span)
        if index in self._groups:
            self._measure(index, rows, span)
        if index in self._outputs:
            self._write(index, rows, span)
        self._hold(step, rows)
        if index in self._reads and index in self._drops:
            self._maps[index].forget(span.hi)
        return rows

    def _hold(self, step: ScheduleStep, rows: Rows) -> None:
        """Hold the `rows` that a step computed, after those of earlier strips that are still needed."""
        held = self._held.pop(step.node, None)
        if held is not None and step.held < step.span.lo:
            self._held[step.node] = held[0], self._join((held[1], rows), self._nodes[step.node].axis or 0)
        else:
            self._held[step.node] = step.span.lo, rows

    def _trim(self, index: int, first: int) -> None:
        """Free the held rows before the `first`."""
        if index not in self._held:
            return
        lo, rows = self._held[index]
        axis = self._nodes[index].axis or 0
        hi = lo + rows.shape[axis]
        if first >= hi:
            del self._held[index]
        elif first > lo:
            self._held[index] = first, self._last(rows, axis, hi - first)

    def _take(self, index: int, span: Span) -> Rows:
        return self._maps[index].take(span)

    def _all(self, index: int) -> Rows:
        """Return a node's whole output."""
        if self._nodes[index].op in FIXED:
            return self._fixed(index)
        kept = self._maps.get(index)
        return self._values[index] if kept is None or kept.whole is None else kept.whole

    def _drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._maps.pop(index, None)
            self._values.pop(index, None)

    @abstractmethod
    def _fixed(self, index: int) -> Rows:
        """Return a weight or a constant."""

    @abstractmethod
    def _make_whole(self, index: int) -> Rows:
        """Compute all rows of a node at once."""

    @abstractmethod
    def _make(self, index: int, span: Span) -> Rows:
        """Compute the rows `span` of a node from what is held of its arguments."""

    @abstractmethod
    def _new_map(self, index: int) -> FeatureMapBuffer[Rows]:
        """Return what keeps the rows of a node."""

    @abstractmethod
    def _new_output(self, node: Node) -> Rows:
        """Return memory for all rows of an output."""

    @abstractmethod
    def _write(self, index: int, rows: Rows, span: Span) -> None:
        """Copy `rows` to where they are in an output."""

    @abstractmethod
    def _measure(self, index: int, rows: Rows, span: Span) -> None:
        """Add `rows`, which are those of `span`, to the statistics of a node."""

    @abstractmethod
    def _complete_statistics(self, index: int) -> None:
        """Compute the statistics of a node, all of whose rows were measured."""

    @abstractmethod
    def _join(self, parts: tuple[Rows, Rows], axis: int) -> Rows:
        """Concatenate rows along an axis."""

    @abstractmethod
    def _last(self, rows: Rows, axis: int, count: int) -> Rows:
        """Copy the last `count` rows."""
