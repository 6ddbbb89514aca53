"""A stage in strips → the peak bytes that the runner holds. Integer arithmetic only: no tensor is used."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, MutableSequence, Sequence

from tightfit.apply.activations.strips.held_memory import HeldMemory
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.schedule import ScheduleStep, Strips, taken
from tightfit.apply.activations.strips.stages import Stage, StageGraph
from tightfit.apply.activations.strips.strip_peaks import BoundaryState, StripPeak
from tightfit.apply.activations.strips.strip_repeats import Repeat, StripRepeats

__all__ = ["peak_of"]


def peak_of(
    graph: StageGraph,
    stage: Stage,
    strips: Sequence[Sequence[ScheduleStep]],
    in_host: frozenset[int],
    start: BoundaryState,
    following: Mapping[int, Span] | None = None,
    *,
    ahead: bool = False,
    moves: MutableSequence[int] | None = None,
) -> tuple[StripPeak, BoundaryState]:
    """Return the peak while `stage` runs in `strips`, with `start` kept already, and what is kept after it.

    Nodes `in_host` are kept in host memory; with `ahead`, the rows stored last are still in flight, and so are those
    that the next strip reads from there. The first strip of the next stage reads the rows `following`. If the strips
    that maps consist of are unknown, their rows are freed one by one. Workspaces of kernels come on top; only `moves`
    contains them: the bytes of all allocations, in order, and (negative) of all frees.
    """
    count = _MemoryOfStrips(graph, stage, in_host, start, ahead, moves)
    rows = [*(taken(stage, strip) for strip in strips), following or {}]
    repeats, number = StripRepeats(count.kinds(strips)), 0
    while number < len(strips):
        repeat = repeats.at(number, count.state())
        with count.repeated(strips, repeat):
            for place in range(number, number + repeat.period):
                count.expect(rows[place], rows[place + 1])
                for step in strips[place]:
                    count.do(step, rows[place + 1])
                count.sent()
        number = repeat.end
    return StripPeak(count.most, count.most_host), count.end()


class _MemoryOfStrips(HeldMemory):
    """Bytes that the runner holds strip by strip; those that repeat each other are counted once."""

    def kinds(self, strips: Sequence[Sequence[ScheduleStep]]) -> Sequence[Hashable]:
        """Return what each strip does, and of how many strips the rows consist that it reads on the device."""
        if not isinstance(strips, Strips):
            return range(len(strips))
        if not self._strips:
            return strips.kinds
        kept = [[self._parts(step.node, step.span) for step in strip if step.node in self._reads] for strip in strips]
        return [(kind, *parts) for kind, parts in zip(strips.kinds, map(tuple, kept), strict=True)]

    def _parts(self, index: int, span: Span) -> tuple[Span, ...]:
        kept = (has for has, _ in (self._strips or {}).get(index, ()) if has.lo < span.hi and span.lo < has.hi)
        return tuple(Span(has.lo - span.lo, has.hi - span.lo) for has in kept)

    def state(self) -> Hashable:
        """Return what is held between strips, without where the rows are."""
        first: dict[int, int] = {id(memory): -1 for kept in (self._strips or {}).values() for _, memory in kept}
        held = tuple(
            (index, memory.bytes, memory.users, first.setdefault(id(memory), index), index in self._slices)
            for index, memory in self._memory.items()
        )
        if any(each[3] == -1 for each in held):  # rows of a kept strip: which one changes
            return object()
        return held, tuple(self._leaving.items()), tuple(self._coming.items())

    @contextlib.contextmanager
    def repeated(self, strips: Sequence[Sequence[ScheduleStep]], repeat: Repeat) -> Iterator[None]:
        """Count the strips within the block as often as `repeat` says."""
        live, host, begin = self._live, self._host, len(self._moves or ())
        before, before_host = self.most, self.most_host
        if not repeat.skipped or not isinstance(strips, Strips):  # other strips are of unknown kinds
            yield
            return
        self.most, self.most_host = live, host
        yield
        times, more, more_host = repeat.times - 1, self._live - live, self._host - host
        self.most = max(before, self.most + max(0, times * more))
        self.most_host = max(before_host, self.most_host + max(0, times * more_host))
        self._live += times * more
        self._host += times * more_host
        if self._moves is not None:
            once = self._moves[begin:]
            for _ in range(times):
                self._moves.extend(once)
        self._skip(strips, repeat)

    def _skip(self, strips: Strips, repeat: Repeat) -> None:
        """Note which rows are held and kept after the strips that repeat others; their bytes are counted."""
        for index, far in strips.moved(repeat):
            if index in self._windows:
                lo, hi = self._windows[index]
                self._windows[index] = Span(lo + far, hi + far)
        for step, _ in strips.skipped(repeat, self._reads | self._stores):
            index, span = step.node, step.span
            if index in self._stores and index in self._in_host:
                self._there[index] = span.hi
            elif self._strips is not None and index in self._stores and index not in self._whole:
                self._strips.setdefault(index, []).append(self._strip(index, span))
            elif self._strips is not None and index in self._going and index not in self._in_host:
                self._strips[index] = [each for each in self._strips.get(index, ()) if each[0].hi > span.hi]
