"""A strip plan → the work that its run gives a card, stage by stage and layer by layer, without running it.

Does with layouts what the runner does with tensors; each operation is tried once per layout of its arguments.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tightfit.apply.activations.strips.layout_maps import DeviceLayouts, GivenLayout, HostLayouts, LayoutMapBuffer
from tightfit.apply.activations.strips.op_costs import (
    ANYTHING,
    OpCostCache,
    OpLayout,
    Outcome,
    StageCost,
    cloning,
    copying,
    dense,
    joining,
)
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import RowSlice, Span, caller
from tightfit.apply.activations.strips.schedule import ScheduleStep, Strips
from tightfit.apply.activations.strips.spatial_rules import rows_padded
from tightfit.apply.activations.strips.stages import FIXED, StageArgument
from tightfit.apply.activations.strips.statistics import Statistics
from tightfit.apply.activations.strips.strip_plan import StripPlan
from tightfit.apply.activations.strips.strip_repeats import Repeat, StripRepeats
from tightfit.apply.activations.strips.walker import StripWalker
from tightfit.schema.footprint import StripStageProfile

__all__ = ["profile_stages"]

NOTHING = Span(0, 0)


def profile_stages(
    strip_plan: StripPlan, trials: OpCostCache, layers: Mapping[str, str]
) -> Iterator[StripStageProfile]:
    """Yield the work of each stage of `strip_plan`; `layers` maps paths of modules with weights to their layers."""
    return _CostEstimator(strip_plan, trials, layers).stages()


class _ArgumentRows(NamedTuple):
    """Rows of each of a node's arguments that certain rows of its output are computed from."""

    spans: Sequence[Span]
    padding: Sequence[int]  # rows beyond the borders, at both ends of each; for a pad, the distance to them too


class _CostEstimator(StripWalker[OpLayout]):
    """A run with layouts in place of tensors."""

    def __init__(self, strip_plan: StripPlan, trials: OpCostCache, layers: Mapping[str, str]) -> None:
        super().__init__(strip_plan.graph)
        self._strip_plan, self._trials, self._costs = strip_plan, trials, StageCost(trials)
        program = self._graph.program
        self._kinds = program.kinds
        # nodes that do the same to arguments that are computed in the same way; each source counts where it is first
        numbers = defaultdict[Hashable, int](itertools.count().__next__)
        self._alike = [
            numbers[kind, *((node.sources.index(each.source), each.by_rows) for each in arguments)]
            for kind, node, arguments in zip(self._kinds, self._nodes, self._graph.arguments, strict=True)
        ]
        self._argument_rows: dict[Hashable, _ArgumentRows] = {}
        self._outcomes: dict[Hashable, tuple[Outcome, Sequence[OpLayout]]] = {}  # with the layouts that ids are of
        self._layers = [_layers_of(node, self._nodes, layers) for node in self._nodes]
        self._weights = {i: self._new_output(node) for i, node in enumerate(self._nodes) if node.op in FIXED}
        self._measured: set[int] = set()  # nodes measured in an earlier strip of this stage
        self._once = _LayerOrder(())  # of the nodes that this stage computes whole
        for index in program.inputs:
            self._values[index] = whole = self._new_output(self._nodes[index])
            if (axis := self._nodes[index].axis) is not None:
                self._maps[index] = GivenLayout(whole, axis, self._costs)

    def stages(self) -> Iterator[StripStageProfile]:
        for stage, strips, ahead in self._strip_plan.passes:
            once = self._once = _LayerOrder((index, self._layers[index]) for index in stage.whole)
            made, reads = (step.node for step in strips[0]), set(stage.reads)
            turns = _LayerOrder((index, () if index in reads else self._layers[index]) for index in made)
            self._costs.begin()
            self._measured = set()
            self.begin(stage)
            repeats, number = StripRepeats(self._kinds_of(strips)), 0
            while number < len(strips):
                repeat = repeats.at(number, tuple((index, id(rows)) for index, (_, rows) in self._held.items()))
                for place in range(number, number + repeat.period):
                    self._do(strips[place], turns, len(once.layers), repeat, place)
                self._skip(strips, repeat)
                number = repeat.end
            self.end(stage)
            yield self._costs.stage(once.layers, turns.layers, len(strips), ahead=ahead)

    def _kinds_of(self, strips: Strips) -> list[Hashable]:
        """Return what each strip of the current stage does, and with which rows of maps in which layouts."""
        kept = [
            [self._map(step.node).parts(step.span) for step in strip if step.node in self._reads] for strip in strips
        ]
        return [(kind, *parts) for kind, parts in zip(strips.kinds, kept, strict=True)]

    def _do(self, strip: Sequence[ScheduleStep], turns: _LayerOrder, before: int, repeat: Repeat, number: int) -> None:
        """Do all steps of a strip, and count them for all strips that repeat it."""
        alike = range(number, repeat.end, repeat.period)
        with self._costs.times(repeat.times):
            for step in strip:
                if step.span.hi > step.span.lo:
                    self._costs.at(before + turns.places[step.node], alike)
                self.do(step)

    def _skip(self, strips: Strips, repeat: Repeat) -> None:
        """Go on after `repeat`: what is held and kept is the same, of other rows."""
        if not repeat.skipped:
            return
        for index, far in strips.moved(repeat):
            if index in self._held:
                first, rows = self._held[index]
                self._held[index] = first + far, rows
        used_up = self._reads & self._drops
        for step, like in strips.skipped(repeat, self._reads | self._stores):
            self._map(step.node).repeat(like, step.span, put=step.node in self._stores)
            if step.node in used_up:
                self._maps[step.node].forget(step.span.hi)

    def _make_whole(self, index: int) -> OpLayout:
        self._costs.at(self._once.places[index])
        node = self._nodes[index]
        layouts = [self._all(source) for source in node.sources]
        places = tuple(map(node.sources.index, node.sources))

        def prepare(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
            changed = {"device": tensors[-1].device} if node.makes else {}
            return lambda: caller(node, **changed)([RowSlice(tensors[place], NOTHING) for place in places])

        return self._costs.do(("whole", self._kinds[index], *layouts), [*layouts, ANYTHING], prepare)

    def _new_map(self, index: int) -> LayoutMapBuffer:
        node = self._nodes[index]
        if self._graph.needed_whole(index):
            return GivenLayout(self._new_output(node), node.axis or 0, self._costs)
        if index in self._strip_plan.in_host:
            return HostLayouts(node, self._costs)
        return DeviceLayouts(node.axis or 0, self._costs)

    def _map(self, index: int) -> LayoutMapBuffer:
        kept = self._maps[index]
        assert isinstance(kept, LayoutMapBuffer)  # `_new_map` makes no others
        return kept

    def _new_output(self, node: Node) -> OpLayout:
        return dense(node.shape, node.dtype)

    def _fixed(self, index: int) -> OpLayout:
        return self._weights[index]

    def _complete_statistics(self, index: int) -> None:
        groups = self._groups[index]
        few = dense((self._nodes[index].shape[0], groups), self._nodes[index].dtype)
        self._costs.do(("known", groups, few), [few], _knowing(groups))

    def _write(self, index: int, rows: OpLayout, span: Span) -> None:
        layouts = self._outputs[index].narrowed(self._nodes[index].axis or 0, span.hi - span.lo), rows
        self._costs.do(("copy", *layouts), layouts, copying)

    def _make(self, index: int, span: Span) -> OpLayout:
        kind = self._alike[index], span
        if kind not in self._argument_rows:
            self._argument_rows[kind] = self._rows_of_arguments(index, span)
        rows = self._argument_rows[kind]
        there = [self._there(*each) for each in zip(self._graph.arguments[index], rows.spans, strict=True)]
        key = kind, *map(id, there)
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(index, span, rows, there), there
        return self._costs.count(self._outcomes[key][0])

    def _rows_of_arguments(self, index: int, span: Span) -> _ArgumentRows:
        arguments, padding = self._graph.arguments[index], list[int]()
        reaches = [NOTHING if each.needs is None else each.needs(span) for each in arguments]
        wanted = [reach.within(each.rows) for reach, each in zip(reaches, arguments, strict=True)]
        for reach, own in zip(reaches, wanted, strict=True):
            padding += own.lo - reach.lo, reach.hi - own.hi
        if padded := rows_padded(self._nodes[index]):
            padding += min(span.lo, padded), min(self._nodes[index].rows - span.hi, padded)
        return _ArgumentRows(wanted, padding)

    def _outcome(self, index: int, span: Span, given: _ArgumentRows, there: Sequence[OpLayout]) -> Outcome:
        """Outcome of computing the rows `span` of a node from the rows `given` of arguments that lie as `there`."""
        layouts, places = [], []
        uncut: dict[int, int] = {}  # first place of each source that is passed uncut: the same tensor at each place
        for place, (argument, wanted) in enumerate(zip(self._graph.arguments[index], given.spans, strict=True)):
            whole = there[place]
            rows = whole if argument.needs is None else whole.narrowed(argument.axis, wanted.hi - wanted.lo)
            places.append(uncut.setdefault(argument.source, place) if rows is whole else place)
            layouts.append(rows)
        key: Hashable = self._kinds[index], span.hi - span.lo, *given.padding, *places, *layouts

        def prepare(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
            pieces = [RowSlice(tensors[place], has) for place, has in zip(places, given.spans, strict=True)]
            return self._making(index, span, pieces, tensors[-1])

        return self._trials.outcome(key, [*layouts, ANYTHING], prepare)

    def _there(self, argument: StageArgument, wanted: Span) -> OpLayout:
        """Layout that the `wanted` rows of an argument are taken from."""
        if argument.needs is not None and wanted.lo == wanted.hi:  # beyond the border
            return self._new_output(self._nodes[argument.source]).narrowed(argument.axis, 0)
        return self._held[argument.source][1] if argument.by_rows else self._all(argument.source)

    def _making(
        self, index: int, span: Span, pieces: list[RowSlice], anything: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        rule, node = self._graph.rules[index], self._nodes[index]
        assert rule is not None
        if rule.statistics:
            count = self._graph.groups(node.sources[0]) * node.shape[0]
            pieces.append(RowSlice(torch.ones((2, count), device=anything.device), NOTHING))
        if rule.makes:
            pieces.append(RowSlice(anything, NOTHING))
        return lambda: rule.make(pieces, span)

    def _measure(self, index: int, rows: OpLayout, span: Span) -> None:
        groups, again = self._groups[index], index in self._measured
        self._measured.add(index)
        self._costs.do(("measure", groups, again, rows), [rows], _measuring(groups, again=again))

    def _join(self, parts: tuple[OpLayout, OpLayout], axis: int) -> OpLayout:
        return self._costs.do(("join", axis, *parts), parts, joining(axis))

    def _last(self, rows: OpLayout, axis: int, count: int) -> OpLayout:
        rest = rows.narrowed(axis, count)
        return self._costs.do(("clone", rest), [rest], cloning)


class _LayerOrder:
    """Nodes in order, and the layers that each needs → the layer work in order, and the place of each node in it.

    Neighbours that need the same layer, or none (""), share a place.
    """

    def __init__(self, needs: Iterable[tuple[int, Sequence[str]]]) -> None:
        self.layers: list[str] = []
        self.places: dict[int, int] = {}
        for index, layers in needs:
            for layer in layers or ("",):
                if self.layers[-1:] != [layer]:
                    self.layers.append(layer)
            self.places[index] = len(self.layers) - 1


def _layers_of(node: Node, nodes: Sequence[Node], layers: Mapping[str, str]) -> list[str]:
    """Layers whose weights the node takes."""
    owners = (nodes[source].name.rpartition(".")[0] for source in node.sources if nodes[source].op == "weight")
    return list(dict.fromkeys(layers[owner] for owner in owners if owner in layers))


def _measuring(groups: int, *, again: bool) -> Callable[[Sequence[torch.Tensor]], Callable[[], None]]:
    def prepare(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        statistics = Statistics(groups)
        if again:
            statistics.take(tensors[0])
        return lambda: statistics.take(tensors[0])

    return prepare


def _knowing(groups: int) -> Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]:
    def prepare(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        statistics = Statistics(groups)
        statistics.take(tensors[0])
        return statistics.known

    return prepare
