"""The rows of each node that are still wanted in a stage: as tensors, or as what tells how those lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.schedule import ScheduleStep

__all__ = ["Windows"]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Rows = TypeVar("Rows", bound=_Shaped)


class Windows(Generic[Rows]):
    """Of each node the first row that is held, and the rows."""

    def __init__(
        self,
        nodes: Sequence[Node],
        join: Callable[[tuple[Rows, Rows], int], Rows],
        last: Callable[[Rows, int, int], Rows],
    ) -> None:
        """`join` puts rows after others along an axis; `last` copies so many rows at the end of an axis."""
        self._nodes, self._join, self._last = nodes, join, last
        self._held: dict[int, tuple[int, Rows]] = {}

    def __getitem__(self, index: int) -> tuple[int, Rows]:
        return self._held[index]

    def hold(self, step: ScheduleStep, rows: Rows) -> None:
        """The `rows` that a step made are held, after those of earlier strips that it still wants."""
        held = self._held.pop(step.node, None)
        if held is not None and step.held < step.span.lo:
            self._held[step.node] = held[0], self._join((held[1], rows), self._axis(step.node))
        else:
            self._held[step.node] = step.span.lo, rows

    def trim(self, index: int, first: int) -> None:
        """Rows before the `first` are not wanted any more."""
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
