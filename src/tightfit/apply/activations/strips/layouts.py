"""Maps between stages, without their numbers: how their rows lie, and what it costs to keep and to take them.

Each does with layouts what its namesake in `maps.py` does with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.trials import OpLayout, StageCost, dense

__all__ = ["DeviceLayouts", "GivenLayout", "HostLayouts", "MapLayout"]


class MapLayout(Protocol):
    """Rows of one node's output."""

    def put(self, rows: OpLayout, span: Span, account: StageCost) -> None:
        """Keeps `rows`, which are those of `span`."""

    def take(self, span: Span, account: StageCost) -> OpLayout:
        """These rows, on the device."""

    def forget(self, before: int) -> None:
        """Rows `before` this one are not needed any more."""


class GivenLayout:
    """All rows are there, in one piece."""

    def __init__(self, whole: OpLayout, axis: int) -> None:
        self.whole, self._axis = whole, axis

    def put(self, rows: OpLayout, span: Span, account: StageCost) -> None:
        layouts = self.take(span, account), rows
        account.do(("copy", *layouts), layouts, copying)

    def take(self, span: Span, account: StageCost) -> OpLayout:
        return self.whole.narrowed(self._axis, span.hi - span.lo)

    def forget(self, before: int) -> None:
        return None


class DeviceLayouts:
    """Strips on the device."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._strips: list[tuple[Span, OpLayout]] = []

    def put(self, rows: OpLayout, span: Span, account: StageCost) -> None:
        self._strips.append((span, rows if rows.alone else account.do(("clone", rows), [rows], cloning)))

    def take(self, span: Span, account: StageCost) -> OpLayout:
        parts = []
        for has, strip in self._strips:
            lo, hi = max(span.lo, has.lo), min(span.hi, has.hi)
            if lo < hi:
                parts.append(strip.narrowed(self._axis, hi - lo))
        return parts[0] if len(parts) == 1 else account.do(("join", self._axis, *parts), parts, joining(self._axis))

    def forget(self, before: int) -> None:
        while self._strips and self._strips[0][0].hi <= before:
            del self._strips[0]


class HostLayouts:
    """Rows in host memory, one after another."""

    def __init__(self, node: Node) -> None:
        self._node, self._axis = node, node.axis or 0

    def put(self, rows: OpLayout, span: Span, account: StageCost) -> None:
        account.do(("lay", self._axis, rows), [rows], _moving(self._axis, 0))
        account.send(span.lo * self._node.row_bytes, (span.hi - span.lo) * self._node.row_bytes)

    def take(self, span: Span, account: StageCost) -> OpLayout:
        shape, axis = self._node.shape, self._axis
        lying = dense((span.hi - span.lo, *shape[:axis], *shape[axis + 1 :]), self._node.dtype)
        account.bring(span.lo * self._node.row_bytes, (span.hi - span.lo) * self._node.row_bytes)
        return account.do(("raise", axis, lying), [lying], _moving(0, axis))

    def forget(self, before: int) -> None:
        return None


def copying(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Of the second into the first."""
    return lambda: tensors[0].copy_(tensors[1])


def cloning(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return tensors[0].clone


def joining(axis: int) -> Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]:
    return lambda tensors: lambda: torch.cat(list(tensors), axis)


def _moving(source: int, target: int) -> Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]:
    return lambda tensors: lambda: tensors[0].movedim(source, target).contiguous()
