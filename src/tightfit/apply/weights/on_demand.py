"""Weights that code looks at although no layer that owns them is about to run: loaded for that, outside of the ring."""

from __future__ import annotations

import torch
from torch import nn

from tightfit.apply.weights.device_pool import DeviceWeightPool
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.copy_stream import CopyStream
from tightfit.measure.recorder import Recorder

__all__ = ["OnDemandLoader"]


class OnDemandLoader:
    """Keeps the group that was asked for last, because its other weights are often asked for next."""

    def __init__(self, rooms: DeviceWeightPool, stream: CopyStream, recorder: Recorder) -> None:
        self._rooms, self._stream, self._recorder = rooms, stream, recorder
        self._last: tuple[WeightGroup, list[nn.Parameter]] | None = None

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        """A copy of one weight of `group`."""
        if self._last is None or self._last[0] is not group:
            self._last = None
            self._recorder.unforeseen()
            with self._recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
                region = self._rooms.extra(group.size)
                group.store.send(self._stream, region, self._stream.mark()).wait_on_device()
                self._recorder.moved(bytes_in=group.size)
                self._last = (group, group.views(region))
        return self._last[1][index].detach().clone()

    def forget(self) -> None:
        """Gives its memory back."""
        self._last = None
