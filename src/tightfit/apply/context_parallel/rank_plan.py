"""A program's stages, by rank: the steps of each, and the rows of kept maps that each needs and has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from tightfit.apply.activations.strips.program import Program
from tightfit.apply.activations.strips.rows import Span, argument
from tightfit.apply.activations.strips.schedule import ScheduleStep, Strips, StripSchedules
from tightfit.apply.activations.strips.stages import Stage, StageGraph
from tightfit.apply.activations.strips.strip_plan import fewest_strips
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.schema.plan import ContextAttention

__all__ = ["RankPlan", "RankStage", "sliced_rows"]

NOTHING = Span(0, 0)
ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class RankStage:
    """One stage for all ranks; sequences are in the order of ranks.

    `reads` has the rows of each kept map that each rank's steps read, `stores` those that it keeps, and `wholes` the
    maps of which every rank needs rows at once: before the stage's operations on whole tensors, and before its strips.
    `used_up` has, by the last node of a strip that takes them, the maps that attention and others took at once.
    """

    stage: Stage
    strips: tuple[Strips, ...]
    reads: Mapping[int, Sequence[Span]]
    stores: Mapping[int, Sequence[Span]]
    wholes: tuple[Mapping[int, Span], Mapping[int, Span]]
    attends: Mapping[int, Sequence[Span]]  # queries of each rank, by attention whose keys are not gathered
    used_up: Mapping[int, Sequence[int]]


class RankPlan:
    """How the ranks that have `shares` of its rows run the program of `graph`."""

    def __init__(
        self, graph: StageGraph, shares: RowShares, attention: ContextAttention = "gathered",
        strip_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`strip_bytes`: what strips of a rank's rows may take, besides what is kept; None: all its rows at once."""
        self.graph, self.shares, self.attention, self._strip_bytes = graph, shares, attention, strip_bytes
        self._ranks = range(len(shares.speeds))

    @cached_property
    def stages(self) -> tuple[RankStage, ...]:
        return tuple(map(self._planned, self.graph.stages))

    @cached_property
    def gathered_note(self) -> str:
        """Which attentions gather keys although they were to be in a ring or by heads, and why; "" if none does.

        Attention with one head, as autoencoders have it, cannot be by heads, and is not named.
        """
        nodes, ranks = self.graph.program.nodes, len(self._ranks)
        every = [(i, stage) for stage in self.stages for i in stage.stage.strips if nodes[i].word == ATTENTION]
        left = [nodes[index] for index, stage in every if index not in stage.attends]
        if self.attention == "ring":
            count, because = sum(len(each.sources) > 3 for each in left), "a ring takes no masks"
        else:
            heads = [nodes[each.sources[0]].shape[1] for each in left]
            undivided = [each for each in heads if each > 1 and each % ranks and self.attention == "heads"]
            count = len(undivided)
            because = f"{ranks} ranks cannot share {' or '.join(map(str, sorted(set(undivided))))} heads"
        return f"{count} of {len(every)} attentions gather keys, since {because}" if count else ""

    def share(self, rank: int, index: int) -> Span:
        """Return the rows of a node's output that `rank` answers for."""
        return self.shares.of(rank, self.graph.program.nodes[index].rows)

    def distributed(self, index: int) -> bool:
        """Whether each rank keeps only its rows of a node's output."""
        return self.graph.by_rows(index)

    def _planned(self, stage: Stage) -> RankStage:
        owned, count = [partial(self.shares.of, rank) for rank in self._ranks], 1
        if self._strip_bytes is not None:  # the same number on all ranks: that of the one which has most rows
            most = owned[max(self._ranks, key=self.shares.speeds.__getitem__)]
            count = fewest_strips(self.graph, stage, self._strip_bytes, most)
        strips = tuple(StripSchedules(self.graph, stage, share).strips(count) for share in owned)
        reads = {index: [_rows_of(index, each) for each in strips] for index in stage.reads if self.distributed(index)}
        stores = {index: [_rows_of(index, each) for each in strips] for index in stage.stores}
        queries = {index: [_rows_of(index, each) for each in strips] for index in stage.strips}
        attends = {index: spans for index, spans in queries.items() if count == 1 and self._exchanges(index, spans)}
        before, among = self._taken_whole(stage.whole, {}), self._taken_whole(stage.strips, attends)
        keys = {source for index in attends for source in self.graph.program.nodes[index].sources[1:3]}
        used_up = self._used_up(stage, keys.union(among))
        return RankStage(stage, strips, reads, stores, (before, among), attends, used_up)

    def _used_up(self, stage: Stage, maps: set[int]) -> dict[int, list[int]]:
        """Return, by the last node of `stage` that takes them, which of `maps` no later step takes."""
        nodes = self.graph.program.nodes
        last = {source: index for index in stage.strips for source in maps.intersection(nodes[index].sources)}
        found: dict[int, list[int]] = {}
        for source, index in last.items():
            found.setdefault(index, []).append(source)
        return found

    def _exchanges(self, index: int, queries: Sequence[Span]) -> bool:
        """Whether ranks exchange keys or heads of this node, an attention, instead of gathering its keys."""
        node = self.graph.program.nodes[index]
        if self.attention == "gathered" or node.word != ATTENTION:
            return False
        query, key, value, *masks = (self.graph.program.nodes[source] for source in node.sources)
        by_rows = all(self.distributed(source) for source in node.sources[:3])
        if (
            not by_rows
            or key.shape != value.shape
            or any(each.axis != 2 or len(each.shape) != 4 for each in (query, key, value))
        ):
            return False
        if any(span.lo >= span.hi for span in queries) or query.dtype == torch.float64:
            return False
        if self.attention == "ring":  # kernels say 0 of a row without any key, whose log-sum-exp is minus infinity
            return not masks
        heads = query.shape[1], key.shape[1]
        square = any(mask.axis == len(mask.shape) - 2 for mask in masks)
        return not square and all(count % len(queries) == 0 for count in heads)

    def _taken_whole(self, indices: Sequence[int], attends: Mapping[int, object]) -> dict[int, Span]:
        """Return the distributed maps that these nodes take at once, with the rows that they need of them."""
        found: dict[int, Span] = {}
        nodes = self.graph.program.nodes
        for index in indices:
            for place, source in enumerate(nodes[index].sources):
                if index in attends and place in (1, 2):
                    continue
                if self.distributed(source) and not self.graph.taken_by_rows(index, place):
                    rows = sliced_rows(self.graph.program, index) or Span(0, nodes[source].rows)
                    lo, hi = found.get(source, rows)
                    found[source] = Span(min(lo, rows.lo), max(hi, rows.hi))
        return found


def sliced_rows(program: Program, index: int) -> Span | None:
    """Return the rows of its argument that a node takes that is a slice of so many rows at any height; else None."""
    node = program.nodes[index]
    if node.axis is not None or node.word != "slice":
        return None
    source = program.nodes[node.sources[0]]
    if argument(node, 1, "dim", 0) % len(source.shape) != source.axis or argument(node, 4, "step", 1) != 1:
        return None
    start, end, _ = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(source.rows)
    return Span(start, end)


def _rows_of(index: int, strips: Sequence[Sequence[ScheduleStep]]) -> Span:
    """Return the rows of a node that the steps of all strips compute or read."""
    spans = [step.span for strip in strips for step in strip if step.node == index and step.span.lo < step.span.hi]
    return Span(min(span.lo for span in spans), max(span.hi for span in spans)) if spans else NOTHING
