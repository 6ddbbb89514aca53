"""Weights that are read although no layer that owns them is about to run: loaded on demand, outside of the ring."""

from __future__ import annotations

import torch
from torch import nn

from tightfit.apply.weights.device_pool import DeviceWeightPool
from tightfit.apply.weights.weight_groups import WeightGroup
from tightfit.devices.copy_stream import CopyStream
from tightfit.measure.recorder import Recorder

__all__ = ["OnDemandLoader"]


class OnDemandLoader:
    """Loads weights on demand, and keeps the last group, because its other weights are often read next."""

    def __init__(self, rooms: DeviceWeightPool, stream: CopyStream, recorder: Recorder) -> None:
        self._pool, self._stream, self._recorder = rooms, stream, recorder
        self._last: tuple[WeightGroup, list[nn.Parameter]] | None = None

    def fetch(self, group: WeightGroup, index: int) -> torch.Tensor:
        """Return a copy of one weight of `group`."""
        if self._last is None or self._last[0] is not group:
            self._last = None
            self._recorder.loaded_on_demand()
            with self._recorder.uncounted(), torch.inference_mode(False), torch.no_grad():
                region = self._pool.extra(group.size)
                group.store.send(self._stream, region, self._stream.mark()).wait_on_device()
                self._recorder.moved(bytes_in=group.size)
                self._last = (group, group.views(region))
        return self._last[1][index].detach().clone()

    def forget(self) -> None:
        """Free the memory of the last group."""
        self._last = None
