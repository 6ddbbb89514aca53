"""Execution of a program in strips, by its schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from tightfit.apply.activations.strips.feature_maps import (
    DeviceMapBuffer,
    FeatureMapBuffer,
    HostMapBuffer,
    InputMapBuffer,
)
from tightfit.apply.activations.strips.memory_estimate import taken
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import RowSlice, Span, caller
from tightfit.apply.activations.strips.schedule import ScheduleStep
from tightfit.apply.activations.strips.stages import Stage, StageArgument, StageGraph
from tightfit.apply.activations.strips.statistics import Statistics
from tightfit.apply.activations.strips.strip_plan import PlannedStage
from tightfit.apply.activations.strips.weights import LiveWeights
from tightfit.apply.module_hooks import announce, at_work
from tightfit.devices.activation_pool import ActivationHostPool
from tightfit.measure.recorder import Recorder

__all__ = ["Runner", "Windows"]


NOTHING = Span(0, 0)


class Runner:
    """One run of a program; feature maps of nodes `in_host` are kept in the `host_pool`."""

    def __init__(
        self,
        graph: StageGraph,
        in_host: frozenset[int],
        host_pool: ActivationHostPool | None,
        weights: LiveWeights,
        recorder: Recorder,
    ) -> None:
        self._graph, self._nodes = graph, graph.program.nodes
        self._in_host, self._host_pool = in_host, host_pool
        self._weights, self._recorder = weights, recorder
        self._maps: dict[int, FeatureMapBuffer] = {}
        self._values: dict[int, torch.Tensor] = {}  # inputs, and outputs of nodes computed whole
        self._known: dict[int, torch.Tensor] = {}  # statistics, by the node they are of
        self._outputs: dict[int, torch.Tensor] = {}
        self._windows = Windows[torch.Tensor](self._nodes, torch.cat, _last)
        self._measuring: dict[int, Statistics] = {}
        nodes = self._nodes
        self._watched = [weights.watched(nodes[source] for source in node.sources) for node in nodes]

    def run(self, inputs: Sequence[torch.Tensor], passes: Sequence[PlannedStage]) -> list[torch.Tensor]:
        """Return the program's outputs for `inputs`."""
        program = self._graph.program
        self._like = inputs[0]
        for index, tensor in zip(program.inputs, inputs, strict=True):
            self._values[index] = tensor
            if self._nodes[index].axis is not None:
                self._maps[index] = InputMapBuffer(tensor, self._nodes[index].axis or 0)
        upcoming = [taken(stage, strip) for stage, strips, _ in passes for strip in strips][1:]
        following = iter([*upcoming, {}])
        announce(self._layers(passes))
        try:
            for stage, strips, ahead in passes:
                self._begin(stage)
                for strip in strips:
                    self._work(stage, strip, next(following), ahead=ahead)
                    for index in self._maps.keys() - set(stage.stores):  # wait for the last rows of earlier stages
                        self._maps[index].sent()
                self._end(stage)
        finally:
            if self._host_pool is not None:
                self._host_pool.settle()
        return [self._outputs[index] if index in self._outputs else self._values[index] for index in program.outputs]

    def _layers(self, passes: Sequence[PlannedStage]) -> Iterator[nn.Module]:
        """Yield the layers that will run, and the modules around them, in order."""
        for stage, strips, _ in passes:
            made = (s.node for strip in strips for s in strip if s.span.hi > s.span.lo and s.node not in stage.reads)
            for index in (*stage.whole, *made):
                yield from self._watched[index]

    def _work(self, stage: Stage, strip: Sequence[ScheduleStep], following: Mapping[int, Span], *, ahead: bool) -> None:
        """Run one strip; the next one reads the rows `following` of kept maps."""
        if ahead:
            now = taken(stage, strip)
            for index, span in now.items():
                self._maps[index].expect(span)
            for index in (following.keys() - now.keys()) & self._maps.keys():
                self._maps[index].expect(following[index])
        for step in strip:
            self._do(stage, step, following if ahead else {})
            if not ahead and step.node in stage.stores:
                self._maps[step.node].sent()

    def _begin(self, stage: Stage) -> None:
        for index, used_up in zip(stage.whole, self._graph.used_up(stage), strict=True):
            self._values[index] = self._make_whole(index)
            self._drop(used_up)
        for index in stage.stores:
            self._maps[index] = self._new_map(index)
        for index in stage.outputs:
            node = self._nodes[index]
            self._outputs[index] = torch.empty(node.shape, dtype=node.dtype, device=self._like.device)
        self._measuring = {index: Statistics(self._graph.groups(index)) for index in stage.measured}

    def _make_whole(self, index: int) -> torch.Tensor:
        node = self._nodes[index]
        changed = {"device": self._like.device} if node.makes else {}
        with self._at_work(index):
            return caller(node, **changed)([RowSlice(self._all(source), NOTHING) for source in node.sources])

    def _at_work(self, index: int) -> ExitStack:
        """Return a context in which the layers whose weights the node takes count as running."""
        stack = ExitStack()
        for layer in self._watched[index]:
            stack.enter_context(at_work(layer))
        return stack

    def _new_map(self, index: int) -> FeatureMapBuffer:
        node = self._nodes[index]
        axis = node.axis or 0
        if self._graph.needed_whole(index):
            return InputMapBuffer(torch.empty(node.shape, dtype=node.dtype, device=self._like.device), axis)
        if index in self._in_host and self._host_pool is not None:
            return HostMapBuffer(node, self._host_pool, self._recorder)
        return DeviceMapBuffer(axis)

    def _end(self, stage: Stage) -> None:
        for index, statistics in self._measuring.items():
            self._known[index] = statistics.known()
        self._windows.clear()
        self._drop(stage.drops)

    def _drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._maps.pop(index, None)
            self._values.pop(index, None)

    def _all(self, index: int) -> torch.Tensor:
        """Return a node's whole output."""
        node = self._nodes[index]
        if node.op in ("weight", "constant"):
            return self._weights(node, self._like.device)
        kept = self._maps.get(index)
        if isinstance(kept, InputMapBuffer):
            return kept.whole
        return self._values[index]

    def _do(self, stage: Stage, step: ScheduleStep, following: Mapping[int, Span]) -> None:
        rows = self._rows(stage, step, following) if step.span.hi > step.span.lo else None
        if step.node not in stage.stores:
            rows = None
        for other, first in step.trims:
            self._windows.trim(other, first)
        if rows is not None:  # last: their inputs have been freed
            self._maps[step.node].put(rows, step.span)

    def _rows(self, stage: Stage, step: ScheduleStep, following: Mapping[int, Span]) -> torch.Tensor:
        """Compute or read the rows of a step, and pass them to all that use them in this stage."""
        index, span = step.node, step.span
        if index not in stage.reads:
            rows = self._make(index, span)
        else:
            rows = self._maps[index].take(span)
            if index in following:
                self._maps[index].expect(following[index])
        if index in self._measuring:
            self._measuring[index].take(rows)
        if index in self._outputs:
            axis = self._nodes[index].axis or 0
            self._outputs[index].narrow(axis, span.lo, span.hi - span.lo).copy_(rows)
        self._windows.hold(step, rows)
        if index in stage.reads and index in stage.drops:
            self._maps[index].forget(span.hi)
        return rows

    def _make(self, index: int, span: Span) -> torch.Tensor:
        if not self._watched[index]:
            return self._made(index, span)
        with self._at_work(index):
            return self._made(index, span)

    def _made(self, index: int, span: Span) -> torch.Tensor:
        rule, node = self._graph.rules[index], self._nodes[index]
        assert rule is not None
        pieces = [self._piece(argument, span) for argument in self._graph.arguments[index]]
        if rule.statistics:
            pieces.append(RowSlice(self._known[node.sources[0]], NOTHING))
        if rule.makes:
            pieces.append(RowSlice(self._like, NOTHING))
        return rule.make(pieces, span)

    def _piece(self, argument: StageArgument, span: Span) -> RowSlice:
        """Return what is needed of an argument to compute the rows `span`."""
        source, axis, rows, needs, by_rows = argument
        if needs is None:
            return RowSlice(self._all(source), NOTHING)
        lo, hi = wanted = needs(span).within(rows)
        if lo == hi:  # beyond the border
            node = self._nodes[source]
            shape = [0 if dim == axis else size for dim, size in enumerate(node.shape)]
            return RowSlice(self._like.new_empty(shape, dtype=node.dtype), wanted)
        first, there = self._windows[source] if by_rows else (0, self._all(source))
        if hi - lo < there.shape[axis]:
            there = there.narrow(axis, lo - first, hi - lo)
        return RowSlice(there, wanted)


def _last(rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    return rows.narrow(axis, rows.shape[axis] - count, count).clone()


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Rows = TypeVar("Rows", bound=_Shaped)


class Windows(Generic[Rows]):
    """For each node, the first row that is held, and the held rows."""

    def __init__(
        self,
        nodes: Sequence[Node],
        join: Callable[[tuple[Rows, Rows], int], Rows],
        last: Callable[[Rows, int, int], Rows],
    ) -> None:
        """`join` concatenates rows along an axis; `last` copies the last n rows of an axis."""
        self._nodes, self._join, self._last = nodes, join, last
        self._held: dict[int, tuple[int, Rows]] = {}

    def __getitem__(self, index: int) -> tuple[int, Rows]:
        return self._held[index]

    def hold(self, step: ScheduleStep, rows: Rows) -> None:
        """Hold the `rows` that a step computed, after those of earlier strips that are still needed."""
        held = self._held.pop(step.node, None)
        if held is not None and step.held < step.span.lo:
            self._held[step.node] = held[0], self._join((held[1], rows), self._axis(step.node))
        else:
            self._held[step.node] = step.span.lo, rows

    def trim(self, index: int, first: int) -> None:
        """Free the rows before the `first`."""
        if index not in self._held:
            return
        lo, window = self._held[index]
        axis = self._axis(index)
        hi = lo + window.shape[axis]
        if first >= hi:
            del self._held[index]
        elif first > lo:
            self._held[index] = first, self._last(window, axis, hi - first)

    def clear(self) -> None:
        self._held.clear()

    def _axis(self, index: int) -> int:
        return self._nodes[index].axis or 0
