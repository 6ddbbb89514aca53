"""Execution of a program in strips, by its schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.apply.activations.strips.feature_maps import (
    DeviceMapBuffer,
    HostMapBuffer,
    InputMapBuffer,
    TensorMapBuffer,
)
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.program_inputs import LiveWeights
from tightfit.apply.activations.strips.rows import RowSlice, Span, caller
from tightfit.apply.activations.strips.schedule import ScheduleStep, taken
from tightfit.apply.activations.strips.stages import Stage, StageArgument, StageGraph
from tightfit.apply.activations.strips.statistics import Statistics
from tightfit.apply.activations.strips.strip_plan import PlannedStage
from tightfit.apply.activations.strips.walker import StripWalker
from tightfit.apply.module_hooks import announce, at_work
from tightfit.devices.pinned_pool import ActivationHostPool
from tightfit.measure.recorder import Recorder

__all__ = ["NOTHING", "Runner"]


NOTHING = Span(0, 0)


class Runner(StripWalker[torch.Tensor]):
    """One run of a program; feature maps of nodes `in_host` are kept in the `host_pool`."""

    def __init__(
        self,
        graph: StageGraph,
        in_host: frozenset[int],
        host_pool: ActivationHostPool | None,
        weights: LiveWeights,
        recorder: Recorder,
    ) -> None:
        super().__init__(graph)
        self._in_host, self._host_pool = in_host, host_pool
        self._weights, self._recorder = weights, recorder
        self._known: dict[int, torch.Tensor] = {}  # statistics, by the node they are of
        self._measuring: dict[int, Statistics] = {}
        self._following: Mapping[int, Span] = {}  # rows of kept maps to prefetch, as the next strip reads them
        nodes = self._nodes
        self._watched = [weights.watched(nodes[source] for source in node.sources) for node in nodes]

    def run(self, inputs: Sequence[torch.Tensor], passes: Sequence[PlannedStage]) -> list[torch.Tensor]:
        """Return the program's outputs for `inputs`."""
        program = self._graph.program
        self._begin(inputs, passes)
        upcoming = [taken(stage, strip) for stage, strips, _ in passes for strip in strips][1:]
        following = iter([*upcoming, {}])
        try:
            for stage, strips, ahead in passes:
                self.begin(stage)
                self._measuring = {index: Statistics(groups) for index, groups in self._groups.items()}
                for strip in strips:
                    self._work(stage, strip, next(following), ahead=ahead)
                    for index in self._maps.keys() - self._stores:  # wait for the last rows of earlier stages
                        self._maps[index].sent()
                self.end(stage)
        finally:
            if self._host_pool is not None:
                self._host_pool.settle()
        return [self._outputs[index] if index in self._outputs else self._values[index] for index in program.outputs]

    def _begin(self, inputs: Sequence[torch.Tensor], passes: Sequence[PlannedStage]) -> None:
        """Take the program's inputs, and announce the layers that will run."""
        self._like = inputs[0]
        for index, tensor in zip(self._graph.program.inputs, inputs, strict=True):
            self._values[index] = tensor
            if self._nodes[index].axis is not None:
                self._maps[index] = InputMapBuffer(tensor, self._nodes[index].axis or 0)
        announce(self._layers(passes))

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
        self._following = following if ahead else {}
        for step in strip:
            self.do(step)
            if not ahead and step.node in stage.stores:
                self._maps[step.node].sent()

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

    def _new_map(self, index: int) -> TensorMapBuffer:
        node = self._nodes[index]
        axis = node.axis or 0
        if self._graph.needed_whole(index):
            return InputMapBuffer(self._new_output(node), axis)
        if index in self._in_host and self._host_pool is not None:
            return HostMapBuffer(node, self._host_pool, self._recorder)
        return DeviceMapBuffer(axis)

    def _new_output(self, node: Node) -> torch.Tensor:
        return torch.empty(node.shape, dtype=node.dtype, device=self._like.device)

    def _fixed(self, index: int) -> torch.Tensor:
        return self._weights(self._nodes[index], self._like.device)

    def _take(self, index: int, span: Span) -> torch.Tensor:
        rows = self._maps[index].take(span)
        if index in self._following:
            self._maps[index].expect(self._following[index])
        return rows

    def _measure(self, index: int, rows: torch.Tensor, span: Span) -> None:
        self._measuring[index].take(rows)

    def _complete_statistics(self, index: int) -> None:
        self._known[index] = self._measuring.pop(index).known()

    def _write(self, index: int, rows: torch.Tensor, span: Span) -> None:
        axis = self._nodes[index].axis or 0
        self._outputs[index].narrow(axis, span.lo, span.hi - span.lo).copy_(rows)

    def _join(self, parts: tuple[torch.Tensor, torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(parts, axis)

    def _last(self, rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
        return rows.narrow(axis, rows.shape[axis] - count, count).clone()

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
        first, there = self._held[source] if by_rows else (0, self._all(source))
        if hi - lo < there.shape[axis]:
            there = there.narrow(axis, lo - first, hi - lo)
        return RowSlice(there, wanted)
