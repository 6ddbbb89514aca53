"""Execution of a program by one rank: its rows of every stage, and what it sends to and gets from the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from tightfit.apply.activations.strips.feature_maps import DeviceMapBuffer
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.program_inputs import LiveWeights
from tightfit.apply.activations.strips.rows import Span, argument, crop
from tightfit.apply.activations.strips.runner import NOTHING, Runner
from tightfit.apply.activations.strips.stages import Stage
from tightfit.apply.activations.strips.statistics import Statistics
from tightfit.apply.activations.strips.strip_plan import PlannedStage
from tightfit.apply.context_parallel.attention import AttentionInputs, attend_by_heads, attend_in_ring
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.rank_plan import RankPlan, sliced_rows
from tightfit.apply.context_parallel.row_shares import transfers
from tightfit.measure.recorder import Recorder

__all__ = ["RankRunner"]


# bytes of rows whose statistics are computed at once: contiguous and in float32, rows are copied for that
MEASURED_AT_ONCE = 2**24


class RankRunner(Runner):
    """One run of the program of `plan` by this rank of `group`; all ranks run it at the same time."""

    def __init__(self, plan: RankPlan, group: RankGroup, weights: LiveWeights, recorder: Recorder) -> None:
        super().__init__(plan.graph, frozenset(), None, weights, recorder)
        self._plan, self._group = plan, group
        self._stored: dict[int, Sequence[Span]] = {}  # rows of each distributed map, by rank
        self._borrowed: list[tuple[int, Span]] = []  # rows of other ranks that a stage reads
        self._attends: Mapping[int, Sequence[Span]] = {}  # of this stage
        self._gathered: dict[int, tuple[Span, torch.Tensor]] = {}  # rows of distributed maps that are here for a stage

    def run_share(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the program's whole outputs for `inputs`, the same on every rank."""
        rank = self._group.rank
        self._begin(inputs, [PlannedStage(each.stage, each.strips[rank], False) for each in self._plan.stages])
        for planned in self._plan.stages:
            stage, strips, self._attends = planned.stage, planned.strips[rank], planned.attends
            for index, rows in planned.wholes[0].items():
                self._gather(index, rows)
            self.begin(stage)
            for index, rows in planned.wholes[1].items():
                self._gather(index, rows)
            self._exchange(planned.reads)
            self._measuring = {index: Statistics(groups) for index, groups in self._groups.items()}
            for number, strip in enumerate(strips, start=1):
                for step in strip:
                    self.do(step)
                    if number == len(strips):
                        self._free(planned.used_up.get(step.node, ()), stage)
            self._return()
            self.end(stage)
            self._stored |= planned.stores
            self._gathered.clear()
        return [self._whole_output(index) for index in self._graph.program.outputs]

    # what ranks send each other

    def _exchange(self, wanted: Mapping[int, Sequence[Span]]) -> None:
        """Get the rows of kept maps that the steps of a stage read here, and send what others read."""
        sent, received = list[tuple[int, torch.Tensor]](), list[tuple[int, torch.Tensor]]()
        pieces: list[tuple[int, Span, torch.Tensor]] = []
        for index, spans in wanted.items():
            node = self._nodes[index]
            for sender, receiver, rows in transfers(node.rows, self._plan.shares, self._stored[index], spans):
                if sender == self._group.rank:
                    sent.append((receiver, self._maps[index].take(rows).contiguous()))
                elif receiver == self._group.rank:
                    pieces.append((index, rows, self._empty(node, rows)))
                    received.append((sender, pieces[-1][2]))
        self._group.exchange(sent, received)
        for index, rows, tensor in pieces:
            self._maps[index].put(tensor, rows)
        self._borrowed = [(index, rows) for index, rows, _ in pieces]

    def _return(self) -> None:
        """Free the rows of other ranks that a stage read."""
        for index, rows in self._borrowed:
            kept = self._maps.get(index)
            if isinstance(kept, _RankMapBuffer):
                kept.remove(rows)

    def _gather(self, index: int, rows: Span) -> None:
        """Get the `rows` of a kept map, the same on all ranks.

        Each comes from the rank whose share it is in: another one that computed it, too, may have rounded differently.
        """
        has, _ = self._gathered.get(index, (NOTHING, None))
        if has.lo <= rows.lo and rows.hi <= has.hi:
            return
        node, shares = self._nodes[index], [self._plan.share(rank, index) for rank in range(self._group.size)]
        there = [_common(share, stored) for share, stored in zip(shares, self._stored[index], strict=True)]
        own = _common(there[self._group.rank], rows)
        mine = self._maps[index].take(own) if own.lo < own.hi else self._empty(node, own)
        self._gathered[index] = rows, self._joined(node, there, rows, mine)

    def _joined(self, node: Node, there: Sequence[Span], rows: Span, mine: torch.Tensor) -> torch.Tensor:
        """Return the `rows` of a node's output, of which each rank has those in `there`, and this one `mine`."""
        axis, rank = node.axis or 0, self._group.rank
        found, own = self._empty(node, rows), _common(there[rank], rows)
        if own.lo < own.hi:
            found.narrow(axis, own.lo - rows.lo, own.hi - own.lo).copy_(mine)
        sent, received = list[tuple[int, torch.Tensor]](), list[tuple[int, torch.Tensor]]()
        placed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for sender, receiver, some in transfers(node.rows, self._plan.shares, there, [rows] * self._group.size):
            if sender == rank:
                sent.append((receiver, mine.narrow(axis, some.lo - own.lo, some.hi - some.lo).contiguous()))
            elif receiver == rank:
                place = found.narrow(axis, some.lo - rows.lo, some.hi - some.lo)
                piece = (
                    place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                )
                received.append((sender, piece))
                placed.append((place, piece))
        self._group.exchange(sent, received)
        for place, piece in placed:
            if piece is not place:
                place.copy_(piece)
        return found

    def _whole_output(self, index: int) -> torch.Tensor:
        """Return an output of the program, gathered from all ranks if each computed some of its rows."""
        if index not in self._outputs:
            return self._values[index]
        node, shares = self._nodes[index], [self._plan.share(rank, index) for rank in range(self._group.size)]
        lo, hi = shares[self._group.rank]
        mine = self._outputs[index].narrow(node.axis or 0, lo, hi - lo)
        return self._joined(node, shares, Span(0, node.rows), mine)

    def _complete_statistics(self, index: int) -> None:
        measured, node = self._measuring.pop(index), self._nodes[index]
        row = math.prod(node.shape[1:]) // self._groups[index] // node.rows
        shares = [self._plan.share(rank, index) for rank in range(self._group.size)]
        counts = [row * (share.hi - share.lo) for share in shares]
        self._known[index] = measured.merged(self._group.all_gather(measured.packed()), counts).known()

    # the rows of this rank

    def _new_map(self, index: int) -> DeviceMapBuffer:
        return _RankMapBuffer(self._nodes[index].axis or 0)

    def _all(self, index: int) -> torch.Tensor:
        return self._gathered[index][1] if index in self._gathered else super()._all(index)

    def _make_whole(self, index: int) -> torch.Tensor:
        wanted = sliced_rows(self._graph.program, index)
        source = self._nodes[index].sources[0] if wanted else -1
        if wanted is None or source not in self._gathered:
            return super()._make_whole(index)
        has, tensor = self._gathered[source]
        rows = crop(tensor, self._nodes[source].axis or 0, has, wanted)
        return rows if has == wanted else rows.clone()  # else the other rows would be kept, too

    def _made(self, index: int, span: Span) -> torch.Tensor:
        if index not in self._attends:
            return super()._made(index, span)
        query, key, value, *masks = self._graph.arguments[index]
        shares = [self._plan.share(rank, key.source) for rank in range(self._group.size)]
        own = shares[self._group.rank]
        inputs = AttentionInputs(
            self._piece(query, span).tensor,
            self._maps[key.source].take(own),
            self._maps[value.source].take(own),
            self._piece(masks[0], span).tensor if masks else None,
            argument(self._nodes[index], 6, "scale"),
        )
        if self._plan.attention == "ring":
            return attend_in_ring(inputs, shares, self._group)
        return attend_by_heads(inputs, self._attends[index], shares, self._group)

    def _free(self, maps: Iterable[int], stage: Stage) -> None:
        """Free what was gathered of `maps`, which no later step of `stage` takes, and what no later stage needs."""
        for index in maps:
            self._gathered.pop(index, None)
            if index in stage.drops:
                self._drop([index])

    def _drop(self, indices: Iterable[int]) -> None:
        listed = list(indices)
        super()._drop(listed)
        for index in listed:
            self._gathered.pop(index, None)

    def _measure(self, index: int, rows: torch.Tensor, span: Span) -> None:
        own = self._own(index, span)
        size = (own.hi - own.lo) * self._nodes[index].row_bytes
        for lo, hi in itertools.pairwise(_even_ends(own, -(-size // MEASURED_AT_ONCE))):
            super()._measure(index, crop(rows, self._nodes[index].axis or 0, span, Span(lo, hi)), Span(lo, hi))

    def _write(self, index: int, rows: torch.Tensor, span: Span) -> None:
        own = self._own(index, span)
        if own.lo < own.hi:
            super()._write(index, crop(rows, self._nodes[index].axis or 0, span, own), own)

    def _own(self, index: int, span: Span) -> Span:
        """Return the rows of `span` that this rank answers for."""
        return _common(self._plan.share(self._group.rank, index), span)

    def _empty(self, node: Node, rows: Span) -> torch.Tensor:
        shape = [rows.hi - rows.lo if dim == node.axis else size for dim, size in enumerate(node.shape)]
        return torch.empty(shape, dtype=node.dtype, device=self._like.device)


class _RankMapBuffer(DeviceMapBuffer):
    """The rows of a map that are on this rank, in pieces: those that it computed, and those that others sent."""

    def put(self, rows: torch.Tensor, span: Span) -> None:
        super().put(rows, span)
        self._strips.sort(key=lambda piece: piece[0])

    def remove(self, span: Span) -> None:
        """Free a piece as it was put; it may be gone already."""
        self._strips = [piece for piece in self._strips if piece[0] != span]


def _even_ends(span: Span, count: int) -> list[int]:
    """Return where `count` pieces of `span` begin and end, or pieces of one row if it has fewer; one end if empty."""
    rows = span.hi - span.lo
    count = min(count, rows)
    return [span.lo, *(span.lo + rows * (piece + 1) // count for piece in range(count))]


def _common(one: Span, other: Span) -> Span:
    """Return the rows in both; an empty span if there are none."""
    lo = max(one.lo, other.lo)
    return Span(lo, max(lo, min(one.hi, other.hi)))
