"""Where a map waits from one stage to another: as it was given, on the device, or in host memory."""

from __future__ import annotations

from typing import Protocol

import torch

from tightfit.apply.activations.strips.rows import Span
from tightfit.devices.seam import Device
from tightfit.measure.recorder import Recorder

__all__ = ["DeviceMap", "GivenMap", "HostMap", "Map"]


class Map(Protocol):
    """Rows of one node's output, along `axis`."""

    def put(self, rows: torch.Tensor, span: Span) -> None:
        """Keeps `rows`, which are those of `span`; they come in order."""

    def take(self, span: Span) -> torch.Tensor:
        """These rows, on the device."""

    def forget(self, before: int) -> None:
        """Rows `before` this one are not needed any more."""


class GivenMap:
    """A tensor that somebody else keeps, or that is needed in one piece: all its rows are there."""

    def __init__(self, whole: torch.Tensor, axis: int) -> None:
        self.whole, self._axis = whole, axis

    def put(self, rows: torch.Tensor, span: Span) -> None:
        self.take(span).copy_(rows)

    def take(self, span: Span) -> torch.Tensor:
        return self.whole.narrow(self._axis, span.lo, span.hi - span.lo)

    def forget(self, before: int) -> None:
        return None


class DeviceMap:
    """Strips on the device, as they were made; each goes when its last row is not needed any more."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._strips: list[tuple[Span, torch.Tensor]] = []

    def put(self, rows: torch.Tensor, span: Span) -> None:
        self._strips.append((span, self._own(rows)))

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with nothing else in their memory."""
        alone = rows.untyped_storage().nbytes() <= rows.nbytes
        return rows if alone else rows.clone()

    def take(self, span: Span) -> torch.Tensor:
        parts = []
        for has, strip in self._strips:
            lo, hi = max(span.lo, has.lo), min(span.hi, has.hi)
            if lo < hi:
                parts.append(self._fetch(strip.narrow(self._axis, lo - has.lo, hi - lo)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._axis)

    def _fetch(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def forget(self, before: int) -> None:
        while self._strips and self._strips[0][0].hi <= before:
            del self._strips[0]


class HostMap(DeviceMap):
    """Strips in host memory; who counts is told what crosses."""

    def __init__(self, axis: int, device: Device, recorder: Recorder) -> None:
        super().__init__(axis)
        self._device, self._recorder = device, recorder

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        self._recorder.moved(bytes_out=rows.nbytes)
        with self._recorder.uncounted():
            return self._device.store(rows.contiguous())

    def _fetch(self, rows: torch.Tensor) -> torch.Tensor:
        self._recorder.moved(bytes_in=rows.nbytes)
        with self._recorder.uncounted():
            rows = rows.contiguous()
        return self._device.bring(rows)
