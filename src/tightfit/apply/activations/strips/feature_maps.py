"""Storage of a feature map between stages: as an input, on the device, or in host memory."""

from __future__ import annotations

import torch

from tightfit.apply.activations.strips.program import Node
from tightfit.apply.activations.strips.rows import Span
from tightfit.apply.activations.strips.walker import FeatureMapBuffer
from tightfit.devices.pinned_pool import ActivationHostPool, HostTransfer, bytes_of
from tightfit.measure.recorder import Recorder

__all__ = ["DeviceMapBuffer", "HostMapBuffer", "InputMapBuffer", "TensorMapBuffer"]


TensorMapBuffer = FeatureMapBuffer[torch.Tensor]


class InputMapBuffer(TensorMapBuffer):
    """A tensor that the caller keeps, or that is needed in one piece: all its rows are available."""

    whole: torch.Tensor

    def __init__(self, whole: torch.Tensor, axis: int) -> None:
        self.whole, self._axis = whole, axis

    def put(self, rows: torch.Tensor, span: Span) -> None:
        self.take(span).copy_(rows)

    def take(self, span: Span) -> torch.Tensor:
        return self.whole.narrow(self._axis, span.lo, span.hi - span.lo)


class DeviceMapBuffer(TensorMapBuffer):
    """Strips on the device, as they were computed; each is freed when its last row is forgotten."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._strips: list[tuple[Span, torch.Tensor]] = []

    def put(self, rows: torch.Tensor, span: Span) -> None:
        self._strips.append((span, self._own(rows)))

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` with a storage of their own."""
        alone = rows.untyped_storage().nbytes() <= rows.nbytes
        return rows if alone else rows.clone()

    def take(self, span: Span) -> torch.Tensor:
        parts = []
        for has, strip in self._strips:
            lo, hi = max(span.lo, has.lo), min(span.hi, has.hi)
            if lo < hi:
                parts.append(strip.narrow(self._axis, lo - has.lo, hi - lo))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._axis)

    def forget(self, before: int) -> None:
        while self._strips and self._strips[0][0].hi <= before:
            del self._strips[0]


class HostMapBuffer(TensorMapBuffer):
    """Rows in host memory; bytes copied are reported to the recorder.

    Rows are stored one after another, so that any range of them is contiguous. Copies of the rows put last and of the
    rows expected next may be in flight; their device memory is kept for that.
    """

    def __init__(self, node: Node, host_pool: ActivationHostPool, recorder: Recorder) -> None:
        self._node, self._axis = node, node.axis or 0
        self._host_pool, self._recorder = host_pool, recorder
        self._tape = host_pool.tape(node.bytes)
        self._coming: tuple[Span, torch.Tensor, HostTransfer] | None = None

    def put(self, rows: torch.Tensor, span: Span) -> None:
        lying = rows.movedim(self._axis, 0).contiguous()
        self._recorder.moved(bytes_out=lying.nbytes)
        with self._recorder.uncounted():
            self._tape.write(bytes_of(lying))

    def sent(self) -> None:
        self._tape.sent()

    def expect(self, span: Span) -> None:
        if self._coming is None and span.hi * self._node.row_bytes <= self._tape.written:
            self._coming = self._fetch(span)

    def take(self, span: Span) -> torch.Tensor:
        found, rows, handle = self._coming or self._fetch(span)
        self._coming = None
        handle.settle()
        assert found == span  # only rows that were expected are taken next
        return rows.movedim(0, self._axis).contiguous()

    def _fetch(self, span: Span) -> tuple[Span, torch.Tensor, HostTransfer]:
        node, axis = self._node, self._axis
        shape = (span.hi - span.lo, *node.shape[:axis], *node.shape[axis + 1 :])
        rows = torch.empty(shape, dtype=node.dtype, device=self._host_pool.place)
        self._recorder.moved(bytes_in=rows.nbytes)
        with self._recorder.uncounted():
            return span, rows, self._tape.read(span.lo * node.row_bytes, bytes_of(rows))

    def forget(self, before: int) -> None:
        self._tape.forget(before * self._node.row_bytes)
