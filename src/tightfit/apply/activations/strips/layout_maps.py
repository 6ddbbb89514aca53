"""Feature maps that an estimate keeps as layouts, and what keeping and taking their rows costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from tightfit.apply.activations.strips.op_costs import OpLayout, StageCost, cloning, copying, dense, joining
from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.walker import FeatureMapBuffer

__all__ = ["DeviceLayouts", "GivenLayout", "HostLayouts", "LayoutMapBuffer"]


def _moving(source: int, target: int) -> Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]:
    return lambda tensors: lambda: tensors[0].movedim(source, target).contiguous()


class LayoutMapBuffer(FeatureMapBuffer[OpLayout]):
    """Kept rows of one node's output."""

    def parts(self, span: Span) -> Hashable:
        """Return which parts these rows consist of, without where they are: equal values cost the same to take."""
        return None

    def repeat(self, like: Span, span: Span, *, put: bool) -> None:
        """Take or put the rows `span`, for which the operations are counted, as the rows `like` were before."""


class GivenLayout(LayoutMapBuffer):
    """A whole tensor: all rows are available, in one piece."""

    whole: OpLayout

    def __init__(self, whole: OpLayout, axis: int, costs: StageCost) -> None:
        self.whole, self._axis, self._costs = whole, axis, costs

    def put(self, rows: OpLayout, span: Span) -> None:
        layouts = self.take(span), rows
        self._costs.do(("copy", *layouts), layouts, copying)

    def take(self, span: Span) -> OpLayout:
        return self.whole.narrowed(self._axis, span.hi - span.lo)


class DeviceLayouts(LayoutMapBuffer):
    """Strips on the device."""

    def __init__(self, axis: int, costs: StageCost) -> None:
        self._axis, self._costs = axis, costs
        self._strips: list[tuple[Span, OpLayout]] = []

    def put(self, rows: OpLayout, span: Span) -> None:
        self._strips.append((span, rows if rows.alone else self._costs.do(("clone", rows), [rows], cloning)))

    def take(self, span: Span) -> OpLayout:
        parts = []
        for has, strip in self._strips:
            lo, hi = max(span.lo, has.lo), min(span.hi, has.hi)
            if lo < hi:
                parts.append(strip.narrowed(self._axis, hi - lo))
        return parts[0] if len(parts) == 1 else self._costs.do(("join", self._axis, *parts), parts, joining(self._axis))

    def parts(self, span: Span) -> Hashable:
        near = ((has, rows) for has, rows in self._strips if has.lo < span.hi and span.lo < has.hi)
        return tuple((max(has.lo, span.lo) - span.lo, min(has.hi, span.hi) - span.lo, id(rows)) for has, rows in near)

    def repeat(self, like: Span, span: Span, *, put: bool) -> None:
        if put:
            self._strips.append((span, next(rows for has, rows in reversed(self._strips) if has == like)))

    def forget(self, before: int) -> None:
        while self._strips and self._strips[0][0].hi <= before:
            del self._strips[0]


class HostLayouts(LayoutMapBuffer):
    """Rows in host memory, one after another."""

    def __init__(self, node: Node, costs: StageCost) -> None:
        self._node, self._axis, self._costs = node, node.axis or 0, costs

    def put(self, rows: OpLayout, span: Span) -> None:
        self._costs.do(("lay", self._axis, rows), [rows], _moving(self._axis, 0))
        self._costs.send(span.lo * self._node.row_bytes, (span.hi - span.lo) * self._node.row_bytes)

    def repeat(self, like: Span, span: Span, *, put: bool) -> None:
        copied = self._costs.send if put else self._costs.bring
        copied(span.lo * self._node.row_bytes, (span.hi - span.lo) * self._node.row_bytes)

    def take(self, span: Span) -> OpLayout:
        shape, axis = self._node.shape, self._axis
        lying = dense((span.hi - span.lo, *shape[:axis], *shape[axis + 1 :]), self._node.dtype)
        self._costs.bring(span.lo * self._node.row_bytes, (span.hi - span.lo) * self._node.row_bytes)
        return self._costs.do(("raise", axis, lying), [lying], _moving(0, axis))
